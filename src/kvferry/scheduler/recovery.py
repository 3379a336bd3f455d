"""Blocks that ranks found on a slot tier from an earlier life: those that can be believed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys, Recovered
from kvferry.errors import InputError
from kvferry.types import NO_SLOT, SlotArray

_AGREE_BLOCKS = 1 << 18
"""So many blocks at a time are compared: ten million at once would take gigabytes."""


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks that every rank has at the same place, in the first rank's order.

    Of a key at several places the one written last counts.

    Raises:
        InputError: a rank names a place that does not exist, or names one twice.
    """
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys, places = recovered[0]
    for others in recovered[1:]:
        same = _same((keys, places), others, num_places)
        if not same.all():
            keys, places = keys.take(same), places[same]
    return _newest(keys, places)


def _same(ours: Recovered, theirs: Recovered, num_places: int) -> npt.NDArray[np.bool_]:
    """For each block of one rank, whether another rank has the same at its place."""
    (keys, places), (other_keys, other_places) = ours, theirs
    found = np.full(num_places, NO_SLOT, dtype=np.int32)
    found[other_places] = np.arange(len(other_places), dtype=np.int32)
    same = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _AGREE_BLOCKS):
        there = found.take(places[start : start + _AGREE_BLOCKS])
        both = np.flatnonzero(there != NO_SLOT)
        is_same = keys.array[start + both] == other_keys.array[there[both]]
        same[start + both] = is_same.all(axis=1)
    return same


def united(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks of all ranks, where each has places of its own: see ``SharedMover``.

    ``num_places`` are those of one rank.
    """
    num_ranks = len(recovered)
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys = Keys(np.concatenate([keys.array for keys, _ in recovered]))
    places = np.concatenate(
        [places * num_ranks + rank for rank, (_, places) in enumerate(recovered)]
    )
    # The ranks' orders are merged as if all had written at the same pace: more is not known.
    ages = np.concatenate([np.arange(len(keys)) / max(1, len(keys)) for keys, _ in recovered])
    order = np.argsort(ages, kind="stable")
    return _newest(keys.take(order), places[order])


def within(recovered: Recovered, num_places: int) -> Recovered:
    """Those of a rank's blocks that lie in the first so many places: other ranks have no more."""
    keys, places = recovered
    if not len(places) or int(places.max()) < num_places:
        return recovered
    fits = places < num_places
    return keys.take(fits), places[fits]


def _newest(keys: Keys, places: SlotArray) -> Recovered:
    """Each key once, at the place that was written last.

    First words alone are compared: of two keys that share one, the older is lost, which is safe.
    """
    words = keys.array[:, 0]
    order = np.argsort(words, kind="stable")
    words = words.take(order)
    older = order[:-1][words[1:] == words[:-1]]
    if not len(older):
        return keys, places
    newest = np.ones(len(keys), dtype=bool)
    newest[older] = False
    return keys.take(newest), places[newest]


def _check(rank: int, keys: Keys, places: SlotArray, num_places: int) -> None:
    if len(keys) != len(places):
        raise InputError(f"rank {rank} recovered {len(keys)} blocks at {len(places)} places")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_places:
        raise InputError(
            f"rank {rank} recovered places {int(places.min())} to {int(places.max())}; there are "
            f"places 0 to {num_places - 1}"
        )
    named = np.zeros(num_places, dtype=bool)
    named[places] = True
    if np.count_nonzero(named) != len(places):
        raise InputError(f"rank {rank} recovered a place twice")
