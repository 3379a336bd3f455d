"""A tier that keeps several blocks of a chain in one object, which has the name of the last.

It finds a block only for who knows the chain as far as that name. So its "yes" is true for
everybody. But its "no" says nothing to a chain that goes on differently: it is remembered together
with the last block that could have named an object, and believed by whoever would name the same::

    asked     k4 k5 k6 k7 b0 b1      "k4: no" as far as b1
    asks now  k4 k5 k6 k7 b0 b1      would name the same, and need not ask
              k4 k5 k6 k7 a0 a1      may find k4 to k7 in an object with the name of a0 or a1
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from kvferry.cache.policies.contract import EvictionPolicyMaker
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys, Recovered
from kvferry.errors import InputError
from kvferry.scheduler.tier import (
    REMEMBER_KEYS,
    REMEMBER_SECONDS,
    Answer,
    Flags,
    Joints,
    KeyedTier,
    LowerTier,
    Remembered,
    SlotTier,
    WriteMode,
)
from kvferry.scheduler.transfers import with_furthest
from kvferry.types import Rank, RunNumbers, TierName


class PackedTier(KeyedTier):
    """A keyed tier with ``most_in_one`` blocks in one object at most. Owns where objects end.

    ``capacity`` keys of blocks that are there or were sent are remembered, and as many "noes".
    """

    joints: Joints

    def __init__(
        self,
        name: TierName,
        write: WriteMode = WriteMode.SPILL,
        *,
        most_in_one: int,
        remembers_noes: bool = True,
        remember: float = REMEMBER_SECONDS,
        capacity: int = REMEMBER_KEYS,
    ) -> None:
        """``remembers_noes`` only where nothing further than ``most_in_one`` names an object."""
        super().__init__(name, write, remember=remember, capacity=capacity)
        self.most_in_one = most_in_one
        self._remembers_noes = remembers_noes
        self.joints = Joints()
        self._noes = Remembered(capacity)  # beside the answers: they push out nothing we sent

    def unknown(self, keys: Keys, now: float, runs: RunNumbers | None = None) -> Flags:
        unknown = self._answers.unknown(keys, now)
        if unknown.any():
            unknown &= self._noes.unknown(with_furthest(keys, runs, self.most_in_one), now)
        return unknown

    def answered(self, answer: Answer, now: float) -> None:
        """What was not said in time is a "no" for everybody: it is the store that is slow."""
        keys, there = answer.keys, answer.there
        if answer.in_time:
            self.num_asked += int(np.count_nonzero(~there))
            self._note_not_found(keys, ~there, answer.runs, now)
            self.joints.heard(keys, there, answer.runs)
            keys = keys.take(there)
        keys = _distinct(keys)
        super().answered(Answer(keys, np.full(len(keys), answer.in_time)), now)

    def _note_not_found(self, keys: Keys, lost: Flags, runs: RunNumbers | None, now: float) -> None:
        """An asker who knows one way to go on did not find these. They may be there for others.

        But our having written them helps him nothing: with what he computes they are written again,
        for those who go his way. And who removes objects by age does not tell us.
        """
        self.joints.lost(keys.take(lost))
        # What is there since it was asked for, because we wrote it, outlives this answer.
        lost = lost & ~self._answers.there(keys, now)
        self._answers.doubt_sent(keys.take(lost))
        if self._remembers_noes:
            asked = _distinct(with_furthest(keys, runs, self.most_in_one).take(lost))
            self._noes.answer(asked, np.zeros(len(asked), dtype=bool), now + self._remember)

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        self.joints.lost(keys.take(~ok))
        super().moved(keys, ok, upward=upward, now=now)

    def dropped(self, keys: Keys) -> None:
        self.joints.lost(keys)
        super().dropped(keys)

    def heard(self, rank: Rank, reason: str) -> None:
        super().heard(rank, reason)
        self._noes.doubt()

    def reset(self) -> None:
        self.joints.clear()
        self._noes.clear()
        super().reset()


def _distinct(keys: Keys) -> Keys:
    """Each once: several chains may have been asked for in one question, with one beginning."""
    _, first = np.unique(keys.array[:, 0], return_index=True)
    return keys.take(np.sort(first))


# ------------------------------------------------------------------------------------------------
# The tier for a tier: with places, by keys, or by keys with several blocks in one object.

log = logging.getLogger(__name__)


def lower_tier(
    name: TierName,
    num_places: int | None,
    write: WriteMode,
    policy: EvictionPolicyMaker = Lru,
    *,
    recovered: Sequence[Recovered] = (),
    most_in_one: int = 1,
    remembers_noes: bool = True,
) -> LowerTier:
    """The tier for a tier with so many places, or for one that finds blocks by their keys.

    ``policy`` says which blocks make room in the places.
    ``recovered`` is what each rank's tier still has from an earlier life (``TierMover.recovered``),
    ``most_in_one`` how many blocks it may keep in one object (``TierMover.most_in_one``), and
    ``remembers_noes`` whether such an object never reaches further in a chain.
    """
    if num_places is None and most_in_one > 1:
        return PackedTier(name, write, most_in_one=most_in_one, remembers_noes=remembers_noes)
    if num_places is None:
        return KeyedTier(name, write)
    tier = SlotTier(name, Pool(num_places, policy, side_by_side=True), write)
    if any(len(places) for _, places in recovered):
        try:
            tier.restore(recovered)
        except InputError as error:  # a tier's mistake must not keep an engine from starting
            log.error("tier %s begins empty: %s", name, error)
    return tier
