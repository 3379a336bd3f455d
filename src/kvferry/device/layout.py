"""Where the bytes of a block are: from real KV tensors to per-block segment tables."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    offsets: Int64s
    num_blocks: int

    def __post_init__(self) -> None:
        expected = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        if not np.array_equal(self.offsets, expected):
            raise LayoutError("segment offsets must follow each other without gaps, from 0")

    @property
    def num_segments(self) -> int:
        return len(self.sizes)

    @property
    def block_bytes(self) -> int:
        return int(self.sizes.sum())
