"""The journal of a store on real files: what was noted is there after the next opening."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.tiers.disk.journal import FILE_NAMES, DiskJournal, journal_bytes
from kvferry.tiers.disk.journal_pages import Shape
from kvferry.types import as_slots

STORE_ID = b"sixteen bytes it"
PROOF_BYTES = 16
NUM_PLACES = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILE_NAMES:
        with (tmp_path / name).open("wb") as file:
            file.truncate(journal_bytes(Shape(PROOF_BYTES), NUM_PLACES))
    return tmp_path


def opened(folder: Path, num_places: int = NUM_PLACES) -> DiskJournal:
    return DiskJournal.open(folder, STORE_ID, num_places, PROOF_BYTES)


def proofs(count: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (count, PROOF_BYTES), dtype=np.uint8)


def note(journal: DiskJournal, numbers: list[int]) -> np.ndarray:
    """Block ``n`` at place ``n``."""
    made = proofs(len(numbers))
    journal.record_written(as_slots(numbers), keys(numbers), made)
    return made


def test_a_committed_block_is_there_again(folder: Path) -> None:
    journal = opened(folder)
    made = note(journal, [3, 1, 2])
    journal.commit()
    del journal  # as a crash would: nothing is closed

    journal = opened(folder)
    ((some, places, proofs),) = journal.pieces()
    assert some == keys([3, 1, 2])
    assert places.tolist() == [3, 1, 2]
    assert (proofs == made).all()
    assert (journal.proofs[[3, 1, 2]] == made).all()
    assert np.flatnonzero(journal.present).tolist() == [1, 2, 3]
    assert journal.report.num_blocks == 3
    journal.close()


def test_thousands_of_rounds_stay_within_the_files(folder: Path) -> None:
    journal = opened(folder)
    rng = np.random.default_rng()
    truth: dict[int, tuple[bytes, bytes]] = {}
    for turn in range(600):
        count = int(rng.integers(1, 120))
        places = rng.choice(NUM_PLACES, count, replace=False).astype(np.int64)
        words = Keys(rng.integers(0, 1 << 63, (count, 4), dtype=np.uint64))
        made = proofs(count)
        journal.record_written(places, words, made)
        for at, (place, each) in enumerate(zip(places.tolist(), words, strict=True)):
            truth[place] = (each, made[at].tobytes())
        if turn % 3:
            journal.commit()
        if turn % 200 == 199:
            journal.close()
            journal = opened(folder)
            assert content(journal) == truth
    journal.close()
    for name in FILE_NAMES:
        assert (folder / name).stat().st_size == journal_bytes(Shape(PROOF_BYTES), NUM_PLACES)


def content(journal: DiskJournal) -> dict[int, tuple[bytes, bytes]]:
    return {
        place: (key, proof.tobytes())
        for some, places, made in journal.pieces()
        for key, place, proof in zip(some, places.tolist(), made, strict=True)
    }


def test_what_was_lost_or_forgotten_stays_away(folder: Path) -> None:
    journal = opened(folder)
    note(journal, [1, 2])
    journal.record_lost(as_slots([1]))
    journal.commit()
    assert content(opened(folder)).keys() == {2}
    journal.close()

    journal = opened(folder)
    journal.forget()
    assert not journal.present.any()
    note(journal, [5])
    journal.close()
    assert content(opened(folder)).keys() == {5}


def test_a_block_written_to_another_place_is_there_once(folder: Path) -> None:
    journal = opened(folder)
    note(journal, [1, 2])
    journal.record_written(as_slots([7]), keys([1]), proofs(1))
    journal.commit()
    journal.close()
    journal = opened(folder)
    assert content(journal).keys() == {2, 7}
    assert journal.report.doubled_blocks == 1
    journal.close()


def test_fewer_places_leave_out_what_lies_beyond_for_good(folder: Path) -> None:
    journal = opened(folder)
    note(journal, [1, 200])
    journal.close()
    journal = opened(folder, 100)
    assert content(journal).keys() == {1}
    assert journal.report.blocks_beyond == 1
    journal.close()
    assert content(opened(folder)).keys() == {1}


def test_wrong_use_is_refused(folder: Path) -> None:
    journal = opened(folder)
    with pytest.raises(InputError, match="places 0 to 299"):
        note(journal, [NUM_PLACES])
    with pytest.raises(InputError, match="1 places, 2 keys"):
        journal.record_written(as_slots([1]), keys([1, 2]), proofs(2))
    journal.close()
    journal.close()
    with pytest.raises(ClosedError):
        note(journal, [1])
    with pytest.raises(ClosedError):
        journal.commit()
    with pytest.raises(JournalError, match="too short"):
        opened(folder, 1_000_000)
    with pytest.raises(JournalError, match="cannot be opened"):
        opened(folder / "elsewhere")


def test_a_commit_covers_no_more_than_it_was_told(folder: Path) -> None:
    """What is noted while the bytes of others are synced has no bytes on the medium yet."""
    journal = opened(folder)
    note(journal, [1])
    covered = journal.num_recorded
    note(journal, [2])
    journal.commit(covered)
    assert content(opened(folder)).keys() == {1}
    assert journal.num_unsaved == 1
    journal.close()
    assert content(opened(folder)).keys() == {1, 2}
