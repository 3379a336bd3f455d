"""A page that an engine and a drive process share: counters, a heartbeat, who is copying just now.

The drive writes, the engine reads, and neither waits for the other::

    words 0..      counters, one word each (``Count``)
    words 64..     for each thread of the drive: 1 while it writes into the engine's memory
    from 4096 on   the blocks found at the start: their places, then their keys
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.errors import TransferError
from kvferry.tiers.disk.messages import Numbers, Words
from kvferry.types import KEY_BYTES, SlotArray

_PAGE = 4096
_COPYING = 64
MOST_THREADS = 64
_MICRO = 1e-6
_BLOCK_BYTES = 8 + KEY_BYTES

Flags = npt.NDArray[np.bool_]


class Count(IntEnum):
    """What a drive counts, and where in the page."""

    HEARTBEAT = 0
    READ_BYTES = 1
    WRITTEN_BYTES = 2
    READ_MICROSECONDS = 3  # summed over its threads: time in calls to the drive
    WRITE_MICROSECONDS = 4
    ABSENT = 5  # blocks that failed, by why
    DAMAGED = 6
    DRIVE_ERRORS = 7
    LATE = 8
    UNREACHABLE = 9
    OTHER_FAILURES = 10
    COMMITS = 11
    COMMIT_MICROSECONDS = 12
    PENDING = 13  # blocks written and not yet durable
    PENDING_SINCE = 14  # microseconds of the monotonic clock; 0: none
    JOURNAL_BYTES = 15
    DIRECT = 16  # 1: past the page cache


FAILURES = {
    Count.ABSENT: "absent",
    Count.DAMAGED: "damaged",
    Count.DRIVE_ERRORS: "drive",
    Count.LATE: "late",
    Count.UNREACHABLE: "unreachable",
    Count.OTHER_FAILURES: "other",
}
"""Why blocks failed, as figures name it."""


@dataclass(frozen=True)
class DiskFigures:
    """What one rank's disk did so far, all its directories together.

    ``failed`` counts blocks by reason. ``durable_lag`` is the age in seconds of the oldest block
    that is written and not yet durable.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    commit_seconds: float = 0.0
    pending: int = 0
    durable_lag: float = 0.0
    journal_bytes: int = 0
    direct: bool = False
    restarts: int = 0
    drives_away: int = 0


class Status:
    """The shared page. Owns its mapping and its descriptor, not what is counted in it."""

    def __init__(self, fd: int | None = None) -> None:
        """Open the page behind ``fd``, or make a new one."""
        self.fd = os.memfd_create("kvferry-drive", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _PAGE)
        self._mapping = mmap.mmap(self.fd, _PAGE)
        self._words: Numbers = np.frombuffer(self._mapping, dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, what: Count, amount: int) -> None:
        with self._lock:
            self._words[what] += amount

    def put(self, what: Count, value: int) -> None:
        self._words[what] = value

    def get(self, what: Count) -> int:
        return int(self._words[what])

    def set_copying(self, thread: int, is_copying: bool) -> None:
        """Around every write into the engine's memory; see ``process.py``."""
        self._words[_COPYING + thread] = is_copying

    @property
    def is_copying(self) -> bool:
        return bool(self._words[_COPYING : _COPYING + MOST_THREADS].any())

    def put_blocks(self, count: int, pieces: Iterable[tuple[Keys, SlotArray, object]]) -> None:
        """Lay down the ``count`` blocks the drive still has, for the engine to take."""
        os.ftruncate(self.fd, _PAGE + count * _BLOCK_BYTES)
        done = 0
        for keys, places, _ in pieces:
            _write_all(self.fd, _PAGE + done * 8, places)
            _write_all(self.fd, _PAGE + count * 8 + done * KEY_BYTES, keys.array)
            done += len(places)

    def take_blocks(self, count: int) -> tuple[Numbers, Words]:
        """Take them: places and keys. They are the shared memory itself, which goes with them."""
        if not count:
            return np.empty(0, dtype=np.int64), np.empty((0, KEY_WORDS), dtype=np.uint64)
        size = _PAGE + count * _BLOCK_BYTES
        if os.fstat(self.fd).st_size < size:
            raise TransferError("the drive said more blocks than it laid down")
        mapping = mmap.mmap(self.fd, size)
        places = np.frombuffer(mapping, np.int64, count, _PAGE)
        keys = np.frombuffer(mapping, np.uint64, KEY_WORDS * count, _PAGE + count * 8)
        return places, keys.reshape(count, KEY_WORDS)

    def figures(self) -> DiskFigures:
        get = self.get
        since = get(Count.PENDING_SINCE)
        lag = max(0.0, time.monotonic() - since * _MICRO) if since else 0.0
        return DiskFigures(
            read_bytes=get(Count.READ_BYTES),
            written_bytes=get(Count.WRITTEN_BYTES),
            read_seconds=get(Count.READ_MICROSECONDS) * _MICRO,
            write_seconds=get(Count.WRITE_MICROSECONDS) * _MICRO,
            failed={name: get(count) for count, name in FAILURES.items()},
            commits=get(Count.COMMITS),
            commit_seconds=get(Count.COMMIT_MICROSECONDS) * _MICRO,
            pending=get(Count.PENDING),
            durable_lag=lag,
            journal_bytes=get(Count.JOURNAL_BYTES),
            direct=bool(get(Count.DIRECT)),
        )

    def close(self) -> None:
        """Give the descriptor back; what was counted can still be read."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def add_up(parts: list[DiskFigures]) -> DiskFigures:
    """Several drives' figures, or several lives', as one."""
    failed: dict[str, int] = {}
    for part in parts:
        for name, count in part.failed.items():
            failed[name] = failed.get(name, 0) + count
    return DiskFigures(
        read_bytes=sum(part.read_bytes for part in parts),
        written_bytes=sum(part.written_bytes for part in parts),
        read_seconds=sum(part.read_seconds for part in parts),
        write_seconds=sum(part.write_seconds for part in parts),
        failed=failed,
        commits=sum(part.commits for part in parts),
        commit_seconds=sum(part.commit_seconds for part in parts),
        pending=sum(part.pending for part in parts),
        durable_lag=max((part.durable_lag for part in parts), default=0.0),
        journal_bytes=sum(part.journal_bytes for part in parts),
        direct=all(part.direct for part in parts),
        restarts=sum(part.restarts for part in parts),
        drives_away=sum(part.drives_away for part in parts),
    )


def _write_all(fd: int, at: int, array: npt.NDArray[Any]) -> None:
    data = np.ascontiguousarray(array).ravel().view(np.uint8).data
    while len(data):
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
