"""What an earlier life left on a level with places: believed where all ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.keys import Keys, Recovered
from kvferry.types import NO_SLOT, SlotArray

_PIECE = 1 << 18


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks that every rank has at the same place, in the first rank's order.

    A key that is at several places counts where it was written last. InputError where a rank names
    a place that does not exist, or one twice.
    """
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys, places = recovered[0]
    for other_keys, other_places in recovered[1:]:
        same = _same(keys, places, other_keys, other_places, num_places)
        if not same.all():
            keys, places = keys.take(same), places[same]
    return _newest(keys, places)


def _same(
    keys: Keys, places: SlotArray, other_keys: Keys, other_places: SlotArray, num_places: int
) -> npt.NDArray[np.bool_]:
    """For each block of one rank, whether another rank has the same at its place."""
    found = np.full(num_places, NO_SLOT, dtype=np.int32)
    found[other_places] = np.arange(len(other_places), dtype=np.int32)
    same = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _PIECE):  # of ten million all at once would be gigabytes
        there = found.take(places[start : start + _PIECE])
        both = np.flatnonzero(there != NO_SLOT)
        ours, theirs = keys.array[start + both], other_keys.array[there[both]]
        same[start + both] = (ours == theirs).all(axis=1)
    return same


def united(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks of all ranks, where each has places of its own: see ``SharedLevelMover``.

    ``num_places`` are those of one rank.
    """
    num_ranks = len(recovered)
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys = Keys(np.concatenate([keys.array for keys, _ in recovered]))
    places = np.concatenate(
        [places * num_ranks + rank for rank, (_, places) in enumerate(recovered)]
    )
    # Each rank's order as if all had written at the same pace: nobody knows better.
    ages = np.concatenate([np.arange(len(keys)) / max(1, len(keys)) for keys, _ in recovered])
    order = np.argsort(ages, kind="stable")
    return _newest(keys.take(order), places[order])


def within(recovered: Recovered, num_places: int) -> Recovered:
    """Those of a rank's blocks that lie in the first so many places: others have no more."""
    keys, places = recovered
    if not len(places) or int(places.max()) < num_places:
        return recovered
    fits = places < num_places
    return keys.take(fits), places[fits]


def _newest(keys: Keys, places: SlotArray) -> Recovered:
    """Each key once, at the place that was written last.

    By first words alone: of two keys that share one, the older block is lost, which harms nobody.
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
