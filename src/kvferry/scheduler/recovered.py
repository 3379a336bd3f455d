"""What an earlier life left on a level with places: believed where all ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.duplicates import Duplicates
from kvferry.errors import InputError
from kvferry.index import Index
from kvferry.keys import Keys
from kvferry.types import SlotArray

Recovered = tuple[Keys, SlotArray]
"""Blocks of one rank and their places, in the order in which they were written."""


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks that every rank has at the same place, in the first rank's order.

    InputError where a rank names a place that does not exist, or a key or a place twice.
    """
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys, places = recovered[0]
    for other_keys, other_places in recovered[1:]:
        index = Index(num_places)
        index.insert(other_keys, other_places)
        same = index.find(keys) == places
        keys, places = keys.take(same), places[same]
    return keys, places


def _check(rank: int, keys: Keys, places: SlotArray, num_places: int) -> None:
    if len(keys) != len(places):
        raise InputError(f"rank {rank} recovered {len(keys)} blocks at {len(places)} places")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_places:
        raise InputError(
            f"rank {rank} recovered places {int(places.min())} to {int(places.max())}; there are "
            f"places 0 to {num_places - 1}"
        )
    if len(np.unique(places)) != len(places) or Duplicates().any_in(keys):
        raise InputError(f"rank {rank} recovered a block or a place twice")
