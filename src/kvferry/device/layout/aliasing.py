"""Do any two segments of any two blocks share a byte? A store or load of such a layout would race.

Writing out every (segment, block) range is exact but slow for a large cache, so the common shapes
are settled first: extents that never meet, and segments of one stride that fit beside each other
within that stride::

    stride |<----------------->|<----------------->|
    block       0                    1
            [K0][V0] [K1][V1]   [K0][V0] [K1][V1]      residues mod stride are disjoint
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.device.layout.base import Int64s


class Overlap(NamedTuple):
    """One pair of segments (or one segment with itself) that share a byte, and where."""

    segments: tuple[int, ...]
    words: str


def find_overlap(bases: Int64s, strides: Int64s, sizes: Int64s, num_blocks: int) -> Overlap | None:
    """One overlapping pair, or None when all ranges are disjoint."""
    if num_blocks > 1:
        tight = np.flatnonzero(strides < sizes)
        if tight.size:
            s = int(tight[0])
            return Overlap(
                (s,),
                f"segment {s} is {int(sizes[s])} bytes but its blocks lie only "
                f"{int(strides[s])} bytes apart",
            )
    for cluster in _clusters(bases, bases + (num_blocks - 1) * strides + sizes):
        if len(cluster) > 1 and not _fit_in_one_stride(
            bases[cluster], strides[cluster], sizes[cluster]
        ):
            found = _exact(cluster, bases, strides, sizes, num_blocks)
            if found is not None:
                return found
    return None


def _clusters(starts: Int64s, ends: Int64s) -> list[Int64s]:
    """Segments whose whole extents meet, as groups of indices."""
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(starts[order][1:] >= reach[:-1]) + 1
    return [np.asarray(part, dtype=np.int64) for part in np.split(order, breaks)]


def _fit_in_one_stride(bases: Int64s, strides: Int64s, sizes: Int64s) -> bool:
    """True only when certainly disjoint; False means "look closer"."""
    stride = int(strides[0])
    if stride <= 0 or np.any(strides != stride):
        return False
    residues = (bases - bases.min()) % stride
    order = np.argsort(residues, kind="stable")
    starts, ends = residues[order], residues[order] + sizes[order]
    return bool(np.all(ends[:-1] <= starts[1:]) and ends[-1] <= stride + starts[0])


def _exact(
    cluster: Int64s, bases: Int64s, strides: Int64s, sizes: Int64s, num_blocks: int
) -> Overlap | None:
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = (bases[cluster][:, None] + strides[cluster][:, None] * blocks).ravel()
    ends = starts + np.repeat(sizes[cluster], num_blocks)
    order = np.argsort(starts, kind="stable")
    hits = np.flatnonzero(ends[order][:-1] > starts[order][1:])
    if not hits.size:
        return None
    first, second = int(order[hits[0]]), int(order[hits[0] + 1])
    one, other = int(cluster[first // num_blocks]), int(cluster[second // num_blocks])
    return Overlap(
        (one, other),
        f"segment {one} of block {first % num_blocks} overlaps "
        f"segment {other} of block {second % num_blocks}",
    )
