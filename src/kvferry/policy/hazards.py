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

from kvferry.policy.traits import NO_BIN, NUM_BASES, NUM_BINS, NUM_TRAITS, base_of, prior

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
_WAITS = np.array([1, 2, 3, 4, 6, 8, 11, 15, 20, 27, NUM_BUCKETS])
_UNTIL: Ints = np.minimum(np.arange(NUM_BUCKETS)[:, None] + _WAITS, NUM_BUCKETS)
"""By bucket of age, the edges until which to wait: not every one, they lie close enough."""

_SWITCH_SECONDS = 2.0
"""What is evicted for a newcomer does not come back when the newcomer goes: so holding one for a
moment is no bargain, however likely that moment."""

_PRIOR_CHANCE = 0.05
_PRIOR_SEEN = 1.0
_PRIOR_SEEN_TRAIT = 2.0


class Hazards:
    """Owns the bases and the weights, and how much was seen of each. Knows no conversation."""

    def __init__(self) -> None:
        start = float(np.log(_PRIOR_CHANCE / (1 - _PRIOR_CHANCE)))
        self._base = np.full(NUM_BASES * NUM_BUCKETS, start)
        self._base_seen = np.full(NUM_BASES * NUM_BUCKETS, _PRIOR_SEEN)
        self._weight = np.repeat(prior(), _NUM_GROUPS)
        self._weight_seen = np.full(NUM_BINS * _NUM_GROUPS, _PRIOR_SEEN_TRAIT)

    def learn(self, traits: Ints, buckets: Ints, returned: npt.NDArray[np.bool_]) -> None:
        """Each of these came to a bucket with these traits, and returned in it or did not."""
        bases = buckets + NUM_BUCKETS * base_of(traits)
        weights = (traits * _NUM_GROUPS + _GROUPS.take(buckets)[:, None]).reshape(-1)
        logits = self._base.take(bases) + self._weight.take(weights).reshape(traits.shape).sum(1)
        chance = 1 / (1 + np.exp(-logits))
        error, told = returned - chance, chance * (1 - chance)
        self._base_seen += np.bincount(bases, told, len(self._base))
        self._base += np.bincount(bases, error, len(self._base)) / self._base_seen
        each = np.repeat(told, NUM_TRAITS)
        self._weight_seen += np.bincount(weights, each, len(self._weight))
        each = np.repeat(error, NUM_TRAITS)
        self._weight += np.bincount(weights, each, len(self._weight)) / self._weight_seen
        self._weight[NO_BIN * _NUM_GROUPS : (NO_BIN + 1) * _NUM_GROUPS] = 0.0

    def chances(self, traits: Ints) -> Floats:
        """For each row of traits the chance to return in each bucket, if not before."""
        by_group = self._weight.reshape(NUM_BINS, _NUM_GROUPS)[traits].sum(1)
        base = self._base.reshape(NUM_BASES, NUM_BUCKETS)[base_of(traits)]
        return 1 / (1 + np.exp(-(base + by_group[:, _GROUPS])))

    def worth(self, traits: Ints) -> Floats:
        """For each row of traits, by bucket of age: returns a second that a block is held."""
        chance = self.chances(traits)
        there = np.empty((len(traits), NUM_BUCKETS + 1))  # not returned by each edge
        there[:, 0] = 1.0
        np.cumprod(1 - chance, axis=1, out=there[:, 1:])
        held = np.zeros_like(there)
        np.cumsum(there[:, :-1] * _SPANS * (1 - chance / 2), axis=1, out=held[:, 1:])
        # By row, age, and how long to wait.
        gain = there[:, :-1, None] - there.take(_UNTIL, axis=1)
        cost = held.take(_UNTIL, axis=1) - (held[:, :-1, None] - _SWITCH_SECONDS)
        worth: Floats = (gain / cost).max(axis=2)
        return worth
