"""One life of a tier on disk in a test: blocks by number, written and read, and how it came out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes.crafted_keys import keys

from kvferry.cache.slots import as_slots
from kvferry.tiers.contract import Batch, BatchId, Result, Way
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.superblock import DiskBound, StoreIdentity
from kvferry.tiers.disk.tier import DiskTier, Launch, start_drive
from kvferry.types import TierName

LONG = 60.0
BLOCK_BYTES = 12288
STORE_BYTES = 4 << 20

Rows = np.ndarray[Any, Any]


def setups(
    folder: Path,
    num_drives: int = 1,
    *,
    block_bytes: int = BLOCK_BYTES,
    size: int = STORE_BYTES,
    keep_free: int = 0,
    key: bytes | None = None,
    **options: Any,
) -> list[DriveSetup]:
    """``options`` are of :class:`DriveSetup`, where its defaults are too slow for tests."""
    told: dict[str, Any] = {
        "num_threads": 2,
        "commit_seconds": 0.02,
        "check_seconds": 0.05,
        **options,
    }
    name = StoreIdentity(bytes(32), block_bytes, is_sealed=key is not None, num_stripes=num_drives)
    bound = DiskBound(size, keep_free)
    return [
        DriveSetup(
            str(folder / f"drive-{at}"), replace(name, stripe=at), bound, os.getpid(), key, **told
        )
        for at in range(num_drives)
    ]


class DiskLife:
    """Owns a tier and the memory of its batches. Block ``n`` is at place ``n`` under key ``n``."""

    def __init__(
        self,
        folder: Path,
        launch: Launch = start_drive,
        num_drives: int = 1,
        *,
        start_deadline: float = LONG,
        **options: Any,
    ) -> None:
        self.tier = DiskTier(
            TierName("disk"),
            setups(folder, num_drives, **options),
            launch,
            start_deadline=start_deadline,
        )
        self.block_bytes = self.tier.block_bytes
        if start_deadline == LONG:
            wait_until(self.tier.is_open)
        self._next_id = 0
        self._memory: list[Rows] = []

    def __enter__(self) -> DiskLife:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def send(
        self, way: Way, numbers: Sequence[int], rows: Rows, *, within: float = LONG
    ) -> BatchId:
        self._next_id += 1
        self._memory.append(rows)
        starts = rows.ctypes.data + np.arange(len(numbers)) * rows.strides[0]
        batch = Batch(
            BatchId(self._next_id),
            way,
            keys(numbers),
            time.monotonic() + within,
            starts[:, None],
            np.array([self.block_bytes]),
            as_slots(numbers),
        )
        self.tier.submit(batch)
        return batch.id

    def do(self, way: Way, numbers: Sequence[int], rows: Rows, *, within: float = LONG) -> Result:
        sent = self.send(way, numbers, rows, within=within)
        (result,) = self.tier.drain(LONG)
        assert result.batch_id == sent
        return result

    def write(self, numbers: Sequence[int], rows: Rows | None = None) -> Rows:
        rows = self.fresh(len(numbers)) if rows is None else rows
        result = self.do(Way.WRITE, numbers, rows)
        assert result.ok.all(), result.reasons
        return rows

    def read(self, numbers: Sequence[int], *, within: float = LONG) -> tuple[Rows, Result]:
        into = np.full((len(numbers), self.block_bytes), 0xEE, dtype=np.uint8)
        return into, self.do(Way.READ, numbers, into, within=within)

    def expect(self, numbers: Sequence[int], rows: Rows) -> None:
        """All of these are there, and right."""
        into, result = self.read(numbers)
        assert result.ok.all(), result.reasons
        assert (into == rows).all()

    def fresh(self, count: int) -> Rows:
        return np.random.default_rng().integers(0, 256, (count, self.block_bytes), dtype=np.uint8)

    def wait_durable(self) -> None:
        wait_until(lambda: not self.tier.figures().pending and not self.tier.figures().durable_lag)

    def wait_ailing(self) -> str:
        wait_until(lambda: bool(self.tier.ailment))
        return self.tier.ailment

    def wait_well(self) -> None:
        wait_until(lambda: not self.tier.ailment)


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.002)
