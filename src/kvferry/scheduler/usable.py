"""What of several groups is stored where not all of it may be: the blocks of the longest hit.

::

    full attention  |####################|........|   from the first block on, or nothing is reached
    window          |          [#########|........|   its last blocks, or the others serve nobody
                    0                    hit      computed

Group by group the first would take all the room, and what it stored could not be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvferry import reach

Bound = tuple[int, Sequence[int]]
"""How much room there is, and how much of it a block of each group takes."""

_NO_BOUND = 1 << 40


class SharedRoom:
    """What may still be stored by all bounds together. Owns what is left of each."""

    def __init__(self, bounds: Sequence[Bound]) -> None:
        self._left = [room for room, _ in bounds]
        self._sizes = [sizes for _, sizes in bounds]

    def of(self, group: int) -> int:
        """How many blocks of a group fit."""
        fits = _NO_BOUND
        for left, sizes in zip(self._left, self._sizes, strict=True):
            if sizes[group]:
                fits = min(fits, max(0, left) // sizes[group])
        return fits

    def take(self, group: int, num_blocks: int) -> None:
        for at, sizes in enumerate(self._sizes):
            self._left[at] -= num_blocks * sizes[group]


def usable(
    groups: Sequence[reach.Group],
    todo: Mapping[int, range],
    held: Sequence[reach.BoolArray],
    new: Sequence[reach.BoolArray],
    bounds: Sequence[Bound],
    *,
    above: int,
    alignment: int,
) -> dict[int, range] | None:
    """Which blocks to store of those ``todo``, by group; None if no hit above so many tokens is.

    ``held`` and ``new`` are as for :func:`reach.longest_within`. First comes what the longest hit
    reads for which there is room, then what leads on from there, then what serves shorter ones. If
    there is room for no hit, a part of the longest one: the rest of it another time.
    """
    tokens = reach.longest_within(groups, held, new, bounds, above=above, alignment=alignment)
    is_whole = tokens > above
    if not is_whole:
        tokens = reach.longest_within(groups, held, new, (), above=above, alignment=alignment)
        if tokens == above:
            return None
    room, spans = SharedRoom(bounds), {}
    full = [g for g in todo if isinstance(groups[g], reach.FullAttention)]
    others = [g for g in todo if g not in full]
    for g in full:
        stop = _clip(tokens // groups[g].block_tokens, todo[g])
        spans[g] = range(todo[g].start, _until(new[g], todo[g].start, stop, room, g))
    for g in others:
        stop = _clip(tokens // groups[g].block_tokens, todo[g])
        read = reach.needed(groups[g], tokens)
        first = min(_clip(read.start, todo[g]), stop) if read else stop
        last = _until(new[g], first, stop, room, g)
        if last < stop and not new[g][first:last].any():  # nothing of it: it must not be passed by
            first = last = todo[g].start
        spans[g] = range(first, last)
    if is_whole:
        for g in full:
            stop = _until(new[g], spans[g].stop, todo[g].stop, room, g)
            spans[g] = range(spans[g].start, stop)
        for g in others:
            spans[g] = range(_from(new[g], todo[g].start, spans[g].start, room, g), spans[g].stop)
    return spans


def _clip(place: int, todo: range) -> int:
    return min(max(place, todo.start), todo.stop)


def _until(new: reach.BoolArray, first: int, stop: int, room: SharedRoom, group: int) -> int:
    """How far from a place on there is room; what there is room for is taken from it."""
    found, fits = np.flatnonzero(new[first:stop]), room.of(group)
    room.take(group, min(len(found), fits))
    return stop if len(found) <= fits else first + int(found[fits])


def _from(new: reach.BoolArray, first: int, stop: int, room: SharedRoom, group: int) -> int:
    """The same backwards: from where on, up to ``stop``, there is room."""
    found, fits = np.flatnonzero(new[first:stop]), room.of(group)
    room.take(group, min(len(found), fits))
    return first if len(found) <= fits else first + int(found[-fits - 1]) + 1
