"""What a block is worth by its conversation's traits and its age, ready to be looked up."""

from __future__ import annotations

import numpy as np

from kvferry.policy.hazards import NUM_BUCKETS, Hazards
from kvferry.policy.traits import NUM_TRAITS, Traits

_FIRST_ROWS = 64
NO_ROW = 0
"""Is worth nothing."""
_AT_ONCE = 16  # rows that are worked out again each time


class WorthTable:
    """A row for each set of traits that was met. Owns the rows; the model learns elsewhere.

    Rows follow the model a few at a time, in turn. There are only so many sets of traits.
    """

    def __init__(self, hazards: Hazards) -> None:
        self._hazards = hazards
        self._rows: dict[Traits, int] = {(): NO_ROW}
        self._traits = np.zeros((_FIRST_ROWS, NUM_TRAITS), dtype=np.int64)
        self._next = 1
        self.worth = np.zeros((_FIRST_ROWS, NUM_BUCKETS))
        """By row and bucket of age: returns a second that a block is held."""

    def row(self, traits: Traits) -> int:
        """The row for these traits."""
        row = self._rows.get(traits)
        if row is None:
            row = self._rows[traits] = len(self._rows)
            if row == len(self._traits):
                self._traits = np.concatenate((self._traits, np.zeros_like(self._traits)))
                self.worth = np.concatenate((self.worth, np.zeros_like(self.worth)))
            self._traits[row] = traits
            self.worth[row] = self._hazards.worth(self._traits[row : row + 1])[0]
        return row

    def follow(self) -> None:
        """Work some rows out again by what was learned since."""
        count = len(self._rows)
        if count == 1:
            return
        start = self._next if self._next < count else 1
        end = min(count, start + _AT_ONCE)
        self.worth[start:end] = self._hazards.worth(self._traits[start:end])
        self._next = end
