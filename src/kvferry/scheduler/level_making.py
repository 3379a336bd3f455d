"""The level for a tier: with places, by keys, or by keys with several blocks in one object."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry.errors import InputError
from kvferry.keys import Recovered
from kvferry.policy import EvictionPolicyMaker, Lru
from kvferry.pool import Pool
from kvferry.scheduler.level import KeyedLevel, Level, PlacedLevel, WriteMode
from kvferry.scheduler.packing_level import PackingLevel
from kvferry.types import TierName

log = logging.getLogger(__name__)


def level_of(
    name: TierName,
    num_places: int | None,
    write: WriteMode,
    policy: EvictionPolicyMaker = Lru,
    *,
    recovered: Sequence[Recovered] = (),
    most_in_one: int = 1,
    remembers_noes: bool = True,
) -> Level:
    """The level for a tier with so many places, or for one that finds blocks by their keys.

    ``policy`` says which blocks make room in the places.
    ``recovered`` is what each rank's tier still has from an earlier life (``TierMover.recovered``),
    ``most_in_one`` how many blocks it may keep in one object (``TierMover.most_in_one``), and
    ``remembers_noes`` whether such an object never reaches further in a chain.
    """
    if num_places is None and most_in_one > 1:
        return PackingLevel(name, write, most_in_one=most_in_one, remembers_noes=remembers_noes)
    if num_places is None:
        return KeyedLevel(name, write)
    level = PlacedLevel(name, Pool(num_places, policy, side_by_side=True), write)
    if any(len(places) for _, places in recovered):
        try:
            level.restore(recovered)
        except InputError as error:  # a tier's mistake must not keep an engine from starting
            log.error("level %s begins empty: %s", name, error)
    return level
