"""What a block is worth by its conversation's traits and its age, ready to be looked up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.policy.hazards import NUM_BUCKETS, Hazards
from kvferry.policy.traits import NUM_TRAITS, Traits

_FIRST_ROWS = 64
NO_ROW = 0
"""Is worth nothing."""
_AT_ONCE = 16  # rows that are worked out again each time


class WorthTable:
    """A row for each set of traits that was met. Owns the rows; the model learns elsewhere.

    Rows follow the model when they are looked at, a few at a time. There are only so many sets of
    traits.
    """

    def __init__(self, hazards: Hazards) -> None:
        self._hazards = hazards
        self._rows: dict[Traits, int] = {(): NO_ROW}
        self._traits = np.zeros((_FIRST_ROWS, NUM_TRAITS), dtype=np.int64)
        self._version = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._learned = 0
        self.worth = np.zeros((_FIRST_ROWS, NUM_BUCKETS))
        """By row and bucket of age: returns a second that a block is held."""

    def row(self, traits: Traits) -> int:
        """The row for these traits."""
        row = self._rows.get(traits)
        if row is None:
            row = self._rows[traits] = len(self._rows)
            if row == len(self._traits):
                self._traits = np.concatenate((self._traits, np.zeros_like(self._traits)))
                self._version = np.concatenate((self._version, np.zeros_like(self._version)))
                self.worth = np.concatenate((self.worth, np.zeros_like(self.worth)))
            self._traits[row] = traits
            self._version[row] = self._learned
            self.worth[row] = self._hazards.worth(self._traits[row : row + 1])[0]
        return row

    def learned(self) -> None:
        """The model has changed: what the rows say is of before."""
        self._learned += 1
        self._version[NO_ROW] = self._learned

    def follow(self, rows: npt.NDArray[np.int64]) -> None:
        """Of these rows, work some out again that the model has changed since."""
        old = rows[self._version.take(rows) != self._learned]
        if len(old):
            old = np.unique(old)[:_AT_ONCE]
            self._version[old] = self._learned
            self.worth[old] = self._hazards.worth(self._traits.take(old, axis=0))
