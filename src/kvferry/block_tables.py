"""Block tables as callers of a ferry give them: checked, and whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.device.layout import GroupLayout
from kvferry.errors import InputError
from kvferry.integers import Integers, integers
from kvferry.scheduler import NO_BLOCK
from kvferry.types import SlotArray

Tables = Integers | Sequence[Integers]
"""Device blocks: a vector of them, or with several groups a block table for each."""


def whole_tables(layouts: Sequence[GroupLayout], given: Tables, *, before: int) -> list[SlotArray]:
    """Whole block tables, by group; one alone is given without the blocks ``before``."""
    if len(layouts) == 1:
        blocks = _checked(layouts[0], given, least=0)  # type: ignore[arg-type]  # a vector
        return [np.concatenate((np.full(before, NO_BLOCK), blocks)) if before else blocks]
    if not isinstance(given, Sequence) or len(given) != len(layouts):
        raise InputError(f"there are {len(layouts)} groups: give a block table for each of them")
    return [
        _checked(layout, table, least=NO_BLOCK)  # type: ignore[arg-type]
        for layout, table in zip(layouts, given, strict=True)
    ]


def _checked(layout: GroupLayout, blocks: Integers, *, least: int) -> SlotArray:
    numbers, most = integers(blocks, "device blocks"), layout.num_blocks
    # Counted from the least one, as unsigned numbers, what is too small is too large.
    counted = numbers if not least else numbers - least
    if len(numbers) and int(np.maximum.reduce(counted.view(np.uint64))) >= most - least:
        wrong = int(numbers[(numbers < least) | (numbers >= most)][0])
        raise InputError(
            f"device block {wrong} does not exist: the tensors have blocks 0 to {most - 1}"
        )
    return numbers


class Distinct:
    """Finds out whether blocks are named twice. Owns a place for each; one thread at a time."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        # One more than there are blocks: that is where NO_BLOCK leads.
        self._place = np.empty(max(layout.num_blocks for layout in layouts) + 1, dtype=np.int64)

    def are(self, blocks: SlotArray) -> bool:
        """Whether each of these, which exist or are ``NO_BLOCK``, is another one."""
        at = np.arange(len(blocks))
        self._place[blocks] = at  # of one that is named twice the last place stays
        return bool((self._place.take(blocks) == at).all())
