"""What a drive process is told when it starts, and what it answers when its store is open."""

from __future__ import annotations

import base64
import json
import os
import struct
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from kvferry.tiers.ipc.channel import FrameKind, frame

_READY = struct.Struct("<qqqq16sI")
_FORGET = struct.Struct("<qq")


class StoreAt(NamedTuple):
    """One store on this or another host: its folder, and the id that was drawn for it."""

    folder: str
    store_id: bytes


@dataclass(frozen=True)
class ReadyMessage:
    """A drive is open: its places, epoch and file system, and how many blocks it recovered."""

    store: StoreAt
    num_places: int
    epoch: int
    device: int
    num_recovered: int
    report: str


def pack_ready(ready: ReadyMessage) -> bytes:
    folder = os.fsencode(ready.store.folder)
    numbers = (ready.num_places, ready.epoch, ready.device, ready.num_recovered)
    head = _READY.pack(*numbers, ready.store.store_id, len(folder))
    return frame(FrameKind.READY, head + folder + ready.report.encode())


def unpack_ready(body: bytes) -> ReadyMessage:
    num_places, epoch, device, num_recovered, store_id, length = _READY.unpack_from(body)
    end = _READY.size + length
    folder, report = os.fsdecode(body[_READY.size : end]), body[end:].decode()
    store = StoreAt(folder, store_id)
    return ReadyMessage(store, num_places, epoch, device, num_recovered, report)


def pack_forget(generation: int, epoch: int) -> bytes:
    return frame(FrameKind.FORGET, _FORGET.pack(generation, epoch))


def unpack_forget(body: bytes) -> tuple[int, int]:
    generation, epoch = _FORGET.unpack(body)
    return generation, epoch


COMMIT_SECONDS = 0.5
"""How long a block that was written may wait for the commit that makes it durable to begin."""

NUM_THREADS, JOB_BYTES = 8, 4 << 20
"""Threads for each way, and the longest call of one. While some wait for the drive the others copy
and check: 4 x 8 MiB read 2.5 GB/s of a drive's 3.1, 8 x 4 MiB all of it; longer or more and the
buffers leave the processor's cache: 8 x 8 MiB 2.6, 16 x 2 MiB 2.0. (16 vCPU, a virtual drive,
Linux 6.18, 2026-11-16.)
"""


_BYTES = ("namespace", "family", "families", "key")


@dataclass(frozen=True)
class DriveSetup:
    """One store on one drive, and how to work on it. ``key`` is never shown."""

    path: str
    """The directory the user named; the store lies below it."""
    block_bytes: int
    size: int
    """What everything of this host under ``path`` may take."""
    pid: int
    """The engine's, whose memory the blocks are in."""
    namespace: bytes = bytes(32)
    family: bytes = b""
    families: bytes = b""
    """Of all engines of this server here, one after the other; empty: there is one."""
    label: str = ""
    rank: int = 0
    num_ranks: int = 1
    num_ranks_here: int = 1
    stripe: int = 0
    num_stripes: int = 1
    keep_free: int = 0
    for_others: float = 0.0
    key: bytes | None = field(default=None, repr=False)
    direct: bool = True
    deadline: float = 10.0
    num_threads: int = NUM_THREADS
    num_write_threads: int | None = None
    """As many as read, if nobody says."""
    job_bytes: int = JOB_BYTES
    commit_seconds: float = COMMIT_SECONDS
    check_seconds: float = 1.0
    generation: int = 0
    """Orders count from here; what is found at the start belongs to it."""
    device: int | None = None
    """The file system it was on when it was first started. A directory that vanished is not made
    anew, least of all on what lies below a mount that is gone.
    """

    def pack(self) -> bytes:
        told = asdict(self)
        for name in _BYTES:
            if told[name] is not None:
                told[name] = base64.b64encode(told[name]).decode()
        return json.dumps(told).encode()

    @classmethod
    def unpack(cls, data: bytes) -> DriveSetup:
        told = json.loads(data)
        for name in _BYTES:
            if told[name] is not None:
                told[name] = base64.b64decode(told[name])
        return cls(**told)
