"""A tier's places over its drives: runs of neighbours in turn, so that all read a long chain.

::

    places   0 1 2 3 | 4 5 6 7 | 8 9 ...      runs of 4, two drives
    drive    0       | 1       | 0
    there    0 1 2 3 | 0 1 2 3 | 4 5 ...
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.tiers.disk.messages import Numbers
from kvferry.tiers.disk.status import Flags

RUN_BYTES = 16 << 20
"""As long as a call to a drive should be."""


@dataclass(frozen=True)
class Stripes:
    """``places_each`` places on each of ``num_drives`` drives, whole runs of ``run``."""

    num_drives: int
    places_each: int
    run: int

    @classmethod
    def lay_out(cls, num_drives: int, places_each: int, pitch: int) -> Stripes:
        """Runs are short where there are few places, so that all of them can be used."""
        if num_drives == 1:
            return cls(1, places_each, places_each)
        run = max(1, min(RUN_BYTES // pitch, places_each // 8))
        return cls(num_drives, places_each - places_each % run, run)

    @property
    def num_places(self) -> int:
        return self.num_drives * self.places_each

    def split(self, places: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """For each drive concerned: its number, the positions it has, and its own places."""
        if self.num_drives == 1:
            return [(0, np.arange(len(places)), places)]
        runs, within = np.divmod(places, self.run)
        drives = runs % self.num_drives
        there = (runs // self.num_drives) * self.run + within
        return [
            (drive, positions, there[positions])
            for drive in range(self.num_drives)
            if len(positions := np.flatnonzero(drives == drive))
        ]

    def join(self, drive: int, there: Numbers) -> tuple[Flags, Numbers]:
        """Which of a drive's own places are places of the tier, and which ones those are."""
        here = there < self.places_each
        runs, within = np.divmod(there[here], self.run)
        return here, (runs * self.num_drives + drive) * self.run + within
