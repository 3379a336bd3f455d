"""The chance that blocks are asked for again, by their age and a few features.

Each feature is one of a few bins::

    turn     1 2 3 4, 5-8, more        how often a conversation was asked for
    ways     3, 4-7, 8-31, more        instead, for a part that others share: how many go on from it
    gap      none, by factors of four  the mean time between requests, of the last four
    new      by factors of four        tokens of the last prompt that were new
    hint     none, ended, continues, continues within a second, two, four, ...; believed or not
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Features = tuple[int, ...]
"""The bin of each feature; bins of all features are numbered through."""

# Where bins begin, for each feature after its first bin.
_TURN, _WAYS = (2, 3, 4, 5, 9), (4, 8, 32)
_GAP = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)  # logarithms to base two of seconds
_NEW = (1024, 4096, 16384, 65536)
_SHARED = len(_TURN) + 1
_GAPS, _DEADLINES = len(_GAP) + 2, 14
_HINTS = 2 + _DEADLINES
# Shared parts have bins of their own, behind those of conversations.
_SIZES = (_SHARED + len(_WAYS) + 1, 2 * _GAPS, len(_NEW) + 2, 1 + 2 * _HINTS)
_STARTS: list[int] = np.cumsum([0, *_SIZES]).tolist()
_HINTS_AT = _STARTS[3]
NO_HINT = 0

NUM_BUCKETS = 38
FIRST_SECONDS = 0.25
_ENDS: Floats = FIRST_SECONDS * 2.0 ** (np.arange(NUM_BUCKETS) / 2)
"""Where each bucket of age ends, in seconds; what is older is in the last all the same."""
_END_LIST: list[float] = _ENDS.tolist()
_SPANS: Floats = np.diff(_ENDS, prepend=0.0)
_BUCKETS: Ints = np.arange(NUM_BUCKETS)
_GROUPS = _BUCKETS // 8  # buckets that share a weight: a factor of 16 in age
_NUM_GROUPS = _GROUPS.item(-1) + 1
_WAITS = np.array((1, 2, 3, 4, 6, 8, 11, 15, 20, 27, NUM_BUCKETS))
_UNTIL = np.minimum(_BUCKETS + _WAITS[:, None], NUM_BUCKETS)
"""Until which edges one might wait in each bucket: not all, they lie close enough."""
_SWITCH_SECONDS = 2.0
"""What is evicted for a newcomer does not come back when the newcomer goes: so holding one for a
moment is no bargain, however likely that moment."""
_NO_TIME = 1e-12  # seconds: where all have returned long before, nothing is divided by nothing
_NUM_BASES = 2 + len(_WAYS)
_START = -3.0  # a chance of 5% in each bucket
_MOST_LOGIT = 500.0  # beyond it numbers overflow
_LEAST_SEEN, _LEAST_SEEN_WEIGHT, _MOST_SEEN = 1.0, 2.0, 200.0
_HALF_LIFE = 1800.0

NO_RECORD = -1
_RECORDS = 1 << 15
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests


def bins(
    turn: int,
    ways: int,
    gap: float | None,
    new_tokens: int,
    hint: int = NO_HINT,
) -> Features:
    """The features of a node, shared if it has ``ways``; ``gap`` is log2 of seconds."""
    shared = ways > 0
    if shared:
        by_turn, by_new = _SHARED + bisect_right(_WAYS, ways), len(_NEW) + 1
    else:
        by_turn, by_new = bisect_right(_TURN, turn), bisect_right(_NEW, new_tokens)
    by_gap = 0 if gap is None else 1 + bisect_right(_GAP, gap)
    return (
        by_turn,
        _STARTS[1] + shared * _GAPS + by_gap,
        _STARTS[2] + by_new,
        _HINTS_AT + hint,
    )


def hint_bin(ended: bool, within: float | None, *, is_believed: bool) -> int:
    """The bin of a hint; ``within`` is the age until which a conversation continues."""
    kind = 0 if ended else 1
    if within is not None and not ended:
        kind = 2 + min(_DEADLINES - 1, bisect_left([2.0**at for at in range(_DEADLINES)], within))
    return 1 + kind + (not is_believed) * _HINTS


def _hint_cells() -> tuple[Floats, Ints]:
    """By hint and bucket, what it adds to the chance before anything is learned, and its weight.

    All deadlines share what is learned of how near they are.
    """
    prior = np.zeros((_SIZES[3], NUM_BUCKETS))
    cells = np.arange(_HINTS_AT, _STARTS[-1])[:, None] * _NUM_GROUPS + _GROUPS
    prior[hint_bin(True, None, is_believed=True)] = -5.0
    prior[hint_bin(False, None, is_believed=True)] = 2.0
    for is_believed in (True, False):
        first = hint_bin(False, 0.0, is_believed=is_believed)
        for deadline in range(_DEADLINES):
            near = np.searchsorted(_NEAR, _BUCKETS - _ENDS.searchsorted(2.0**deadline))
            prior[first + deadline] = is_believed * _NEAR_PRIOR.take(near)
            cells[first + deadline] = (_HINTS_AT + first) * _NUM_GROUPS + near
    return prior, cells


_NEAR = (-8, -4, -2, 0, 2, 6)
"""Where an age lies to the deadline of its hint, in buckets."""
_NEAR_PRIOR = np.array([0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0])
_HINT_PRIOR, _HINT_CELLS = _hint_cells()


class ReturnModel:
    """What blocks are worth, by their features and age; learned as requests come.

    What has not returned before a bucket of age returns in it with a chance, the hazard: the
    logistic of a base for the bucket plus a weight for each feature, by groups of buckets. Each
    moves by the error over how much was seen so far. What was seen fades with time and never counts
    more than ``_MOST_SEEN``, so what is true today outweighs yesterday's soon. At first the chance
    is the same in each doubling of age, which is LRU.

    The value of a block is Gittins' index: the best, over how long to wait, of the chance to return
    by then over the time that it is kept. Owns the numbers learned, a row of values for each set of
    features that was met, and records: when something was asked for, with which features, and at
    which age again. Records are numbered; at least the last ``_RECORDS`` are remembered.
    """

    def __init__(self) -> None:
        self._base = np.full(_NUM_BASES * NUM_BUCKETS, _START)
        self._base_seen = np.full(len(self._base), _LEAST_SEEN)
        self._weight = np.zeros(_STARTS[-1] * _NUM_GROUPS)
        self._weight_seen = np.full(len(self._weight), _LEAST_SEEN_WEIGHT)
        self._rows: dict[Features, int] = {}
        self._features = np.zeros((64, len(_SIZES)), dtype=np.int64)
        self._value = np.zeros((64, NUM_BUCKETS))
        self._is_old = np.ones(64, dtype=bool)  # by row: whether its values follow the model
        self._first = 0  # number of the record at place 0
        self._count = 0
        self._time = np.zeros(2 * _RECORDS)
        self._row = np.zeros(2 * _RECORDS, dtype=np.int64)
        self._returned = np.zeros(2 * _RECORDS, dtype=np.int8)
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)  # records that a bucket learned of
        self._learned_at = 0.0
        self.row(bins(0, 0, None, 0))  # row 0, of what was never asked for

    @property
    def learned(self) -> tuple[Floats, ...]:
        """All that it knows of returns, to be read or to be filled."""
        self._is_old.fill(True)
        return self._base, self._base_seen, self._weight, self._weight_seen

    def row(self, features: Features) -> int:
        """The row for these features."""
        row = self._rows.get(features)
        if row is None:
            row = self._rows[features] = len(self._rows)
            if row == len(self._features):
                for name in ("_features", "_value", "_is_old"):
                    setattr(self, name, np.concatenate([getattr(self, name)] * 2))
            self._features[row], self._is_old[row] = features, True
        return row

    # -- records --------------------------------------------------------------------------------

    def add(self, now: float, row: int) -> int:
        """A record of what has these features from now on; returns its number."""
        if self._count == 2 * _RECORDS:
            for array in (self._time, self._row, self._returned):
                array[:_RECORDS] = array[_RECORDS:].copy()
            self._first += _RECORDS
            self._count = _RECORDS
            self._passed = np.maximum(self._passed - _RECORDS, 0)
        at = self._count
        self._count = at + 1
        self._time[at], self._row[at], self._returned[at] = now, row, NUM_BUCKETS
        return self._first + at

    def change(self, record: int, row: int) -> None:
        """It has other features: a hint came."""
        if record >= self._first:
            self._row[record - self._first] = row

    def close(self, record: int, now: float) -> None:
        """It is asked for again now."""
        at = record - self._first
        if at >= 0:
            age = now - self._time.item(at)
            self._returned[at] = min(NUM_BUCKETS - 1, bisect_right(_END_LIST, age))

    # -- learning -------------------------------------------------------------------------------

    def learn(self, now: float) -> None:
        """Learn of every bucket of age that a record has passed since the last call."""
        kept = 0.5 ** (max(0.0, now - self._learned_at) / _HALF_LIFE)
        self._learned_at = now
        np.clip(self._base_seen * kept, _LEAST_SEEN, _MOST_SEEN, out=self._base_seen)
        np.clip(self._weight_seen * kept, _LEAST_SEEN_WEIGHT, _MOST_SEEN, out=self._weight_seen)
        ends = self._time[: self._count].searchsorted(now - _ENDS, "right")
        counts = np.clip(ends - self._passed, 0, _AT_ONCE)
        stops = counts.cumsum()
        at = np.arange(stops[-1]) - (stops - counts - self._passed).repeat(counts)
        self._passed += counts
        buckets, returned = _BUCKETS.repeat(counts), self._returned.take(at)
        seen = (returned >= buckets).nonzero()[0]
        if len(seen):
            at, buckets, returned = at.take(seen), buckets.take(seen), returned.take(seen)
            self._fit(self._row.take(at), buckets, returned == buckets)

    def _fit(self, rows: Ints, buckets: Ints, returned: npt.NDArray[np.bool_]) -> None:
        """Each of these came to a bucket of age, and returned in it or did not."""
        # Most are alike: each kind is learned of once, as often as it was met.
        kinds, times = np.unique(2 * (rows * NUM_BUCKETS + buckets) + returned, return_counts=True)
        rows, buckets = np.divmod(kinds // 2, NUM_BUCKETS)
        chance, bases, weights = self._chances(rows[:, None], buckets[:, None])
        error = times * (kinds % 2 - chance[:, 0])
        told = times * (chance * (1 - chance))[:, 0]
        for cells, value, seen in (
            (bases, self._base, self._base_seen),
            (weights[:, :, 0], self._weight, self._weight_seen),
        ):
            flat, each = cells.reshape(-1), cells.shape[1]
            seen += np.bincount(flat, told.repeat(each), len(seen))
            value += np.bincount(flat, error.repeat(each), len(seen)) / seen
        self._is_old.fill(True)

    def _chances(self, rows: Ints, buckets: Ints) -> tuple[Floats, Ints, Ints]:
        """For each row, the chance to return in some buckets; the bases and weights that say so."""
        features = self._features[rows[:, 0]]
        # A base for conversations, and one for each number of ways.
        base = np.maximum(features[:, :1] - _SHARED + 1, 0)
        bases = base * NUM_BUCKETS + buckets
        weights = features[:, :, None] * _NUM_GROUPS + _GROUPS.take(buckets)[:, None, :]
        hints = features[:, 3:] - _HINTS_AT
        weights[:, 3] = _HINT_CELLS[hints, buckets]
        logits = self._base.take(bases) + self._weight.take(weights).sum(1)
        logits += _HINT_PRIOR[hints, buckets]
        chance = 1 / (1 + np.exp(-np.clip(logits, -_MOST_LOGIT, _MOST_LOGIT)))
        return chance, bases, weights

    # -- values ---------------------------------------------------------------------------------

    def values(self, rows: Ints, ages: Floats) -> Floats:
        """The values of blocks with these features at these ages."""
        old = rows[self._is_old.take(rows)]
        if len(old):
            old = np.unique(old)
            self._value[old] = self._computed(old)
            self._is_old[old] = False
        buckets = np.minimum(_ENDS.searchsorted(ages, "right"), NUM_BUCKETS - 1)
        return self._value.reshape(-1).take(rows * NUM_BUCKETS + buckets)

    def _computed(self, rows: Ints) -> Floats:
        """For each row, by bucket of age: returns a second that a block is held."""
        chance, _, _ = self._chances(rows[:, None], _BUCKETS[None])
        # By row and edge of a bucket: not returned by then, and how long held until then.
        there, held = np.ones((len(rows), NUM_BUCKETS + 1)), np.zeros((len(rows), NUM_BUCKETS + 1))
        (1 - chance).cumprod(axis=1, out=there[:, 1:])
        since = there[:, :-1]
        (since * _SPANS * (1 - chance / 2)).cumsum(axis=1, out=held[:, 1:])
        before = held[:, :-1] - (_SWITCH_SECONDS * since + _NO_TIME)
        gain = since[:, None] - there[:, _UNTIL]
        gain /= held[:, _UNTIL] - before[:, None]
        best: Floats = gain.max(axis=1)
        return best
