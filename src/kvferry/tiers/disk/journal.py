"""One journal: where its next page goes. Appends whole pages, and never touches one again."""

from __future__ import annotations

import errno
import secrets

import numpy as np

from kvferry.tiers.disk.files import JournalFile, write_whole
from kvferry.tiers.disk.header import Header, write_header
from kvferry.tiers.disk.pages import (
    NO_PLACES,
    SALT_BYTES,
    Places,
    Records,
    Seal,
    Shape,
    Spot,
    last_places,
    pack,
)


class DiskJournal:
    """A file's journal from its first page on. Owns the position; leaves the file to the ledger."""

    def __init__(
        self, file: JournalFile, shape: Shape, seal: Seal, end: int, before: Places
    ) -> None:
        self.file = file
        self.shape = shape
        self.seal = seal
        self.end = end
        self.before = before

    @classmethod
    def begin(cls, file: JournalFile, shape: Shape, generation: int) -> DiskJournal:
        """A new one in a file that holds none; it counts once its header is written."""
        seal = Seal(generation, secrets.token_bytes(SALT_BYTES))
        return cls(file, shape, seal, shape.first_page, NO_PLACES)

    @property
    def num_pages_free(self) -> int:
        return self.file.num_bytes // self.shape.page_bytes - self.end

    @property
    def header(self) -> Header:
        """As it is to be written now, with everything up to here on the medium."""
        return Header(self.seal, self.end, self.before)

    def declare(self, store_id: bytes) -> None:
        """Write the header. Only once all pages so far are on the medium: it vouches for them."""
        write_header(self.file, self.header, self.shape, store_id)

    def write(self, records: Records) -> int:
        """Append these records in pages of their own, and return the first one's number.

        Not on the medium before the file is synced.
        """
        if self.shape.pages_for(len(records)) > self.num_pages_free:
            raise OSError(errno.ENOSPC, f"{len(records)} records do not fit into the journal")
        pages = pack(self.shape, self.seal, records, Spot(self.end, self.end, self.before))
        write_whole(self.file, self.end * self.shape.page_bytes, pages.view(np.uint8).data)
        first = self.end * self.shape.per_page
        self.before = last_places(pages)
        self.end += len(pages)
        return first

    def append(self, records: Records) -> int:
        """As :meth:`write`, and on the medium when it returns. If it raises, nothing counts.

        The next append then writes the same pages again, at the same position. That is safe because
        it begins with the same records: whichever of the two a page is found from, it says nothing
        that the other does not.
        """
        end, before = self.end, self.before
        try:
            first = self.write(records)
            self.file.sync()
        except BaseException:
            self.end, self.before = end, before
            raise
        return first
