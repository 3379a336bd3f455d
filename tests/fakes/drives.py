"""Drives that run in a thread of the test, and files that do what a bad drive does."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from tests.fakes.crafted_keys import key

from kvferry.core.keys import Key
from kvferry.errors import ConfigError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.drive import DriveServer
from kvferry.tiers.disk.files import SECTOR
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.tier import Stripes
from kvferry.tiers.ipc.child import EngineLink, serve_engine
from kvferry.tiers.ipc.memory import EngineMemory, StatusPage
from kvferry.tiers.ipc.messages import Channel, Flags, FrameKind, Numbers, frame
from kvferry.tiers.ipc.process import ChildProcess

LONG = 60.0


def signal_drives(number: int) -> None:
    """Send a signal to this process's drive processes, and to none of its other children."""
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if b"kvferry.tiers.disk.drive" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), number)


@dataclass(eq=False)
class Weather:
    """What the drives of one tier are like today. Block ``n`` has key and place ``n``."""

    stripes: Stripes | None = None
    fault: Callable[[Way, Key], None] | None = None
    ailment: str = ""
    is_short: bool = False
    """Calls to the drive move a part of what they could."""
    sync: Callable[[], object] | None = None
    """Called before each sync."""
    is_over: bool = False
    files: list[WeatheredFile] = field(default_factory=list)

    drives: list[ThreadDrive] = field(default_factory=list)

    def launch(self, setup: DriveSetup) -> ThreadDrive:
        if self.is_over:
            raise ConfigError("no drive is started any more")
        opened = partial(WeatheredFile, weather=self, stripe=setup.identity.stripe)
        self.drives.append(ThreadDrive(setup, opened))
        return self.drives[-1]

    def be_patient(self, seconds: float) -> None:
        """From here on a call to a drive may take so long, before it is given up."""
        for drive in self.drives:
            assert drive.server is not None
            drive.server._queue.deadline = seconds

    def kill(self) -> None:
        """From here on nothing reaches the medium, and no drive comes back."""
        self.is_over = True
        for drive in self.drives:
            drive.die()


class WeatheredFile(BlockFile):
    """The real file; each block's fault comes before each call that concerns it."""

    def __init__(self, path: str, pitch: int, *, weather: Weather, stripe: int) -> None:
        super().__init__(path, pitch)
        self.path = path
        self.weather = weather
        self.stripe = stripe
        weather.files.append(self)

    def read(self, place: int, data: memoryview) -> None:
        self._suffer(Way.READ, place, data)
        super().read(place, data)

    def write(self, place: int, data: memoryview) -> None:
        self._suffer(Way.WRITE, place, data)
        super().write(place, data)

    def sync(self) -> None:
        if self.weather.sync is not None:
            self.weather.sync()
        super().sync()

    def _call(self, call: Callable[..., int], at: int, data: memoryview) -> int:
        if self.weather.is_short and len(data) > SECTOR:
            data = data[: len(data) // 3 // SECTOR * SECTOR or SECTOR]
        return super()._call(call, at, data)

    def check(self) -> None:
        if self.weather.ailment:
            raise OSError(5, self.weather.ailment)
        super().check()

    def _suffer(self, way: Way, place: int, data: memoryview) -> None:
        fault, stripes = self.weather.fault, self.weather.stripes
        if fault is not None and stripes is not None:
            there = np.arange(place, place + max(1, len(data) // self._pitch))
            for number in stripes.join(self.stripe, there)[1].tolist():
                fault(way, key(number))

    def flip(self, place: int, offset: int = 0) -> None:
        """Change one bit of a block on the medium, behind everybody's back."""
        fd = os.open(self.path, os.O_RDWR)
        at = place * self._pitch + offset
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 4]), at)
        os.close(fd)

    def swap(self, one: int, other: int) -> None:
        """Let two blocks lie in each other's place, as a drive does that mixes up addresses."""
        fd = os.open(self.path, os.O_RDWR)
        blocks = [os.pread(fd, self._pitch, place * self._pitch) for place in (one, other)]
        for place, block in zip((other, one), blocks, strict=True):
            os.pwrite(fd, block, place * self._pitch)
        os.close(fd)


class Lent(EngineMemory):
    """The engine's memory, until the drive is killed."""

    is_taken_back = False

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.lock = threading.Lock()

    def deliver(self, here: Numbers, there: Numbers, sizes: Numbers) -> Flags:
        with self.lock:
            if self.is_taken_back:
                return np.zeros(len(sizes), dtype=bool)
            return super().deliver(here, there, sizes)


class ThreadDrive(ChildProcess):
    """A drive that is a thread: as a process, but that killing it cannot end a call under way.

    Then it keeps its store until the call ends, as a process does that hangs in the kernel.
    """

    def __init__(self, setup: DriveSetup, open_file: Callable[..., BlockFile] = BlockFile) -> None:
        ours, theirs = socket.socketpair()
        self.status = StatusPage()
        self.pid = os.getpid()
        self._theirs = Channel(theirs)
        self._page = StatusPage(os.dup(self.status.fd))
        self._memory = Lent(self.pid)
        self._open_file = open_file
        self.server: DriveServer | None = None
        self.channel = Channel(ours)
        self.channel.send(frame(FrameKind.HELLO, pickle.dumps(setup)))
        self._thread = threading.Thread(target=self._run, name="drive", daemon=True)
        self._thread.start()

    def say(self, data: bytes) -> None:
        """Send something of the test's own to whoever started the drive."""
        self._theirs.send(data)

    def _run(self) -> None:
        serve_engine(self._serve, self._theirs, self._page, self._memory)
        self._theirs.close()
        self._page.close()

    def _serve(self, engine: EngineLink) -> None:
        server = self.server = DriveServer(engine, open_file=self._open_file)
        server.serve()
        self._theirs.end()
        if server._is_hung:
            server._queue.close(LONG, "killed")
            self._let_go()
            server._commits.close(LONG)

    def kill(self) -> None:
        """Touch the engine's memory no more, and end."""
        with self._memory.lock:
            self._memory.is_taken_back = True
        if self.server is not None:
            self.server._queue.close(0.0, "killed")
        self._theirs.end()
        self._theirs.is_ended = True
        self._theirs.wake()

    def stop_memory_writes(self, timeout: float = 0.0) -> bool:
        self.kill()
        return True

    def die(self) -> None:
        """As a process does: the journal hears of nothing more, and the store is free."""
        self._let_go()
        self.kill()

    def _let_go(self) -> None:
        assert self.server is not None
        store = self.server._store
        for file in (store.index._table.file, store.index._state):
            file.close()
        store._lock.close()

    def wait(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ending(self) -> str:
        return "ended"

    def close(self) -> None:
        self.channel.close()
        self.status.close()
