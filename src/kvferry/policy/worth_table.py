"""What a block is worth by its conversation's traits and its age, ready to be looked up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.policy.hazards import NUM_BUCKETS, Hazards
from kvferry.policy.traits import NUM_TRAITS, Traits

_FIRST_ROWS = 64
NO_ROW = 0
"""Is worth nothing."""
_DUE = -(1 << 40)  # the version of a row that is to be worked out before it is looked at
_AT_ONCE = 16  # rows that are worked out again when they are looked at
_LATE = 2  # changes that a row may be behind: to follow together, with the next, costs less
_MOST_AT_ONCE = 256  # and when the model has changed: a few hundred microseconds
_MOST_LESSONS = 8  # that wait to be learned, if no one looks
_MOST_TAUGHT = 1024  # of a lesson that waits


class Lesson(NamedTuple):
    """What the model is to learn: rows, the bucket of age each came to, whether it returned in it.

    ``of_use`` are the rows that were since the lesson before.
    """

    rows: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    returned: npt.NDArray[np.bool_]
    of_use: set[int]


class WorthTable:
    """A row for each set of traits that was met. Owns the rows and the model that they follow.

    When the model has changed, those rows that were of use lately follow it at once, others when
    they are looked at: many together cost little more than one. There are only so many sets of
    traits. Where no one looks, lessons wait for each other: nobody can tell the difference, and one
    right behind another takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._hazards = Hazards()
        self._rows: dict[Traits, int] = {(): NO_ROW}
        self._sets: list[Traits] = [()]
        self._traits = np.zeros((_FIRST_ROWS, NUM_TRAITS), dtype=np.int64)
        self._version = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._learned = 0
        self._to_learn: list[Lesson] = []
        self._of_use: set[int] = set()  # since the model last changed
        self._first: dict[int, float] = {}  # by row, since then: what it says of the first bucket
        self.worth = np.zeros((_FIRST_ROWS, NUM_BUCKETS))
        """By row and bucket of age: returns a second that a block is held."""

    @property
    def hazards(self) -> Hazards:
        """The model, which has learned all that it was taught."""
        self._study()
        return self._hazards

    def row(self, traits: Traits) -> int:
        """The row for these traits."""
        row = self._rows.get(traits)
        if row is None:
            row = self._rows[traits] = len(self._rows)
            if row == len(self._traits):
                self._traits = np.concatenate((self._traits, np.zeros_like(self._traits)))
                self._version = np.concatenate((self._version, np.zeros_like(self._version)))
                self.worth = np.concatenate((self.worth, np.zeros_like(self.worth)))
            self._sets.append(traits)
            self._traits[row] = traits
            self._version[row] = _DUE
        self._of_use.add(row)
        return row

    def used(self, row: int) -> int:
        """The same row, which is of use."""
        self._of_use.add(row)
        return row

    def traits(self, row: int) -> Traits:
        return self._sets[row]

    def learn(
        self,
        rows: npt.NDArray[np.int64],
        buckets: npt.NDArray[np.int64],
        returned: npt.NDArray[np.bool_],
    ) -> None:
        """Each of these came to a bucket of age, and returned in it or did not."""
        self._to_learn.append(Lesson(rows, buckets, returned, self._of_use))
        self._of_use = set()
        self._learned += 1
        self._version[NO_ROW] = self._learned
        self._first.clear()
        if len(rows) > _MOST_TAUGHT or len(self._to_learn) >= _MOST_LESSONS:
            self._study()

    def _study(self) -> None:
        """Before a look: learn what waits, lesson by lesson, and let rows follow.

        Of several lessons that a row should follow only the last leaves a trace.
        """
        if not self._to_learn:
            return
        lessons, self._to_learn = self._to_learn, []
        later: set[int] = set()
        following: list[list[int]] = []
        for lesson in reversed(lessons):
            of_use = sorted(lesson.of_use)[:_MOST_AT_ONCE]
            following.append([row for row in of_use if row not in later])
            later.update(of_use)
        for number, lesson in enumerate(lessons, self._learned - len(lessons) + 1):
            self._learn(lesson)
            of_use = following.pop()
            if of_use:
                self._renew(np.array(of_use), number)

    def _learn(self, lesson: Lesson) -> None:
        # Most are alike: each kind is learned of once, as often as it was met.
        every = 2 * (lesson.rows * NUM_BUCKETS + lesson.buckets) + lesson.returned
        kinds, times = np.unique(every, return_counts=True)
        rows: npt.NDArray[np.int64]
        rows, buckets = np.divmod(kinds // 2, NUM_BUCKETS)
        self._hazards.learn(self._traits.take(rows, axis=0), buckets, kinds % 2, times)

    def follow(self, rows: npt.NDArray[np.int64]) -> None:
        """These rows are of use; work some out again that the model has changed long since."""
        self._study()
        self._of_use.update(rows.tolist())
        old = rows[self._version.take(rows) < self._learned - _LATE]
        if len(old):
            old = np.unique(old)
            version = self._version.take(old)
            count = max(_AT_ONCE, int(np.count_nonzero(version == _DUE)))
            self._renew(old.take(version.argsort(kind="stable")[:count]), self._learned)

    def work_out(self, rows: npt.NDArray[np.int64]) -> None:
        """Those of these rows that are due, and no others.

        What is shared need not follow the model at once: where it did, less was hit.
        """
        self._study()
        due = rows[self._version.take(rows) == _DUE]
        if len(due):
            self._renew(np.unique(due), self._learned)

    def first(self, row: int) -> float:
        """What a row says of the first bucket, by the model as it is."""
        worth = self._first.get(row)
        if worth is None:
            self._study()
            if self._version.item(row) == self._learned:
                worth = self.worth.item(row, 0)
            else:  # the whole row would take five times as long
                worth = self._hazards.first_worth(self._traits[row : row + 1])
                self._version[row] = _DUE
            self._first[row] = worth
        return worth

    def _renew(self, rows: npt.NDArray[np.int64], number: int) -> None:
        """Work rows out by the model, as it is behind the lesson of this number."""
        self._version[rows] = number
        self.worth[rows] = self._hazards.worth(self._traits.take(rows, axis=0))
