"""The chance that a conversation returns, from a few features of its last request.

Each feature is one of a few bins.

::

    turn     1 2 3 4, 5-8, 9-16, 17-32, more       how often it has been asked
    answer   unknown, then by doubling from 128 tokens
    gap      none, then by factors of four from a second: how long it stayed away last time
    growth   none, then by doubling from 512 tokens: how much longer it became
    kind     new, goes on, or branched off
    hint     none, ended, continues, continues within a second, two, four, ...

A part that several conversations share is none itself: it has features of its own, of how often
and how lately requests passed it.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum
from math import log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_WITHIN = 14
_TURN, _ANSWER, _GAP, _GROWTH, _KIND, _TOLD = 8, 5, 8, 5, 3, 3 + _WITHIN
_WAYS, _SHARED_GAP = 5, 8
_SIZES = (_TURN, _ANSWER, _GAP, _GROWTH, _KIND, _TOLD)
NUM_FEATURES = len(_SIZES)
_STARTS = tuple(sum(_SIZES[:at]) for at in range(len(_SIZES) + 1))
NO_BIN = _STARTS[-1]
"""For features that a shared part does not have: says nothing."""
_FIRST_WAYS = NO_BIN + 1
_FIRST_SHARED_GAP = _FIRST_WAYS + _WAYS
NUM_BINS = _FIRST_SHARED_GAP + _SHARED_GAP

Features = tuple[int, ...]
"""The bin of each trait; bins of all features are numbered through."""

UNKNOWN_ANSWER = 0


class TurnKind(IntEnum):
    """How a request is related to what was asked before."""

    NEW = 0
    CONTINUES = 1
    BRANCHES = 2


class HintKind(IntEnum):
    """The last hint for a conversation."""

    NOTHING = 0
    ENDED = 1
    CONTINUES = 2


FIRST_WITHIN = _STARTS[5] + len(HintKind)
DEADLINES = tuple(2.0**at for at in range(_WITHIN))
"""The ages, in seconds, until which those bins say that a conversation goes on."""


def doubling(value: float, first: float, doublings: float, most: int) -> int:
    """0 below ``first``, then a bin more for each so many doublings, up to ``most``."""
    if not value >= first:
        return 0
    return int(min(most, 1 + log2(value / first) / doublings))


def conversation(
    *, turn: int, gap: float | None, grown: int, kind: TurnKind, answer: int = UNKNOWN_ANSWER
) -> Features:
    """The features of a conversation; ``gap`` is None on its first turn."""
    by_turn = turn - 1 if turn < 5 else 3 + doubling(turn - 1, 4, 1, 4)
    by_gap = 0 if gap is None else 1 + doubling(gap, 1.0, 2, 6)
    growth = 0 if gap is None else 1 + doubling(grown, 512, 1, 3)
    a, b, c, d, e, f, _ = _STARTS
    return (a + by_turn, b + answer, c + by_gap, d + growth, e + kind, f)


def shared(*, ways: int, gap: float) -> Features:
    """The features of what several conversations share, passed so often and so long ago before."""
    by_ways = _FIRST_WAYS + min(_WAYS - 1, max(0, ways.bit_length() - 1))
    by_gap = _FIRST_SHARED_GAP + doubling(gap, 1.0, 2, 7)
    return (by_ways, NO_BIN, by_gap, NO_BIN, NO_BIN, NO_BIN)


def with_answer(features: Features, num_tokens: int) -> Features:
    """The same, once its answer is known."""
    by_answer = 1 + min(3, (num_tokens >> 7).bit_length())
    return (features[0], _STARTS[1] + by_answer, *features[2:])


def with_hint(features: Features, hinted: HintKind, within: float | None = None) -> Features:
    """The same, with a hint; ``within`` is the age until which the conversation continues."""
    bin_of_hint = _STARTS[5] + int(hinted)
    if hinted is HintKind.CONTINUES and within is not None:
        bin_of_hint = FIRST_WITHIN + min(_WITHIN - 1, bisect_left(DEADLINES, within))
    return (*features[:-1], bin_of_hint)


NUM_BASES = 1 + _WAYS


def base_of(features: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The base of each row of features: 0 for conversations, else by how many share the part."""
    return np.maximum(features[:, 0] - _FIRST_WAYS + 1, 0)


def prior() -> npt.NDArray[np.float64]:
    """What each bin adds to the chance before anything is learned, as a logit."""
    weights: npt.NDArray[Any] = np.zeros(NUM_BINS)
    told = _STARTS[5]
    weights[told + HintKind.ENDED] = -5.0
    weights[told + HintKind.CONTINUES] = 2.0
    return weights


