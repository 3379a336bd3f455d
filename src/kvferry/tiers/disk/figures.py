"""The counters of a drive process in its status page, and what they add up to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.tiers.ipc.messages import Numbers, Words
from kvferry.tiers.ipc.status_page import StatusPage
from kvferry.types import KEY_BYTES, SlotArray

_MICRO = 1e-6

Flags = npt.NDArray[np.bool_]


class Count(IntEnum):
    """What a drive counts, by its word in the status page; word 0 is the heartbeat."""

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


def put_blocks(
    status: StatusPage, count: int, pieces: Iterable[tuple[Keys, SlotArray, object]]
) -> None:
    """Lay down the ``count`` blocks that a drive recovered: all places, then all keys."""
    status.reserve(count * (8 + KEY_BYTES))
    done = 0
    for keys, places, _ in pieces:
        status.write_at(done * 8, places)
        status.write_at(count * 8 + done * KEY_BYTES, keys.array)
        done += len(places)


def take_blocks(status: StatusPage, count: int) -> tuple[Numbers, Words]:
    """Return places and keys of the recovered blocks; both are the shared memory itself."""
    if not count:
        return np.empty(0, dtype=np.int64), np.empty((0, KEY_WORDS), dtype=np.uint64)
    data = status.read_from(count * (8 + KEY_BYTES))
    keys = np.frombuffer(data, np.uint64, KEY_WORDS * count, count * 8)
    return np.frombuffer(data, np.int64, count), keys.reshape(count, KEY_WORDS)


def figures_of(status: StatusPage) -> DiskFigures:
    """Return what a drive process has counted."""
    get = status.get
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
