"""What a rank has to tell of its memory, when it has changed: slots, pinned bytes, drives."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.rank import RankMemory
from kvferry.tiers.disk.status import DiskFigures
from kvferry.types import Rank

Told = tuple[tuple[Rank, int], ...]
Disks = tuple[tuple[Rank, str, DiskFigures], ...]

_DISK_SECONDS = 1.0


class MemoryNews:
    """Knows what was told so far. Owns none of the memory."""

    def __init__(
        self, rank: Rank, memory: RankMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._memory = memory
        self._clock = clock
        self._told_ready = 0
        self.is_grown = False
        """Whether all host memory can be used, and that was told."""
        self._disks: Disks = ()
        self._disks_at = 0.0

    def ready(self) -> tuple[Told, Told]:
        """Usable slots and pinned bytes, if there are more of them than was told."""
        if self.is_grown:
            return (), ()
        num_ready = self._memory.ready_slots
        if num_ready == self._told_ready:
            return (), ()
        self._told_ready = num_ready
        self.is_grown = num_ready == self._memory.host.num_slots
        pinned_bytes = self._memory.host.stats().pinned_bytes
        return ((self._rank, num_ready),), ((self._rank, pinned_bytes),)

    def disks(self) -> Disks:
        """What the drives did so far, if that is other than was told a second ago."""
        if not self._memory.levels or self._clock() < self._disks_at:
            return ()
        self._disks_at = self._clock() + _DISK_SECONDS
        now = tuple((self._rank, name, figures) for name, figures in self._memory.disks().items())
        if now == self._disks:
            return ()
        self._disks = now
        return now