NUM_BUCKETS = 38
FIRST_SECONDS = 0.25
_GROUP = 6  # buckets that share a weight: a factor of eight in age

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ENDS: Floats = FIRST_SECONDS * 2.0 ** (np.arange(NUM_BUCKETS) / 2)
"""Where each bucket ends, in seconds of age; what is older is in the last all the same."""
_SPANS: Floats = np.diff(ENDS, prepend=0.0)
_GROUPS: Ints = np.arange(NUM_BUCKETS) // _GROUP
_NUM_GROUPS = int(_GROUPS[-1]) + 1
_NEAR = np.array([-8, -4, -2, 0, 2, 6])
"""Where an age lies to the deadline of its hint, in buckets: long before or after
counts as one. All deadlines share what is learned of that."""
_NEAR_PRIOR = np.array([0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0])
"""The prior: it returns by the deadline; later the hint says nothing."""


def _cells() -> Ints:
    """By bin and bucket, the weight that counts: one for a group, or by how near a deadline is."""
    cells = np.arange(NUM_BINS)[:, None] * _NUM_GROUPS + _GROUPS
    for at, deadline in enumerate(DEADLINES):
        to_go = np.arange(NUM_BUCKETS) - ENDS.searchsorted(deadline)
        cells[FIRST_WITHIN + at] = NUM_BINS * _NUM_GROUPS + _NEAR.searchsorted(to_go)
    return cells


_CELLS: Ints = _cells()
_WAITS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 27, NUM_BUCKETS)
"""For how many buckets one might wait: not every number, they lie close enough."""
_LAST_WAITED: Ints = np.array(_WAITS) - 1
_WAITED: Ints = np.arange(NUM_BUCKETS) + np.array(_WAITS)[:, None]
"""By wait and bucket, the edge at which that wait ends."""
_FEW = 16  # rows for which all waits are worked out at once: of more, the arrays outgrow caches

_SWITCH_SECONDS = 2.0
"""What is evicted for a newcomer does not come back when the newcomer goes: so holding one for a
moment is no bargain, however likely that moment."""

_NO_TIME = 1e-12  # seconds: where all have returned long before, nothing is divided by nothing

_PRIOR_CHANCE = 0.05
_PRIOR_SEEN = 1.0
_PRIOR_SEEN_TRAIT = 2.0


class Hazards:
    """The chance to return at each age, learned as requests come. Owns bases and weights.

    Ages fall into buckets, two to a doubling. A conversation that has not returned before a bucket
    returns in it with a chance, the hazard: the logistic of a base for the bucket plus a weight for
    each feature, one for each group of buckets. Base and weights move by small steps, each the
    error over how much was seen so far, so the first hundred records teach most. Before that a
    prior speaks: the same small chance in every bucket, so older blocks are less likely to return
    within a second, as for LRU.

    The value of a block at some age is Gittins' index: the best, over how long to wait, of the
    chance to return by then over the time that it is kept.
    """

    def __init__(self) -> None:
        start = float(np.log(_PRIOR_CHANCE / (1 - _PRIOR_CHANCE)))
        self._base = np.full(NUM_BASES * NUM_BUCKETS, start)
        self._base_seen = np.full(NUM_BASES * NUM_BUCKETS, _PRIOR_SEEN)
        self._weight = np.concatenate((np.repeat(prior(), _NUM_GROUPS), _NEAR_PRIOR))
        self._weight_seen = np.full(len(self._weight), _PRIOR_SEEN_TRAIT)

    def learn(self, features: Ints, buckets: Ints, returned: Ints, times: Ints) -> None:
        """So many times each of these came to a bucket with these features, and returned or not."""
        bases = buckets + NUM_BUCKETS * base_of(features)
        weights = _CELLS.take(features * NUM_BUCKETS + buckets[:, None]).reshape(-1)
        logits = self._base.take(bases) + self._weight.take(weights).reshape(features.shape).sum(1)
        chance = 1 / (1 + np.exp(-logits))
        error, told = times * (returned - chance), times * chance * (1 - chance)
        self._base_seen += np.bincount(bases, told, len(self._base))
        self._base += np.bincount(bases, error, len(self._base)) / self._base_seen
        each = np.repeat(told, NUM_FEATURES)
        self._weight_seen += np.bincount(weights, each, len(self._weight))
        each = np.repeat(error, NUM_FEATURES)
        self._weight += np.bincount(weights, each, len(self._weight)) / self._weight_seen
        self._weight[NO_BIN * _NUM_GROUPS : (NO_BIN + 1) * _NUM_GROUPS] = 0.0

    def chances(self, features: Ints) -> Floats:
        """For each row of features the chance to return in each bucket, if not before."""
        logits = self._base.reshape(NUM_BASES, NUM_BUCKETS)[base_of(features)]
        by_group = self._weight[: NUM_BINS * _NUM_GROUPS].reshape(NUM_BINS, _NUM_GROUPS)
        logits += by_group[features[:, :-1]].sum(1)[:, _GROUPS]
        logits += self._weight[_CELLS[features[:, -1]]]  # the hint
        return 1 / (1 + np.exp(-logits))

    def first_value(self, features: Ints) -> float:
        """For one row of features what :meth:`value` says of the first bucket, for much less."""
        chance = self.chances(features)[0]
        there = np.cumprod(1 - chance)
        spent = _SPANS * (1 - chance / 2)
        spent[1:] *= there[:-1]
        held = np.cumsum(spent).take(_LAST_WAITED)
        gain = (1 - there.take(_LAST_WAITED)) / (held + (_SWITCH_SECONDS + _NO_TIME))
        return gain.item(gain.argmax())

    def value(self, features: Ints) -> Floats:
        """For each row of features, by bucket of age: returns a second that a block is held."""
        chance = self.chances(features)
        # By row and edge: not returned by then, and how long held until then. Beyond the last
        # edge nothing changes any more.
        there, held = np.empty((2, len(features), 2 * NUM_BUCKETS + 1))
        there[:, 0], held[:, 0] = 1.0, 0.0
        np.cumprod(1 - chance, axis=1, out=there[:, 1 : NUM_BUCKETS + 1])
        spent = there[:, :NUM_BUCKETS] * _SPANS * (1 - chance / 2)
        np.cumsum(spent, axis=1, out=held[:, 1 : NUM_BUCKETS + 1])
        for edges in (there, held):
            edges[:, NUM_BUCKETS + 1 :] = edges[:, NUM_BUCKETS : NUM_BUCKETS + 1]
        since = there[:, :NUM_BUCKETS]
        before = held[:, :NUM_BUCKETS] - (_SWITCH_SECONDS * since + _NO_TIME)
        if len(features) <= _FEW:
            gains = since[:, None] - there.take(_WAITED, axis=1)
            gains /= held.take(_WAITED, axis=1) - before[:, None]
            return np.asarray(np.maximum.reduce(gains, axis=1, initial=0.0))
        value: Floats = np.zeros_like(chance)
        for wait in _WAITS:
            gain = since - there[:, wait : wait + NUM_BUCKETS]
            gain /= held[:, wait : wait + NUM_BUCKETS] - before
            np.maximum(value, gain, out=value)
        return value


