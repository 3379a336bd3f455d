"""What the ledger holds in memory of every place: whether it has a block, its proof, its record."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.tiers.disk.pages import LOST, PLACE, Pages, Records, Shape

Proofs = npt.NDArray[np.uint8]


class Entries:
    """One entry per place, of the proof's bytes and five more: no keys, those stay in the journal.

    ``present`` and ``proofs`` say what may be read now. ``newest`` is the number of the newest
    record about a place in the current journal (page times records per page, and its row), 0 for
    none: a record is live exactly if its place's newest is it.
    """

    def __init__(self, num_places: int, shape: Shape) -> None:
        self.present = np.zeros(num_places, dtype=bool)
        self.proofs: Proofs = np.zeros((num_places, shape.proof_bytes), dtype=np.uint8)
        self.newest = np.zeros(num_places, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.present)


def flatten(shape: Shape, pages: Pages, first: int) -> tuple[Records, npt.NDArray[np.uint32]]:
    """All records of these pages in their order, and their numbers."""
    rows = np.arange(shape.per_page)
    used = rows < pages["count"][:, None]
    numbers = (first + np.arange(len(pages)))[:, None] * shape.per_page + rows
    if used.all():
        return pages["records"].reshape(-1), numbers.reshape(-1).astype(np.uint32)
    return pages["records"][used], numbers[used].astype(np.uint32)


def places_of(records: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The places the records are about, and which of them were lost."""
    raw = records["place"]
    return (raw & PLACE).astype(np.int64), (raw & LOST) != 0
