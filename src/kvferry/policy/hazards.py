"""How likely a conversation is to return at each age, learned as it runs; what that is worth.

Ages fall into buckets, two to a doubling. In each bucket a conversation that has not returned yet
does so with a chance, the hazard: the logistic of a base for the bucket plus a weight for each of
the conversation's traits, one for each group of buckets. Base and weights move by small steps, each
the error over how much was seen so far, so that the first hundred records teach most. Before that a
prior speaks: the same small chance in every bucket, which makes the older the less likely to
return within a second, as LRU has it.

The worth of a block at some age is Gittins' index: the best, over how long to wait, of the chance
to return by then over the time that it is held.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.policy.traits import (
    DEADLINES,
    FIRST_WITHIN,
    NO_BIN,
    NUM_BASES,
    NUM_BINS,
    NUM_TRAITS,
    base_of,
    prior,
)

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
"""Where an age lies to the deadline it was said to return by, in buckets: long before or after
counts as one. All deadlines share what is learned of that."""
_NEAR_PRIOR = np.array([0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0])
"""And what is believed of it before: it returns by then; later, what was said says nothing."""


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
    """Owns the bases and the weights, and how much was seen of each. Knows no conversation."""

    def __init__(self) -> None:
        start = float(np.log(_PRIOR_CHANCE / (1 - _PRIOR_CHANCE)))
        self._base = np.full(NUM_BASES * NUM_BUCKETS, start)
        self._base_seen = np.full(NUM_BASES * NUM_BUCKETS, _PRIOR_SEEN)
        self._weight = np.concatenate((np.repeat(prior(), _NUM_GROUPS), _NEAR_PRIOR))
        self._weight_seen = np.full(len(self._weight), _PRIOR_SEEN_TRAIT)

    def learn(self, traits: Ints, buckets: Ints, returned: Ints, times: Ints) -> None:
        """So many times each of these came to a bucket with these traits, and returned or not."""
        bases = buckets + NUM_BUCKETS * base_of(traits)
        weights = _CELLS.take(traits * NUM_BUCKETS + buckets[:, None]).reshape(-1)
        logits = self._base.take(bases) + self._weight.take(weights).reshape(traits.shape).sum(1)
        chance = 1 / (1 + np.exp(-logits))
        error, told = times * (returned - chance), times * chance * (1 - chance)
        self._base_seen += np.bincount(bases, told, len(self._base))
        self._base += np.bincount(bases, error, len(self._base)) / self._base_seen
        each = np.repeat(told, NUM_TRAITS)
        self._weight_seen += np.bincount(weights, each, len(self._weight))
        each = np.repeat(error, NUM_TRAITS)
        self._weight += np.bincount(weights, each, len(self._weight)) / self._weight_seen
        self._weight[NO_BIN * _NUM_GROUPS : (NO_BIN + 1) * _NUM_GROUPS] = 0.0

    def chances(self, traits: Ints) -> Floats:
        """For each row of traits the chance to return in each bucket, if not before."""
        logits = self._base.reshape(NUM_BASES, NUM_BUCKETS)[base_of(traits)]
        by_group = self._weight[: NUM_BINS * _NUM_GROUPS].reshape(NUM_BINS, _NUM_GROUPS)
        logits += by_group[traits[:, :-1]].sum(1)[:, _GROUPS]
        logits += self._weight[_CELLS[traits[:, -1]]]  # what was said
        return 1 / (1 + np.exp(-logits))

    def first_worth(self, traits: Ints) -> float:
        """For one row of traits what :meth:`worth` says of the first bucket, for much less."""
        chance = self.chances(traits)[0]
        there = np.cumprod(1 - chance)
        spent = _SPANS * (1 - chance / 2)
        spent[1:] *= there[:-1]
        held = np.cumsum(spent).take(_LAST_WAITED)
        gain = (1 - there.take(_LAST_WAITED)) / (held + (_SWITCH_SECONDS + _NO_TIME))
        return gain.item(gain.argmax())

    def worth(self, traits: Ints) -> Floats:
        """For each row of traits, by bucket of age: returns a second that a block is held."""
        chance = self.chances(traits)
        # By row and edge: not returned by then, and how long held until then. Beyond the last
        # edge nothing changes any more.
        there, held = np.empty((2, len(traits), 2 * NUM_BUCKETS + 1))
        there[:, 0], held[:, 0] = 1.0, 0.0
        np.cumprod(1 - chance, axis=1, out=there[:, 1 : NUM_BUCKETS + 1])
        spent = there[:, :NUM_BUCKETS] * _SPANS * (1 - chance / 2)
        np.cumsum(spent, axis=1, out=held[:, 1 : NUM_BUCKETS + 1])
        for edges in (there, held):
            edges[:, NUM_BUCKETS + 1 :] = edges[:, NUM_BUCKETS : NUM_BUCKETS + 1]
        since = there[:, :NUM_BUCKETS]
        before = held[:, :NUM_BUCKETS] - (_SWITCH_SECONDS * since + _NO_TIME)
        if len(traits) <= _FEW:
            gains = since[:, None] - there.take(_WAITED, axis=1)
            gains /= held.take(_WAITED, axis=1) - before[:, None]
            return np.asarray(np.maximum.reduce(gains, axis=1, initial=0.0))
        worth: Floats = np.zeros_like(chance)
        for wait in _WAITS:
            gain = since - there[:, wait : wait + NUM_BUCKETS]
            gain /= held[:, wait : wait + NUM_BUCKETS] - before
            np.maximum(worth, gain, out=worth)
        return worth
