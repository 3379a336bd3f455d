"""Messages between an engine and a drive process: the setup, the reply to it, the counters.

Setup and reply are pickled: both processes run one release. A FORGET message has two numbers: the
reset number, and whether later blocks are kept for other engines.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Recovered
from kvferry.tiers.disk.superblock import DiskBound, StoreAt, StoreIdentity
from kvferry.tiers.ipc.memory import StatusPage
from kvferry.tiers.ipc.messages import Numbers, Words

COMMIT_SECONDS = 0.5
"""Seconds at most from a write until the commit that makes it durable begins."""

NUM_THREADS, JOB_BYTES = 8, 4 << 20
"""Threads per direction, and bytes of a thread's longest call. While some wait for the drive, the
others copy and check. Of a drive's 3.1 GB/s 4 x 8 MiB read 2.5, 8 x 4 MiB all, 8 x 8 MiB 2.6, 16 x
2 MiB 2.0."""

_MICRO = 1e-6


@dataclass(frozen=True)
class ReadyMessage:
    """Says that a drive is open: its size, reset number, file system and recovered blocks."""

    store: StoreAt
    num_places: int
    reset_number: int
    device: int
    num_recovered: int
    report: str


@dataclass(frozen=True)
class DriveSetup:
    """One store on one drive, and how to serve it. ``key`` is never shown."""

    path: str
    """The directory the user named; the store lies below it."""
    identity: StoreIdentity
    bound: DiskBound
    pid: int
    """The engine's pid, which the store's lock names."""
    key: bytes | None = field(default=None, repr=False)
    deadline: float = 10.0
    num_threads: int = NUM_THREADS
    job_bytes: int = JOB_BYTES
    commit_seconds: float = COMMIT_SECONDS
    check_seconds: float = 1.0
    write_per_day: float | None = None
    """Bytes that may be written to the store in 24 hours; None: unlimited."""
    before: ReadyMessage | None = None
    """The ready message of the engine's earlier process; None at the first start.

    A restarted process must find the same store. It makes no directory anew, least of all below a
    lost mount, and changes no size. The reset number is the last one that the engine knows to be
    durable.
    """
    is_kept: bool = True
    """Whether blocks stored under that number are for other engines too."""


class Count(IntEnum):
    """A drive's counters, each by its word in the status page; word 0 is the heartbeat."""

    READ_BYTES = 1
    WRITTEN_BYTES = 2
    READ_MICROSECONDS = 3  # summed over its threads: time in calls to the drive
    WRITE_MICROSECONDS = 4
    ABSENT = 5  # from here to OTHER: failed blocks, by reason
    DAMAGED = 6
    DRIVE = 7
    LATE = 8
    UNREACHABLE = 9
    OTHER = 10
    PENDING = 11  # blocks written and not yet durable
    PENDING_SINCE = 12  # microseconds of the monotonic clock; 0: none


FAILURES = {count: count.name.lower() for count in Count if Count.ABSENT <= count <= Count.OTHER}
"""Names of the failure counters in figures."""


@dataclass(frozen=True)
class DiskFigures:
    """Totals of one rank's disk so far, over all its directories.

    ``failed`` counts blocks by reason. ``durable_lag`` is the age in seconds of the oldest block
    that is written and not yet durable.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    durable_lag: float = 0.0
    restarts: int = 0
    drives_away: int = 0


def figures_of(status: StatusPage) -> DiskFigures:
    get = status.get
    since = get(Count.PENDING_SINCE)
    return DiskFigures(
        read_bytes=get(Count.READ_BYTES),
        written_bytes=get(Count.WRITTEN_BYTES),
        read_seconds=get(Count.READ_MICROSECONDS) * _MICRO,
        write_seconds=get(Count.WRITE_MICROSECONDS) * _MICRO,
        failed={name: get(count) for count, name in FAILURES.items()},
        pending=get(Count.PENDING),
        durable_lag=max(0.0, time.monotonic() - since * _MICRO) if since else 0.0,
    )


def add_up(parts: list[DiskFigures]) -> DiskFigures:
    """Return the sum of the figures of several drives, or of several processes of one drive."""
    failed: dict[str, int] = {}
    for part in parts:
        for name, count in part.failed.items():
            failed[name] = failed.get(name, 0) + count
    whole: dict[str, Any] = {
        each.name: sum(getattr(part, each.name) for part in parts)
        for each in fields(DiskFigures)
        if each.name not in ("failed", "durable_lag")
    }
    lag = max((part.durable_lag for part in parts), default=0.0)
    return DiskFigures(**whole, failed=failed, durable_lag=lag)


def put_blocks(status: StatusPage, found: Recovered) -> None:
    """Write the recovered blocks into shared memory, for the engine."""
    places, keys = take_blocks(status, len(found[1]))
    places[:], keys[:] = found[1], found[0].array


def take_blocks(status: StatusPage, count: int) -> tuple[Numbers, Words]:
    """Return places and keys of the recovered blocks, as views of the shared memory."""
    if not count:
        return np.empty(0, dtype=np.int64), np.empty((0, KEY_WORDS), dtype=np.uint64)
    data = status.array_memory(count * (8 + KEY_BYTES))
    keys = np.frombuffer(data, np.uint64, KEY_WORDS * count, count * 8)
    return np.frombuffer(data, np.int64, count), keys.reshape(count, KEY_WORDS)
