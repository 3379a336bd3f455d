"""The journal's bytes: its files, its pages, its header, and where the next page goes.

::

    page    | digest | generation | number | base | counts | places before | record | record | ...
    record  | place (and whether it was lost) | key | proof |

A page's digest covers all of it and is keyed by the salt in the journal's header, which is drawn
anew whenever a journal begins: pages of an earlier journal in the same file never match. The digest
also fixes the page's number, so a page at another position does not match either.

``before`` repeats the places that the page before it names. If that page has gone bad, only these
places are doubtful.

The header is one sector, written twice, side by side: damage to one copy costs nothing. A file with
no valid header holds no journal, whatever its pages say.
"""

from __future__ import annotations

import errno
import secrets
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS
from kvferry.tiers.disk.files import DiskFile, read_whole, write_whole

PAGE_BYTES = 4096
SECTOR_BYTES = 512
DIGEST_BYTES = 16
SALT_BYTES = 32
HEAD_BYTES = 64
MAX_PROOF_BYTES = 64
MAX_PLACES = 1 << 31

LOST = np.uint32(1 << 31)
"""This bit in a record's place: what was there is lost."""

PLACE = np.uint32(MAX_PLACES - 1)
"""The bits of a record's place that number it."""

MAGIC = b"KVFYJRNL"
VERSION = 2
HEADER_BYTES = 2 * SECTOR_BYTES
_HEADER = struct.Struct(f"<8sIIIIQ{SALT_BYTES}sI")
_LAST_AT = 96

Pages = npt.NDArray[Any]
Records = npt.NDArray[Any]
Places = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

