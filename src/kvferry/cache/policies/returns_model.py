"""The chance that blocks are asked for again, by their age and a few features.

Each feature is one of a few bins::

    turn     1 2 3 4, 5-8, more        how often a conversation was asked for; or it was left
    ways     2-3, 4-7, 8-31, more      instead, for a part that others share: how many go on from it
    gap      none, by factors of four  the mean time between requests, of the last four
    kin      unknown, 3%, 15%, 40%     the share that returned of those that begin at the same place
    new      by factors of four        tokens of the last prompt that were new
    hint     none, ended, continues, continues within a second, two, four, ...; by trust
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Features = tuple[int, ...]
"""The bin of each feature; bins of all features are numbered through."""


class Trust(IntEnum):
    """How often the hints of a sender came true."""

    UNKNOWN = 0
    HIGH = 1
    LOW = 2


_TURNS, _WAYS, _GAPS, _KIN, _NEW, _DEADLINES = 7, 4, 8, 5, 5, 14
_LEFT = _TURNS - 1
_KIN_SHARES, _FEW_KIN = (0.03, 0.15, 0.4), 4
_LEAST_NEW = 9  # bits: bins begin at 512 tokens
_HINTS = 2 + _DEADLINES
# Shared parts have bins of their own, behind those of conversations.
_STARTS = np.cumsum([0, _TURNS + _WAYS, 2 * _GAPS, 2 * _KIN, _NEW + 1, 1 + len(Trust) * _HINTS])
_, _GAP, _KIN_AT, _AT_NEW, _AT_HINT, _NUM_BINS = _STARTS.tolist()
NO_HINT = 0


def bins(
    turn: int,
    ways: int,
    gap: float | None,
    kin: tuple[float, float],
    new_tokens: int,
    hint: int = NO_HINT,
    *,
    is_left: bool = False,
) -> Features:
    """The features of a node; not shared where ``ways`` is zero.

    ``gap`` is a logarithm to base two of seconds, ``kin`` how many there are and how many returned.
    """
    shared = ways > 0
    if shared:
        by_turn = _TURNS + min(_WAYS - 1, ways.bit_length() // 2 if ways > 3 else 0)
    elif is_left:
        by_turn = _LEFT
    else:
        by_turn = turn - 1 if turn < 5 else 4 + (turn > 8)
    by_gap = 0 if gap is None else 1 + int(min(_GAPS - 2, max(0.0, gap / 2 + 1)))
    num, returned = kin
    by_kin = 1 + bisect_left(_KIN_SHARES, returned / num) if num >= _FEW_KIN else 0
    by_new = _NEW if shared else min(_NEW - 1, (new_tokens >> _LEAST_NEW).bit_length() // 2)
    return (
        by_turn,
        _GAP + shared * _GAPS + by_gap,
        _KIN_AT + shared * _KIN + by_kin,
        _AT_NEW + by_new,
        _AT_HINT + hint,
    )


def hint_bin(ended: bool, within: float | None, trust: Trust) -> int:
    """The bin of a hint; ``within`` is the age until which a conversation continues."""
    kind = 0 if ended else 1 if within is None else 2
    if within is not None and not ended:
        kind += min(_DEADLINES - 1, bisect_left(_DEADLINE_AGES, within))
    return 1 + trust * _HINTS + kind


NUM_BUCKETS = 38
FIRST_SECONDS = 0.25
ENDS: Floats = FIRST_SECONDS * 2.0 ** (np.arange(NUM_BUCKETS) / 2)
"""Where each bucket of age ends, in seconds; what is older is in the last all the same."""
_END_LIST: list[float] = ENDS.tolist()
_SPANS: Floats = np.diff(ENDS, prepend=0.0)
_GROUPS: Ints = np.arange(NUM_BUCKETS) // 6  # buckets that share a weight: a factor of eight in age
_NUM_GROUPS = int(_GROUPS[-1]) + 1
_DEADLINE_AGES = tuple(2.0**at for at in range(_DEADLINES))
_NEAR = np.array([-8, -4, -2, 0, 2, 6])
"""Where an age lies to the deadline of its hint, in buckets: all deadlines share what is learned
of that."""
_NEAR_PRIOR = np.array([0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0])
_ENDED_PRIOR, _CONTINUES_PRIOR = -5.0, 2.0


def _cells() -> Ints:
    """By bin and bucket, the weight that counts: one for a group, or by how near a deadline is."""
    cells = np.arange(_NUM_BINS)[:, None] * _NUM_GROUPS + _GROUPS
    for trust in Trust:
        first = _NUM_BINS * _NUM_GROUPS + trust * len(_NEAR_PRIOR)
        for deadline in _DEADLINE_AGES:
            to_go = np.arange(NUM_BUCKETS) - ENDS.searchsorted(deadline)
            at = _AT_HINT + hint_bin(False, deadline, trust)
            cells[at] = first + _NEAR.searchsorted(to_go)
    return cells


def _prior() -> Floats:
    """What each bin adds to the chance before anything is learned, as a logit."""
    weights, near = np.zeros(_NUM_BINS), np.zeros((len(Trust), len(_NEAR_PRIOR)))
    for trust in (Trust.UNKNOWN, Trust.HIGH):
        weights[_AT_HINT + hint_bin(True, None, trust)] = _ENDED_PRIOR
        weights[_AT_HINT + hint_bin(False, None, trust)] = _CONTINUES_PRIOR
        near[trust] = _NEAR_PRIOR
    return np.concatenate((np.repeat(weights, _NUM_GROUPS), near.reshape(-1)))


_CELLS = _cells()
_WAITS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 27, NUM_BUCKETS)
"""For how many buckets one might wait: not every number, they lie close enough."""
_SWITCH_SECONDS = 2.0
"""What is evicted for a newcomer does not come back when the newcomer goes: so holding one for a
moment is no bargain, however likely that moment."""
_NO_TIME = 1e-12  # seconds: where all have returned long before, nothing is divided by nothing
_PRIOR_CHANCE, _PRIOR_SEEN, _PRIOR_SEEN_WEIGHT = 0.05, 1.0, 2.0
_NUM_BASES = 1 + _WAYS
_MOST_SEEN = 200.0
_HALF_LIFE = 1800.0


class ValueTable:
    """What blocks are worth, by their features and age; learned as requests come.

    What has not returned before a bucket of age returns in it with a chance, the hazard: the
    logistic of a base for the bucket plus a weight for each feature, by groups of buckets. Each
    moves by the error over how much was seen so far. What was seen fades with time and never counts
    more than ``_MOST_SEEN``, so what is true today outweighs yesterday's soon. At first the chance
    is the same in each doubling of age, which is LRU.

    The value of a block is Gittins' index: the best, over how long to wait, of the chance to return
    by then over the time that it is kept. Owns the model, and a row of values for each set of
    features that was met; a row follows the model when it is looked at.
    """

    def __init__(self) -> None:
        start = float(np.log(_PRIOR_CHANCE / (1 - _PRIOR_CHANCE)))
        self.base = np.full(_NUM_BASES * NUM_BUCKETS, start)
        self.base_seen = np.full(_NUM_BASES * NUM_BUCKETS, _PRIOR_SEEN)
        self.weight = _prior()
        self.weight_seen = np.full(len(self.weight), _PRIOR_SEEN_WEIGHT)
        self._rows: dict[Features, int] = {}
        self._features = np.zeros((64, 5), dtype=np.int64)
        self._value = np.zeros((64, NUM_BUCKETS))
        self._version = np.zeros(64, dtype=np.int64)
        self.version = 1
        """Grows whenever the model changes."""

    def row(self, features: Features) -> int:
        """The row for these features."""
        row = self._rows.get(features)
        if row is None:
            row = self._rows[features] = len(self._rows)
            if row == len(self._features):
                self._features = np.concatenate((self._features, self._features))
                self._value = np.concatenate((self._value, self._value))
                self._version = np.concatenate((self._version, np.zeros_like(self._version)))
            self._features[row] = features
        return row

    def fade(self, seconds: float) -> None:
        """So much time has passed: what was seen before counts less."""
        kept = 0.5 ** (seconds / _HALF_LIFE)
        for seen, least in (
            (self.base_seen, _PRIOR_SEEN),
            (self.weight_seen, _PRIOR_SEEN_WEIGHT),
        ):
            seen *= kept
            np.clip(seen, least, _MOST_SEEN, out=seen)

    def learn(self, rows: Ints, buckets: Ints, returned: npt.NDArray[np.bool_]) -> None:
        """Each of these came to a bucket of age, and returned in it or did not."""
        # Most are alike: each kind is learned of once, as often as it was met.
        every = 2 * (rows * NUM_BUCKETS + buckets) + returned
        kinds, times = np.unique(every, return_counts=True)
        rows, buckets = np.divmod(kinds // 2, NUM_BUCKETS)
        features = self._features.take(rows, axis=0)
        bases = buckets + NUM_BUCKETS * _base_of(features)
        weights = _CELLS[features, buckets[:, None]]
        chance = 1 / (1 + np.exp(-self.base.take(bases) - self.weight.take(weights).sum(1)))
        error, told = times * (kinds % 2 - chance), times * chance * (1 - chance)
        self.base_seen += np.bincount(bases, told, len(self.base))
        self.base += np.bincount(bases, error, len(self.base)) / self.base_seen
        flat, each = weights.reshape(-1), features.shape[1]
        self.weight_seen += np.bincount(flat, np.repeat(told, each), len(self.weight))
        step = np.bincount(flat, np.repeat(error, each), len(self.weight))
        self.weight += step / self.weight_seen
        self.version += 1

    def values(self, rows: Ints, ages: Floats) -> Floats:
        """The values of blocks with these features at these ages."""
        self._follow(rows)
        buckets = np.minimum(ENDS.searchsorted(ages, "right"), NUM_BUCKETS - 1)
        return self._value.reshape(-1).take(rows * NUM_BUCKETS + buckets)

    def first(self, row: int) -> float:
        """The value of a block with these features that was asked for just now."""
        if self._version.item(row) != self.version:
            self._follow(np.array([row]))
        return self._value.item(row, 0)

    def _follow(self, rows: Ints) -> None:
        old = rows[self._version.take(rows) != self.version]
        if len(old):
            old = np.unique(old)
            self._version[old] = self.version
            self._value[old] = self._computed(self._features.take(old, axis=0))

    def _computed(self, features: Ints) -> Floats:
        """For each row of features, by bucket of age: returns a second that a block is held."""
        logits = self.base.reshape(_NUM_BASES, NUM_BUCKETS)[_base_of(features)]
        chance = 1 / (1 + np.exp(-logits - self.weight[_CELLS[features]].sum(1)))
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
        value: Floats = np.zeros_like(chance)
        for wait in _WAITS:
            gain = since - there[:, wait : wait + NUM_BUCKETS]
            gain /= held[:, wait : wait + NUM_BUCKETS] - before
            np.maximum(value, gain, out=value)
        return value


def _base_of(features: Ints) -> Ints:
    """The base of each row of features: 0 for conversations, else by how many share the part."""
    return np.maximum(features[:, 0] - _TURNS + 1, 0)


NO_RECORD = -1
_RECORDS = 1 << 15
_OPEN = NUM_BUCKETS
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests
_BUCKETS = np.arange(NUM_BUCKETS)


class Records:
    """When something was asked for, with which features, and at which age again.

    Numbers only grow; at least the last ``_RECORDS`` are remembered.
    """

    def __init__(self) -> None:
        self.first = 0  # number of the record at place 0
        self._count = 0
        self._time = np.zeros(2 * _RECORDS)
        self._row = np.zeros(2 * _RECORDS, dtype=np.int32)
        self._returned = np.zeros(2 * _RECORDS, dtype=np.int8)
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)

    def add(self, now: float, row: int) -> int:
        """A record of what has these features from now on; returns its number."""
        if self._count == 2 * _RECORDS:
            for array in (self._time, self._row, self._returned):
                array[:_RECORDS] = array[_RECORDS:].copy()
            self.first += _RECORDS
            self._count = _RECORDS
            self._passed = np.maximum(self._passed - _RECORDS, 0)
        at = self._count
        self._count = at + 1
        self._time[at], self._row[at], self._returned[at] = now, row, _OPEN
        return self.first + at

    def change(self, record: int, row: int) -> None:
        """It has other features: a hint came."""
        if record >= self.first:
            self._row[record - self.first] = row

    def close(self, record: int, now: float) -> None:
        """It is asked for again now."""
        at = record - self.first
        if at >= 0:
            age = now - self._time.item(at)
            self._returned[at] = min(NUM_BUCKETS - 1, bisect_right(_END_LIST, age))

    def teach(self, table: ValueTable, now: float) -> bool:
        """Let the model learn of every bucket that a record has passed since; False if none has."""
        ends = self._time[: self._count].searchsorted(now - ENDS, "right")
        counts = np.minimum(np.maximum(ends - self._passed, 0), _AT_ONCE)
        stops = counts.cumsum()
        total = stops.item(-1)
        if not total:
            return False
        buckets = _BUCKETS.repeat(counts)
        at = np.arange(total) - (stops - counts - self._passed).repeat(counts)
        self._passed += counts
        returned = self._returned.take(at)
        seen = (returned >= buckets).nonzero()[0]
        if len(seen):
            buckets = buckets.take(seen)
            rows = self._row.take(at.take(seen)).astype(np.int64)
            table.learn(rows, buckets, returned.take(seen) == buckets)
        return True
