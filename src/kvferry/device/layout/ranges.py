"""A block cut between its layers: parts that land one after the other, each a layout of its own.

::

    slot      | layer 0 | layer 1 | layer 2 | layer 3 | layer 4 | layer 5 | layer 6 |
    parts     |-------- 0 --------|-------- 1 --------|-------- 2 --------|--- 3 ---|

Who reads the layers in order need not wait for the last of them before it begins with the first.
The last part is half as long as the others: nothing is left to hide what is read after it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.device.layout.base import GroupLayout

NUM_PARTS = 4
"""Each is one more pass over the slots, and costs a load of 900 MB 0.3 ms (one NVIDIA H200)."""


@dataclass(frozen=True, eq=False)
class LayerPart:
    """Some bytes of every block: a layout of their own, and where they begin in a slot."""

    layout: GroupLayout
    start: int


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A group's blocks in parts, in the order in which they land."""

    parts: tuple[LayerPart, ...]

    @classmethod
    def of(cls, layout: GroupLayout, num_parts: int = NUM_PARTS) -> LayerParts:
        """Cut between tensors; one part where it is not known which bytes are whose."""
        bounds = [0, *_cuts(layout, num_parts), layout.block_bytes]
        pairs = itertools.pairwise(bounds)
        return cls(tuple(LayerPart(_between(layout, *pair), pair[0]) for pair in pairs))

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def shares(self) -> tuple[float, ...]:
        """How much of a block has landed with none of its parts, with the first, and so on."""
        sizes = [0, *(part.layout.block_bytes for part in self.parts)]
        return tuple((np.cumsum(sizes) / sum(sizes)).tolist())

    def last_of(self, layout: GroupLayout, tensors: Sequence[str]) -> int:
        """The part with which these tensors of ``layout`` have landed whole."""
        ends = [end for name, _, end in layout.spans if name in tensors]
        starts = [part.start for part in self.parts]
        return bisect.bisect_right(starts, max(ends) - 1) - 1 if ends else len(self.parts) - 1


def _cuts(layout: GroupLayout, num_parts: int) -> list[int]:
    """Where one part ends and the next begins, in bytes of a slot."""
    between = sorted({start for _, start, _ in layout.spans if start})
    if not between:
        return []
    whole = layout.block_bytes
    wanted = [2 * number * whole / (2 * num_parts - 1) for number in range(1, num_parts)]
    return sorted({min(between, key=lambda at: abs(at - goal)) for goal in wanted})


def _between(layout: GroupLayout, start: int, end: int) -> GroupLayout:
    """The segments between two places of a slot, the first and the last cut where they cross."""
    low = np.maximum(layout.offsets, start)
    high = np.minimum(layout.offsets + layout.sizes, end)
    inside = np.flatnonzero(high > low)
    sizes = (high - low)[inside]
    return GroupLayout(
        bases=layout.bases[inside] + (low - layout.offsets)[inside],
        strides=layout.strides[inside],
        sizes=sizes,
        offsets=np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64),
        num_blocks=layout.num_blocks,
    )