NO_PLACES: Places = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True)
class Shape:
    """The sizes of a store's records and pages, which follow from the size of its proofs."""

    proof_bytes: int
    page_bytes: int = PAGE_BYTES

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The layout of a record."""
        return np.dtype(
            [("place", "<u4"), ("key", "<u8", (KEY_WORDS,)), ("proof", "u1", (self.proof_bytes,))]
        )

    @cached_property
    def per_page(self) -> int:
        """Records in a page; a page has room for as many places of the page before it."""
        return (self.page_bytes - HEAD_BYTES) // (4 + self.record.itemsize)

    @cached_property
    def page(self) -> np.dtype[Any]:
        """The layout of a page."""
        fields: dict[str, tuple[Any, int]] = {
            "digest": (("u1", (DIGEST_BYTES,)), 0),
            "generation": ("<u8", 16),
            "number": ("<u4", 24),
            "base": ("<u4", 28),
            "count": ("<u2", 32),
            "count_before": ("<u2", 34),
            "reset": ("<u8", 40),
            "before": (("<u4", (self.per_page,)), HEAD_BYTES),
            "records": ((self.record, (self.per_page,)), HEAD_BYTES + 4 * self.per_page),
        }
        return np.dtype(
            {
                "names": list(fields),
                "formats": [each[0] for each in fields.values()],
                "offsets": [each[1] for each in fields.values()],
                "itemsize": self.page_bytes,
            }
        )

    @property
    def first_page(self) -> int:
        """The number of the first page: the header lies before it."""
        return max(1, HEADER_BYTES // self.page_bytes)

    def pages_for(self, num_records: int) -> int:
        """How many pages so many records fill."""
        return -(-num_records // self.per_page)


@dataclass(frozen=True)
class Seal:
    """Identifies one journal: its generation, and the salt of its digests."""

    generation: int
    salt: bytes

    @cached_property
    def _begun(self) -> blake2b:
        return blake2b(digest_size=DIGEST_BYTES, key=self.salt, person=b"kvferry.page")

    def digest(self, rest_of_page: memoryview) -> bytes:
        """Return the digest of a page from the bytes behind its digest."""
        digest = self._begun.copy()
        digest.update(rest_of_page)
        return digest.digest()


def pack(
    shape: Shape,
    seal: Seal,
    records: Records,
    number: int,
    base: int,
    before: Places,
    reset: int = 0,
) -> Pages:
    """Return pages with these records, to be written from page ``number`` on; at least one page.

    ``base`` is where their commit begins, ``before`` the places in the page before the first,
    ``reset`` the reset number under which the blocks were stored. The
    same records give the same pages; more records behind them change the last page only.
    """
    per_page = shape.per_page
    num_pages = max(1, shape.pages_for(len(records)))
    pages = np.zeros(num_pages, dtype=shape.page)
    whole = len(records) // per_page
    rows = pages["records"]
    rows[:whole] = records[: whole * per_page].reshape(whole, per_page)
    rows[whole : whole + 1, : len(records) - whole * per_page] = records[whole * per_page :]
    pages["generation"] = seal.generation
    pages["number"] = number + np.arange(num_pages, dtype=np.uint32)
    pages["base"] = base
    pages["reset"] = reset
    pages["count"] = per_page
    pages["count"][-1] = len(records) - (num_pages - 1) * per_page
    pages["before"][1:] = rows["place"][:-1]
    pages["count_before"][1:] = pages["count"][:-1]
    pages["before"][0, : len(before)] = before
    pages["count_before"][0] = len(before)
    raw = pages.view(np.uint8).data
    for start in range(0, len(raw), shape.page_bytes):
        digest = seal.digest(raw[start + DIGEST_BYTES : start + shape.page_bytes])
        raw[start : start + DIGEST_BYTES] = digest
    return pages


def unpack(shape: Shape, raw: bytes) -> Pages:
    """Return whole pages as they were read; :func:`valid_pages` says which of them are valid."""
    return np.frombuffer(raw, dtype=shape.page, count=len(raw) // shape.page_bytes)


def valid_pages(shape: Shape, seal: Seal, raw: bytes, first: int) -> Flags:
    """Return which of the pages in ``raw`` belong to this journal; the first is page ``first``."""
    pages = unpack(shape, raw)
    # Cheap words first: behind a journal's end lie thousands of pages of an older one.
    right = pages["generation"] == seal.generation
    right &= pages["number"] == first + np.arange(len(pages))
    right &= (pages["count"] <= shape.per_page) & (pages["count_before"] <= shape.per_page)
    view = memoryview(raw)
    for at in np.flatnonzero(right).tolist():
        start = at * shape.page_bytes
        digest = seal.digest(view[start + DIGEST_BYTES : start + shape.page_bytes])
        right[at] = digest == raw[start : start + DIGEST_BYTES]
    return right


def last_places(pages: Pages) -> Places:
    """Return the places that the last of these pages names, for the page after it to repeat."""
    last = pages[-1]
    return last["records"]["place"][: int(last["count"])].copy()


@dataclass(frozen=True, eq=False)
class Header:
    """The journal of a file. Pages before ``copied_end`` were on the medium before the header was.

    ``last`` names the places in the last of those pages: no page repeats them before the next
    commit does.
    """

    seal: Seal
    copied_end: int
    last: Places

    def pack(self, shape: Shape, store_id: bytes) -> bytes:
        """Return the header as one sector."""
        sector = bytearray(SECTOR_BYTES)
        fields = (shape.page_bytes, shape.proof_bytes, self.copied_end, self.seal.generation)
        _HEADER.pack_into(
            sector, DIGEST_BYTES, MAGIC, VERSION, *fields, self.seal.salt, len(self.last)
        )
        places = self.last.astype("<u4").tobytes()
        sector[_LAST_AT : _LAST_AT + len(places)] = places
        sector[:DIGEST_BYTES] = _digest(store_id, memoryview(sector)[DIGEST_BYTES:])
        return bytes(sector)

    @classmethod
    def unpack(cls, shape: Shape, store_id: bytes, sector: bytes) -> Header | None:
        """Return the header in a sector; None unless it is a whole one of this store and shape."""
        if len(sector) != SECTOR_BYTES:
            return None
        if sector[:DIGEST_BYTES] != _digest(store_id, memoryview(sector)[DIGEST_BYTES:]):
            return None
        *known, copied_end, generation, salt, num_last = _HEADER.unpack_from(sector, DIGEST_BYTES)
        if known != [MAGIC, VERSION, shape.page_bytes, shape.proof_bytes]:
            return None
        if num_last > shape.per_page:
            return None
        last = np.frombuffer(sector, dtype="<u4", count=num_last, offset=_LAST_AT)
        return cls(Seal(generation, salt), copied_end, last)


def _digest(store_id: bytes, rest: memoryview) -> bytes:
    return blake2b(rest, digest_size=DIGEST_BYTES, key=store_id, person=b"kvferry.header").digest()


def read_header(file: DiskFile, shape: Shape, store_id: bytes) -> Header | None:
    """Return the file's header from whichever copy is whole; None if the file holds no journal.

    Raises OSError if a copy that may be the header cannot be read: a drive that errs for a moment
    must not cost everything it holds.
    """
    unreadable: OSError | None = None
    is_erased = False
    for offset in (0, SECTOR_BYTES):
        try:
            sector = read_whole(file, offset, SECTOR_BYTES)
        except OSError as error:
            unreadable = error
            continue
        header = Header.unpack(shape, store_id, sector)
        if header is not None:
            return header
        is_erased = is_erased or not any(sector)
    if unreadable is not None and not is_erased:
        raise unreadable
    return None


def write_header(file: DiskFile, header: Header, shape: Shape, store_id: bytes) -> None:
    """Make the file hold this journal; it does once this returns, and may if it raises."""
    write_whole(file, 0, header.pack(shape, store_id) * 2)
    file.sync()


def erase_header(file: DiskFile) -> None:
    """Make the file hold no journal; it does not once this returns, and may if it raises."""
    write_whole(file, 0, bytes(HEADER_BYTES))
    file.sync()


class PageWriter:
    """Appends whole pages to one journal, and never touches one again. Owns the position."""

    def __init__(self, file: DiskFile, shape: Shape, seal: Seal, end: int, before: Places) -> None:
        self.file = file
        self.shape = shape
        self.seal = seal
        self.end = end
        self.before = before
        self.reset = 0
        """The reset number of what is written from now on."""

    @classmethod
    def begin(cls, file: DiskFile, shape: Shape, generation: int) -> PageWriter:
        """Return a new journal in a file that holds none; it counts once its header is written."""
        seal = Seal(generation, secrets.token_bytes(SALT_BYTES))
        return cls(file, shape, seal, shape.first_page, NO_PLACES)

    @property
    def num_pages_free(self) -> int:
        """How many pages still fit into the file."""
        return self.file.num_bytes // self.shape.page_bytes - self.end

    def declare(self, store_id: bytes) -> None:
        """Write the header. Only once all pages so far are on the medium: it vouches for them."""
        write_header(self.file, Header(self.seal, self.end, self.before), self.shape, store_id)

    def write(self, records: Records) -> int:
        """Append records in pages of their own; return the number of the first record.

        They are not on the medium before the file is synced.
        """
        if self.shape.pages_for(len(records)) > self.num_pages_free:
            raise OSError(errno.ENOSPC, f"{len(records)} records do not fit into the journal")
        pages = pack(self.shape, self.seal, records, self.end, self.end, self.before, self.reset)
        write_whole(self.file, self.end * self.shape.page_bytes, pages.view(np.uint8).data)
        first = self.end * self.shape.per_page
        self.before = last_places(pages)
        self.end += len(pages)
        return first

    def append(self, records: Records) -> int:
        """As :meth:`write`, and on the medium on return. If it raises, nothing counts.

        The next append then writes the same pages again, at the same position. That is safe: it
        begins with the same records, so both versions of a page say the same.
        """
        end, before = self.end, self.before
        try:
            first = self.write(records)
            self.file.sync()
        except BaseException:
            self.end, self.before = end, before
            raise
        return first
