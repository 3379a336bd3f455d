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
    if len(numbers) and (int(numbers.min()) < least or int(numbers.max()) >= most):
        wrong = int(numbers[(numbers < least) | (numbers >= most)][0])
        raise InputError(
            f"device block {wrong} does not exist: the tensors have blocks 0 to {most - 1}"
        )
    return numbers
