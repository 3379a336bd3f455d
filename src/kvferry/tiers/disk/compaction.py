"""A journal written anew without what is out of date, a step at a time, beside its commits.

The copy follows the old journal from its first page, in order, and takes the records that are live
when it comes by. Meanwhile the old journal grows; the copy catches up, and ends when nothing is
left to follow. A record that it took may be contradicted later in the old journal: what contradicts
it is copied too, because it comes behind. Order is kept, so the newest stays the newest.
"""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt

from kvferry.tiers.disk.entries import Entries, flatten, places_of
from kvferry.tiers.disk.journal import DiskJournal
from kvferry.tiers.disk.pages import NO_PLACES, PLACE, Places, Records, ours, unpack
from kvferry.tiers.disk.recovery import read_pages


class Compaction:
    """A copy under way from ``source`` into ``target``, which counts for nothing until declared."""

    def __init__(self, source: DiskJournal, target: DiskJournal, entries: Entries) -> None:
        self.source = source
        self.target = target
        self.entries = entries
        self._next = source.shape.first_page
        self._began_at = source.end * source.shape.per_page
        self._rest: Records = np.empty(0, dtype=source.shape.record)
        self._copied: list[Places] = []

    @property
    def is_level(self) -> bool:
        """Whether nothing is left to follow."""
        return self._next == self.source.end

    def step(self, num_pages: int) -> None:
        """Follow so many pages of the source, and write full pages of what is live in them."""
        shape = self.source.shape
        count = min(num_pages, self.source.end - self._next)
        raw = read_pages(self.source.file, shape, self._next, count)
        whole = ours(shape, self.source.seal, raw, self._next)
        pages = unpack(shape, raw)
        if not whole.all():  # copied, damage would get a digest of its own
            bad = self._next + int(np.flatnonzero(~whole)[-1])
            if bad * shape.per_page >= self._began_at:
                # It may contradict what was copied before: a copy begun now would not have that.
                raise OSError(errno.EIO, f"page {bad} of the journal has gone bad")
            pages = pages.copy()
            pages["count"][~whole] = 0
        records, numbers = flatten(shape, pages, self._next)
        self._rest = np.concatenate((self._rest, records[self._live(records, numbers)]))
        self._next += count
        self._write(len(self._rest) // shape.per_page * shape.per_page)

    def finish(self) -> npt.NDArray[np.uint32]:
        """Write what is left and sync; returns the newest record of every place, in the target."""
        self._write(len(self._rest))
        self.target.file.sync()
        newest = np.zeros(len(self.entries), dtype=np.uint32)
        places = np.concatenate([NO_PLACES, *self._copied])
        # Full pages but for the last: records lie as close as their numbers say.
        first = self.target.shape.first_page * self.target.shape.per_page
        newest[places] = first + np.arange(len(places), dtype=np.uint32)
        return newest

    def _live(self, records: Records, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        places, lost = places_of(records)
        live = places < len(self.entries)
        live[live] = self.entries.newest[places[live]] == numbers[live]
        # Lost before the copy began: what it contradicts was never copied.
        return live & ~(lost & (numbers < self._began_at))

    def _write(self, count: int) -> None:
        if count:
            records, self._rest = self._rest[:count], self._rest[count:]
            self.target.write(records)
            self._copied.append(records["place"] & PLACE)
