"""The chance that blocks are asked for again, by their age and a few features.

Each feature is one of a few bins::

    turn     1 2 3 4, 5-8, more        how often a conversation was asked for
    ways     3, 4-7, 8-31, more        instead, for a part that others share: how many go on from it
    gap      none, by factors of four  the mean time between requests, of the last four
    new      by factors of four        tokens of the last prompt that were new
    hint     none, ended, continues, continues within a second, two, four, ...
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Where bins begin, for each feature after its first bin.
_TURN, _WAYS = (2, 3, 4, 5, 9), (4, 8, 32)
_GAP = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)  # logarithms to base two of seconds
_NEW = (1024, 4096, 16384, 65536)
_DEADLINES = [2.0**at for at in range(14)]
NO_HINT, _ENDED, _CONTINUES, _WITHIN = range(4)
_SHARED = len(_TURN) + 1
_SIZES = (_SHARED + len(_WAYS) + 1, len(_GAP) + 2, len(_NEW) + 1, _WITHIN + len(_DEADLINES))
_, _GAPS, _NEWS, _HINTS = _SIZES
_FEATURES: Ints = np.indices(_SIZES).reshape(len(_SIZES), -1).T.copy()
"""The bins of each row; those of all features are numbered through."""
_FEATURES[_FEATURES[:, 0] >= _SHARED, 1:3] += _GAPS, _NEWS  # shared parts have bins of their own
_BASE_OF = np.maximum(_FEATURES[:, 0] - _SHARED + 1, 0)
"""The base of each row: one for conversations, and one for each number of ways."""
_HINT_OF = _FEATURES[:, 3].copy()
_HINT_START = sum(_SIZES[:3]) + _GAPS + 1
_FEATURES[:, :3] += (0, _SIZES[0], _SIZES[0] + 2 * _GAPS)
_NUM_ROWS = len(_FEATURES)

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
_NEAR = np.array((-6, -2, 0, 2, 4, 8))
"""How many buckets are left until a deadline; all deadlines share what is learned of that."""
_HINT_PRIOR = (*np.repeat((0.0, -5.0, 2.0), _NUM_GROUPS), 0.0, 0.0, 0.0, 2.0, 2.0, 1.0, 0.0)
_HINT_WEIGHTS = (_HINT_START + np.arange(_HINTS)[:, None]) * _NUM_GROUPS + _GROUPS
"""The weight of each hint in each bucket."""
_HINT_WEIGHTS[_WITHIN:] = (_HINT_START + _WITHIN) * _NUM_GROUPS + _NEAR.searchsorted(
    _ENDS.searchsorted(_DEADLINES)[:, None] - _BUCKETS, "right"
)
_SWITCH_SECONDS = 2.0
"""What is evicted for a newcomer does not come back when the newcomer goes: so holding one for a
moment is no bargain, however likely that moment."""
_NO_TIME = 1e-12  # seconds: where all have returned long before, nothing is divided by nothing
_START = -3.0  # a chance of 5% in each bucket
_MOST_LOGIT = 500.0  # beyond it numbers overflow
_LEAST_SEEN, _LEAST_SEEN_WEIGHT, _MOST_SEEN = 1.0, 2.0, 200.0
_HALF_LIFE = 1800.0
_MOST_FADES = 100.0  # seconds of fading in one step of learning: requests may be rare

NO_RECORD = -1
_RECORDS = 1 << 15
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests


def row_of(turn: int, ways: int, gap: float | None, new_tokens: int, hint: int = NO_HINT) -> int:
    """The row of a node, shared if it has ``ways``; ``gap`` is log2 of seconds."""
    if ways:
        by_turn, by_new = _SHARED + bisect_right(_WAYS, ways), 0
    else:
        by_turn, by_new = bisect_right(_TURN, turn), bisect_right(_NEW, new_tokens)
    by_gap = 0 if gap is None else 1 + bisect_right(_GAP, gap)
    return ((by_turn * _GAPS + by_gap) * _NEWS + by_new) * _HINTS + hint


def hint_bin(ended: bool, within: float | None) -> int:
    """The bin of a hint; ``within`` is the age until which a conversation continues."""
    if ended or within is None:
        return _ENDED if ended else _CONTINUES
    return _WITHIN + min(len(_DEADLINES) - 1, bisect_left(_DEADLINES, within))


class ReturnModel:
    """What blocks are worth, by their features and age; learned as requests come.

    What has not returned before a bucket of age returns in it with a chance, the hazard: the
    logistic of a base for the bucket plus a weight for each feature, by groups of buckets. Each
    moves by the error over how much was seen so far. What was seen fades with time and never counts
    more than ``_MOST_SEEN``, so what is true today outweighs yesterday's soon. At first the chance
    is the same in each doubling of age, which is LRU.

    The value of a block is Gittins' index: the best, over how long to wait, of the chance to return
    by then over the time that it is kept. Owns the numbers learned, a row of values for each set of
    features, and records: when something was asked for, with which features, and at
    which age again. Records are numbered; at least the last ``_RECORDS`` are remembered.
    """

    def __init__(self) -> None:
        self._base = np.full((len(_WAYS) + 2) * NUM_BUCKETS, _START)
        self._base_seen = np.full(len(self._base), _LEAST_SEEN)
        self._weight = np.concatenate((np.zeros(_HINT_START * _NUM_GROUPS), _HINT_PRIOR))
        self._weight_seen = np.full(len(self._weight), _LEAST_SEEN_WEIGHT)
        self._value = np.zeros((_NUM_ROWS, NUM_BUCKETS), dtype=np.float32)
        self._is_old = np.ones(_NUM_ROWS, dtype=bool)  # whether its values follow the model
        self._first = 0  # number of the record at place 0
        self._count = 0
        self._time = np.zeros(2 * _RECORDS)
        self._row = np.zeros(2 * _RECORDS, dtype=np.int64)
        self._returned = np.zeros(2 * _RECORDS, dtype=np.int8)
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)  # records that a bucket learned of
        self._learned_at = 0.0

    @property
    def learned(self) -> tuple[Floats, ...]:
        """All that it knows of returns, to be read or to be filled."""
        self._is_old.fill(True)
        return self._base, self._base_seen, self._weight, self._weight_seen

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
        kept = 0.5 ** (min(max(0.0, now - self._learned_at), _MOST_FADES) / _HALF_LIFE)
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
        chance, bases, weights = self._chances(rows, buckets[:, None])
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
        bases = _BASE_OF.take(rows)[:, None] * NUM_BUCKETS + buckets
        weights = _FEATURES.take(rows, 0)[:, :, None] * _NUM_GROUPS
        weights = weights + _GROUPS.take(buckets)[:, None]
        weights[:, 3] = _HINT_WEIGHTS[_HINT_OF.take(rows)[:, None], buckets]
        logits = self._base.take(bases) + self._weight.take(weights).sum(1)
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
        return self._value.reshape(-1).take(rows * NUM_BUCKETS + buckets).astype(np.float64)

    def _computed(self, rows: Ints) -> Floats:
        """For each row, by bucket of age: returns a second that a block is held."""
        chance, _, _ = self._chances(rows, _BUCKETS[None])
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
