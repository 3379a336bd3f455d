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
from kvferry.tiers.disk.protocol import Count
from kvferry.tiers.ipc.memory import StatusPage


@pytest.fixture
def index(tmp_path: Path) -> Iterator[DiskIndex]:
    (tmp_path / "index").write_bytes(bytes(Shape(16).file_bytes(10)))
    (tmp_path / "state").write_bytes(bytes(4096))
    made = DiskIndex.open(tmp_path, b"s" * 16, 10, 16)
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


def test_a_failed_index_loses_nothing(index: DiskIndex) -> None:
    tracker = WriteTracker(index, StatusPage(), 0.5)
    begun = tracker.begin_write(as_slots([1, 2]))
    write(tracker, 1, begun)
    mark = tracker.begin_commit()
    tracker.fail_commit(mark, are_lost=False)
    assert write(tracker, 2, begun) == ""
    assert np.flatnonzero(index.present).tolist() == [1, 2]
    assert index.num_pending == 2


def test_blocks_that_wait_for_a_commit_are_counted(
    index: DiskIndex,
) -> None:
    status = StatusPage()
    tracker = WriteTracker(index, status, 0.5)
    seen = []

    def note(*places: int) -> None:
        for place in places:
            write(tracker, place, tracker.begin_write(as_slots([place])))
        seen.append(status.get(Count.PENDING))

    note(1, 2)
    mark = tracker.begin_commit()
    note(3)
    index.commit(mark.num_recorded)
    tracker.end_commit()
    note()
    mark = tracker.begin_commit()
    note(4)
    tracker.fail_commit(mark, are_lost=False)
    note(5)
    mark = tracker.begin_commit()
    note(6)
    tracker.fail_commit(mark, are_lost=True)
    note()
    note(7, 8)
    tracker.reset(1 << 40, is_kept=True)
    note(9)
    assert seen == [2, 3, 1, 2, 3, 4, 0, 2, 1]
