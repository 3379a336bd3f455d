"""The order of events between a drive's threads and its index, where a sync of blocks fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.slots import as_slots
from kvferry.tiers.disk.index import DiskIndex, Shape
from kvferry.tiers.disk.io_workers import WriteTracker
from kvferry.tiers.disk.superblock import StoreIdentity, Superblock
from kvferry.tiers.ipc.memory import StatusPage


@pytest.fixture
def index(tmp_path: Path) -> Iterator[DiskIndex]:
    (tmp_path / "index").write_bytes(bytes(Shape(16).file_bytes(10)))
    (tmp_path / "state").write_bytes(bytes(4096))
    made = DiskIndex.open(tmp_path, Superblock(StoreIdentity(bytes(32), 4096), 10))
    yield made
    made.close()


def write(tracker: WriteTracker, place: int, begun: int) -> str:
    row = np.random.default_rng().integers(0, 256, (1, 16), dtype=np.uint8)
    return tracker.end_write(
        as_slots([place]), keys([place]).array, row, tracker._generation, begun
    )


def test_a_failed_sync_loses_all_that_it_may_have_dropped(index: DiskIndex) -> None:
    """What was noted before, what was noted while it ran, and what was still being written."""
    tracker = WriteTracker(index, StatusPage(), 0.5)
    assert write(tracker, 1, tracker.begin_write(as_slots([1]))) == ""
    mark = tracker.begin_commit()
    assert write(tracker, 2, tracker.begin_write(as_slots([2]))) == ""
    under_way = tracker.begin_write(as_slots([3]))
    tracker.fail_commit(mark, are_lost=True)
    assert "did not keep" in write(tracker, 3, under_way)
    assert write(tracker, 4, tracker.begin_write(as_slots([4]))) == ""
    assert np.flatnonzero(index.present).tolist() == [4]