_FIRST_ROWS = 64
NO_ROW = 0
"""Has no value."""
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


class ValueTable:
    """A row for each set of features that was met. Owns the rows and the model that they follow.

    When the model has changed, those rows that were of use lately follow it at once, others when
    they are looked at: many together cost little more than one. There are only so many sets of
    features. Until values are asked for, lessons wait for each other: the result is the same, and
    one right behind another takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._hazards = Hazards()
        self._rows: dict[Features, int] = {(): NO_ROW}
        self._sets: list[Features] = [()]
        self._features = np.zeros((_FIRST_ROWS, NUM_FEATURES), dtype=np.int64)
        self._version = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._learned = 0
        self._to_learn: list[Lesson] = []
        self.of_use: set[int] = set()  # since the model last changed
        self._first: dict[int, float] = {}  # by row, since then: what it says of the first bucket
        self.value = np.zeros((_FIRST_ROWS, NUM_BUCKETS))
        """By row and bucket of age: returns a second that a block is held."""

    @property
    def hazards(self) -> Hazards:
        """The model, which has learned all that it was taught."""
        self._study()
        return self._hazards

    def row(self, features: Features) -> int:
        """The row for these features."""
        row = self._rows.get(features)
        if row is None:
            row = self._rows[features] = len(self._rows)
            if row == len(self._features):
                self._features = np.concatenate((self._features, np.zeros_like(self._features)))
                self._version = np.concatenate((self._version, np.zeros_like(self._version)))
                self.value = np.concatenate((self.value, np.zeros_like(self.value)))
            self._sets.append(features)
            self._features[row] = features
            self._version[row] = _DUE
        self.of_use.add(row)
        return row

    def features(self, row: int) -> Features:
        return self._sets[row]

    def learn(
        self,
        rows: npt.NDArray[np.int64],
        buckets: npt.NDArray[np.int64],
        returned: npt.NDArray[np.bool_],
    ) -> None:
        """Each of these came to a bucket of age, and returned in it or did not."""
        self._to_learn.append(Lesson(rows, buckets, returned, self.of_use))
        self.of_use = set()
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
        self._hazards.learn(self._features.take(rows, axis=0), buckets, kinds % 2, times)

    def follow(self, rows: npt.NDArray[np.int64]) -> None:
        """These rows are of use; work some out again that the model has changed long since."""
        self._study()
        self.of_use.update(rows.tolist())
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
        value = self._first.get(row)
        if value is None:
            self._study()
            if self._version.item(row) == self._learned:
                value = self.value.item(row, 0)
            else:  # the whole row would take five times as long
                value = self._hazards.first_value(self._features[row : row + 1])
                self._version[row] = _DUE
            self._first[row] = value
        return value

    def _renew(self, rows: npt.NDArray[np.int64], number: int) -> None:
        """Work rows out by the model, as it is behind the lesson of this number."""
        self._version[rows] = number
        self.value[rows] = self._hazards.value(self._features.take(rows, axis=0))
