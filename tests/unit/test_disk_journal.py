"""The journal of a store on real files: what was noted is there after the next opening."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.slots import as_slots
from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.tiers.disk.journal import FILE_NAMES, DiskJournal, journal_bytes
from kvferry.tiers.disk.journal_pages import Shape

STORE_ID = b"sixteen bytes it"
PROOF_BYTES = 16
NUM_PLACES = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILE_NAMES:
        with (tmp_path / name).open("wb") as file:
            file.truncate(journal_bytes(Shape(PROOF_BYTES), NUM_PLACES))
    (tmp_path / "state").write_bytes(bytes(4096))
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
