"""The ledger of a store on real files: what was noted is there after the next opening."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.tiers.disk.journal import Shape
from kvferry.tiers.disk.ledger import FILE_NAMES, Ledger, journal_bytes
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


def opened(folder: Path, num_places: int = NUM_PLACES) -> Ledger:
    return Ledger.open(folder, STORE_ID, num_places, PROOF_BYTES)


def proofs(count: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (count, PROOF_BYTES), dtype=np.uint8)


def note(ledger: Ledger, numbers: list[int]) -> np.ndarray:
    """Block ``n`` at place ``n``."""
    made = proofs(len(numbers))
    ledger.note_written(as_slots(numbers), keys(numbers), made)
    return made


def test_a_committed_block_is_there_again(folder: Path) -> None:
    ledger = opened(folder)
    made = note(ledger, [3, 1, 2])
    ledger.commit()
    del ledger  # as a crash would: nothing is closed

    ledger = opened(folder)
    ((some, places, proofs),) = ledger.pieces()
    assert some == keys([3, 1, 2])
    assert places.tolist() == [3, 1, 2]
    assert (proofs == made).all()
    assert (ledger.proofs[[3, 1, 2]] == made).all()
    assert np.flatnonzero(ledger.present).tolist() == [1, 2, 3]
    assert ledger.report.num_blocks == 3
    ledger.close()


def test_thousands_of_rounds_stay_within_the_files(folder: Path) -> None:
    ledger = opened(folder)
    rng = np.random.default_rng()
    truth: dict[int, tuple[bytes, bytes]] = {}
    for turn in range(600):
        count = int(rng.integers(1, 120))
        places = rng.choice(NUM_PLACES, count, replace=False).astype(np.int64)
        words = Keys(rng.integers(0, 1 << 63, (count, 4), dtype=np.uint64))
        made = proofs(count)
        ledger.note_written(places, words, made)
        for at, (place, each) in enumerate(zip(places.tolist(), words, strict=True)):
            truth[place] = (each, made[at].tobytes())
        if turn % 3:
            ledger.commit()
        if turn % 200 == 199:
            ledger.close()
            ledger = opened(folder)
            assert content(ledger) == truth
    ledger.close()
    for name in FILE_NAMES:
        assert (folder / name).stat().st_size == journal_bytes(Shape(PROOF_BYTES), NUM_PLACES)


def content(ledger: Ledger) -> dict[int, tuple[bytes, bytes]]:
    return {
        place: (key, proof.tobytes())
        for some, places, made in ledger.pieces()
        for key, place, proof in zip(some, places.tolist(), made, strict=True)
    }


def test_what_was_lost_or_forgotten_stays_away(folder: Path) -> None:
    ledger = opened(folder)
    note(ledger, [1, 2])
    ledger.note_lost(as_slots([1]))
    ledger.commit()
    assert content(opened(folder)).keys() == {2}
    ledger.close()

    ledger = opened(folder)
    ledger.forget()
    assert not ledger.present.any()
    note(ledger, [5])
    ledger.close()
    assert content(opened(folder)).keys() == {5}


def test_a_block_written_to_another_place_is_there_once(folder: Path) -> None:
    ledger = opened(folder)
    note(ledger, [1, 2])
    ledger.note_written(as_slots([7]), keys([1]), proofs(1))
    ledger.commit()
    ledger.close()
    ledger = opened(folder)
    assert content(ledger).keys() == {2, 7}
    assert ledger.report.doubled_blocks == 1
    ledger.close()


def test_fewer_places_leave_out_what_lies_beyond_for_good(folder: Path) -> None:
    ledger = opened(folder)
    note(ledger, [1, 200])
    ledger.close()
    ledger = opened(folder, 100)
    assert content(ledger).keys() == {1}
    assert ledger.report.blocks_beyond == 1
    ledger.close()
    assert content(opened(folder)).keys() == {1}


def test_wrong_use_is_refused(folder: Path) -> None:
    ledger = opened(folder)
    with pytest.raises(InputError, match="places 0 to 299"):
        note(ledger, [NUM_PLACES])
    with pytest.raises(InputError, match="1 places, 2 keys"):
        ledger.note_written(as_slots([1]), keys([1, 2]), proofs(2))
    ledger.close()
    ledger.close()
    with pytest.raises(ClosedError):
        note(ledger, [1])
    with pytest.raises(ClosedError):
        ledger.commit()
    with pytest.raises(JournalError, match="too short"):
        opened(folder, 1_000_000)
    with pytest.raises(JournalError, match="cannot be opened"):
        opened(folder / "elsewhere")


def test_a_commit_covers_no_more_than_it_was_told(folder: Path) -> None:
    """What is noted while the bytes of others are synced has no bytes on the medium yet."""
    ledger = opened(folder)
    note(ledger, [1])
    covered = ledger.num_noted
    note(ledger, [2])
    ledger.commit(covered)
    assert content(opened(folder)).keys() == {1}
    assert ledger.num_unsaved == 1
    ledger.close()
    assert content(opened(folder)).keys() == {1, 2}
