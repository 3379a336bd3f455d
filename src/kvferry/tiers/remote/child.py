"""One process beside the engine: started, spoken to, ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from kvferry.tiers.disk.channel import Channel
from kvferry.tiers.disk.engine_memory import open_own_memory
from kvferry.tiers.disk.messages import FrameKind, frame

_ROOT = str(Path(__file__).parents[3])

# Ctrl-C is for the engine, which ends us by the line. A group of our own will do: in a session of
# our own, Linux (sched_autogroup) gives us and the engine the processor by turns, and beside a busy
# engine on two cores gets took half as long again.
_APART: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

# It needs a few small modules of kvferry, not the library: packages are entered without running
# their ``__init__``, which would take longer than all the rest.
_START = """
import importlib, sys, types
root = sys.argv.pop(1)
for end in ("", ".core", ".tiers", ".tiers.disk", ".tiers.remote"):
    name = "kvferry" + end
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
importlib.import_module("kvferry.tiers.remote.process").main()
"""


class Beside(Protocol):
    """A process beside the engine, or in tests what stands in for one."""

    channel: Channel
    pid: int

    @property
    def is_gone(self) -> bool: ...
    @property
    def end(self) -> str: ...
    def kill(self) -> None: ...
    def close(self, timeout: float) -> None: ...


class ProcessBeside:
    """Owns the process and the line to it. It reaches our memory only while it lives.

    Whoever has ended it and seen :attr:`is_gone` may use the memory again: a process that is killed
    copies nothing any more, and one that cannot be ended yet (it waits inside the kernel) is not
    gone.
    """

    def __init__(self, hello: Mapping[str, object], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        memory = open_own_memory()
        told = [theirs.fileno()] + ([memory] if memory is not None else [])
        file = hello.get("host_file")  # its number is the same there
        passed = told + ([file["fd"]] if isinstance(file, dict) else [])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, _ROOT, *map(str, told)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if "KVFERRY_DEBUG" in environment else subprocess.DEVNULL,
                **_APART,
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory)
        self.pid = self._process.pid
        self.channel = Channel(ours)
        self.channel.send(
            frame(FrameKind.HELLO, json.dumps({**hello, "pid": os.getpid()}).encode())
        )

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        return "it runs" if code is None else f"it ended with {code}"

    def kill(self) -> None:
        if not self.is_gone:
            self._process.kill()

    def close(self, timeout: float) -> None:
        """Let it end by itself, or end it."""
        self.channel.end()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            with suppress(subprocess.TimeoutExpired):  # in the kernel: the signal waits for it
                self._process.wait(timeout)
        self.channel.close()


Launch = Callable[[Mapping[str, object], Mapping[str, str]], Beside]
