"""What the copy engine knows of KV tensors: where each segment of a block lies, no more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.errors import LayoutError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """The segments of one group's blocks, on the device and in a host slot.

    Segment ``s`` of device block ``b`` is the ``sizes[s]`` bytes at ``bases[s] + b * strides[s]``;
    in a host slot they lie at ``offsets[s]``. Offsets follow each other without gaps, so a host
    slot holds a block as one run of ``block_bytes``.

    ``format`` names the order of the bytes in a slot without naming any address: slots of two
    layouts may be exchanged (through disk, between processes) only if their formats are equal.
    ``spans`` says which bytes of a slot are whose: a tensor's name, from where, to where.
    """

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    offsets: Int64s
    num_blocks: int
    format: str = ""
    spans: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("bases", "strides", "sizes", "offsets"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if array.shape != (len(self.sizes),):
                raise LayoutError(
                    f"{name} has shape {array.shape}; all four tables need one entry per segment"
                )
        if not len(self.sizes) or int(self.sizes.min()) < 1:
            raise LayoutError("a block needs at least one segment, and a segment at least one byte")
        if self.num_blocks < 1:
            raise LayoutError(f"a layout needs at least one block, got {self.num_blocks}")
        expected = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        if not np.array_equal(self.offsets, expected):
            raise LayoutError("segment offsets must follow each other without gaps, from 0")

    @property
    def num_segments(self) -> int:
        return len(self.sizes)

    @cached_property
    def block_bytes(self) -> int:
        return int(self.sizes.sum())
