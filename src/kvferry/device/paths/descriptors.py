"""Descriptors: an address on either side and a size for each segment of each block of a job."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np

from kvferry.device.driver.base import Addresses
from kvferry.device.job import CopyJob, Direction
from kvferry.device.layout.base import GroupLayout, Int64s


class Descriptors(NamedTuple):
    """One copy per entry."""

    dsts: Addresses
    srcs: Addresses
    sizes: Addresses


class DescriptorTable:
    """Builds descriptors from block ids; owns the parts that do not change from job to job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: weakref.WeakKeyDictionary[GroupLayout, Int64s] = weakref.WeakKeyDictionary()

    def build(self, job: CopyJob) -> Descriptors:
        """Every segment of every block of ``job``, block by block."""
        layout = job.layout
        blocks, slots = job.device_blocks[:, None], job.host_slots[:, None]
        device = (layout.bases + blocks * layout.strides).ravel().view(np.uint64)
        host = (job.host_base + slots * job.host_pitch + layout.offsets).ravel().view(np.uint64)
        sizes = self._sizes_of(layout, len(job.device_blocks)).view(np.uint64)
        if job.direction is Direction.LOAD:
            return Descriptors(device, host, sizes)
        return Descriptors(host, device, sizes)

    def _sizes_of(self, layout: GroupLayout, num_blocks: int) -> Int64s:
        wanted = num_blocks * layout.num_segments
        with self._lock:
            known = self._sizes.get(layout)
            if known is None or len(known) < wanted:
                # Doubled, so that a slowly growing batch does not rebuild the table every time.
                known = np.tile(layout.sizes, 2 * num_blocks)
                self._sizes[layout] = known
        return known[:wanted]
