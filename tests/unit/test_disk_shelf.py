"""The order of events between a drive's threads and its ledger, where a sync of blocks fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.tiers.disk.figures import Count
from kvferry.tiers.disk.journal import Shape
from kvferry.tiers.disk.ledger import FILE_NAMES, Ledger, journal_bytes
from kvferry.tiers.disk.workers import Shelf
from kvferry.tiers.ipc.status_page import StatusPage
from kvferry.types import as_slots


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    for name in FILE_NAMES:
        (tmp_path / name).write_bytes(bytes(journal_bytes(Shape(16), 10)))
    made = Ledger.open(tmp_path, b"s" * 16, 10, 16)
    yield made
    made.close()


def write(shelf: Shelf, place: int, begun: int) -> str:
    row = np.random.default_rng().integers(0, 256, (1, 16), dtype=np.uint8)
    return shelf.keep(as_slots([place]), keys([place]).array, row, 0, begun)


def test_a_failed_sync_loses_all_that_it_may_have_dropped(ledger: Ledger) -> None:
    """What was noted before, what was noted while it ran, and what was still being written."""
    shelf = Shelf(ledger, StatusPage(), 0.5)
    assert write(shelf, 1, shelf.begin(as_slots([1]))) == ""
    mark = shelf.mark()
    assert write(shelf, 2, shelf.begin(as_slots([2]))) == ""
    under_way = shelf.begin(as_slots([3]))
    shelf.put_back(mark, are_lost=True)
    assert "did not keep" in write(shelf, 3, under_way)
    assert write(shelf, 4, shelf.begin(as_slots([4]))) == ""
    assert np.flatnonzero(ledger.present).tolist() == [4]


def test_a_failed_journal_loses_nothing(ledger: Ledger) -> None:
    shelf = Shelf(ledger, StatusPage(), 0.5)
    begun = shelf.begin(as_slots([1, 2]))
    write(shelf, 1, begun)
    mark = shelf.mark()
    shelf.put_back(mark, are_lost=False)
    assert write(shelf, 2, begun) == ""
    assert np.flatnonzero(ledger.present).tolist() == [1, 2]
    assert len(shelf.mark().places) == 2


def test_what_waits_for_a_commit_is_counted_through_all_that_can_happen(ledger: Ledger) -> None:
    status = StatusPage()
    shelf = Shelf(ledger, status, 0.5)
    seen = []

    def note(*places: int) -> None:
        for place in places:
            write(shelf, place, shelf.begin(as_slots([place])))
        seen.append(status.get(Count.PENDING))

    note(1, 2)
    mark = shelf.mark()
    note(3)
    shelf.committed()
    note()
    mark = shelf.mark()
    note(4)
    shelf.put_back(mark, are_lost=False)
    note(5)
    mark = shelf.mark()
    note(6)
    shelf.put_back(mark, are_lost=True)
    note()
    note(7, 8)
    shelf.forget(0)
    note(9)
    assert seen == [2, 3, 1, 2, 3, 4, 0, 2, 1]
