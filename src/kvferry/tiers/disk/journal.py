"""A journal's file: bytes at offsets, and a barrier that says they are on the medium."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS


class JournalFile(Protocol):
    """What a journal needs of a file; tests put one in its place that loses and tears sectors.

    Every call may raise OSError. After a failed ``sync`` nothing written since the last good one
    may be taken to be on the medium, not even after another ``sync`` that succeeds: the kernel has
    forgotten that those bytes were still to be written. Whoever wants them there writes them again.
    """

    @property
    def num_bytes(self) -> int: ...

    def read_at(self, offset: int, count: int) -> bytes:
        """At most ``count`` bytes; fewer at the end of the file."""

    def write_at(self, offset: int, data: memoryview) -> int:
        """How many bytes were taken, from the first on."""

    def sync(self) -> None:
        """Return once everything written so far is on the medium."""

    def close(self) -> None:
        """Give the file back. Safe to call twice."""


class DiskFile:
    """A real file, open for reading or for both. Writes go through the page cache."""

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        flags = os.O_RDWR if writable else os.O_RDONLY
        self._fd: int | None = os.open(path, flags | os.O_CLOEXEC)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._number).st_size

    @property
    def _number(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._number, count, offset)

    def write_at(self, offset: int, data: memoryview) -> int:
        return os.pwrite(self._number, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._number)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_whole(file: JournalFile, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it, however short the single writes are; OSError where it does not go on."""
    rest = memoryview(data).cast("B")
    while rest:
        taken = file.write_at(offset, rest)
        if taken <= 0:
            raise OSError(errno.EIO, f"a write at {offset} took none of {len(rest)} bytes")
        rest = rest[taken:]
        offset += taken


def read_whole(file: JournalFile, offset: int, count: int) -> bytes:
    """``count`` bytes, or fewer where the file ends; OSError where the medium gives none."""
    parts = []
    while count > 0:
        part = file.read_at(offset, count)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


# ------------------------------------------------------------------------------------------------
# A journal's pages, byte by byte: how records are packed, and whether what is read is ours.
#
# ::
#
#     page    | digest | generation | number | base | counts | places before | record | record | ...
#     record  | place (and whether it was lost) | key | proof |
#
# A page's digest covers all of it and is keyed by the salt in the journal's header, which is drawn
# anew whenever a journal begins: what an earlier journal left in the same file is never ours. The
# digest also fixes where the page lies, so a page at another place is not ours either.
#
# ``before`` repeats the places that the page before it names. A page that has gone bad can so be
# told
# by its neighbour which places it spoke of, and only those are doubtful.

PAGE_BYTES = 4096
SECTOR_BYTES = 512
DIGEST_BYTES = 16
SALT_BYTES = 32
HEAD_BYTES = 64
MOST_PROOF_BYTES = 64
MOST_PLACES = 1 << 31

LOST = np.uint32(1 << 31)
"""In the place of a record: what lay there is there no more."""

PLACE = np.uint32(MOST_PLACES - 1)
"""The bits of a record's place that number it."""

Pages = npt.NDArray[Any]
Records = npt.NDArray[Any]
Places = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

NO_PLACES: Places = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True)
class Shape:
    """How wide a store's proofs are, and with them its records; everything of a fixed size."""

    proof_bytes: int
    page_bytes: int = PAGE_BYTES

    @cached_property
    def record(self) -> np.dtype[Any]:
        return np.dtype(
            [("place", "<u4"), ("key", "<u8", (KEY_WORDS,)), ("proof", "u1", (self.proof_bytes,))]
        )

    @cached_property
    def per_page(self) -> int:
        """Records in a page; beside each stands a place of the page before."""
        return (self.page_bytes - HEAD_BYTES) // (4 + self.record.itemsize)

    @cached_property
    def page(self) -> np.dtype[Any]:
        begins = HEAD_BYTES + 4 * self.per_page
        fields: dict[str, tuple[Any, int]] = {
            "digest": (("u1", (DIGEST_BYTES,)), 0),
            "generation": ("<u8", 16),
            "number": ("<u4", 24),
            "base": ("<u4", 28),
            "count": ("<u2", 32),
            "count_before": ("<u2", 34),
            "before": (("<u4", (self.per_page,)), HEAD_BYTES),
            "records": ((self.record, (self.per_page,)), begins),
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
        """The number of the first page: those before it are the header's."""
        return max(1, 2 * SECTOR_BYTES // self.page_bytes)

    def pages_for(self, num_records: int) -> int:
        return -(-num_records // self.per_page)


@dataclass(frozen=True)
class Seal:
    """Which journal a page belongs to: what makes a digest, and what it is held against."""

    generation: int
    salt: bytes

    @cached_property
    def _begun(self) -> blake2b:
        return blake2b(digest_size=DIGEST_BYTES, key=self.salt, person=b"kvferry.page")

    def digest(self, rest_of_page: memoryview) -> bytes:
        digest = self._begun.copy()
        digest.update(rest_of_page)
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Spot:
    """Where pages go: their first number, what is known to be on the medium, who comes before."""

    number: int
    base: int
    before: Places


def pack(shape: Shape, seal: Seal, records: Records, spot: Spot) -> Pages:
    """Pages with these records, to be written from page ``spot.number`` on; at least one page.

    The same records give the same pages, and more records behind them change the last page only.
    """
    per_page = shape.per_page
    num_pages = max(1, shape.pages_for(len(records)))
    pages = np.zeros(num_pages, dtype=shape.page)
    whole = len(records) // per_page
    rows = pages["records"]
    rows[:whole] = records[: whole * per_page].reshape(whole, per_page)
    rows[whole : whole + 1, : len(records) - whole * per_page] = records[whole * per_page :]
    pages["generation"] = seal.generation
    pages["number"] = spot.number + np.arange(num_pages, dtype=np.uint32)
    pages["base"] = spot.base
    pages["count"] = per_page
    pages["count"][-1] = len(records) - (num_pages - 1) * per_page
    pages["before"][1:] = rows["place"][:-1]
    pages["count_before"][1:] = pages["count"][:-1]
    pages["before"][0, : len(spot.before)] = spot.before
    pages["count_before"][0] = len(spot.before)
    raw = pages.view(np.uint8).data
    for start in range(0, len(raw), shape.page_bytes):
        digest = seal.digest(raw[start + DIGEST_BYTES : start + shape.page_bytes])
        raw[start : start + DIGEST_BYTES] = digest
    return pages


def unpack(shape: Shape, raw: bytes) -> Pages:
    """Whole pages as they were read; whether they are ours is for :func:`ours` to say."""
    return np.frombuffer(raw, dtype=shape.page, count=len(raw) // shape.page_bytes)


def ours(shape: Shape, seal: Seal, raw: bytes, first: int) -> Flags:
    """Which of the pages in ``raw``, the first of which is page ``first``, are this seal's."""
    pages = unpack(shape, raw)
    numbers = first + np.arange(len(pages))
    # Cheap words first: behind a journal's end lie thousands of pages of an older one.
    right = (pages["generation"] == seal.generation) & (pages["number"] == numbers)
    right &= (pages["count"] <= shape.per_page) & (pages["count_before"] <= shape.per_page)
    view = memoryview(raw)
    for at in np.flatnonzero(right).tolist():
        start = at * shape.page_bytes
        digest = seal.digest(view[start + DIGEST_BYTES : start + shape.page_bytes])
        right[at] = digest == raw[start : start + DIGEST_BYTES]
    return right


def last_places(pages: Pages) -> Places:
    """The places that the last of these pages names, as the page after it repeats them."""
    last = pages[-1]
    return last["records"]["place"][: int(last["count"])].copy()


# ------------------------------------------------------------------------------------------------
# A journal's header: which journal this file holds now, or that it holds none.
#
# It is one sector, written twice, side by side: damage to one of them costs nothing. A file whose
# header is zero (or is nobody's) holds no journal, whatever its pages say.

MAGIC = b"KVFYJRNL"
VERSION = 1
_FIELDS = struct.Struct(f"<8sIIIIQ{SALT_BYTES}sI")
HEADER_BYTES = 2 * SECTOR_BYTES
_LAST_AT = 96
"""Where the places of the last copied page begin."""


@dataclass(frozen=True, eq=False)
class Header:
    """The journal of a file. Pages before ``copied_end`` were on the medium before this was.

    ``last`` names the places in the last of those pages: no page repeats them before the next
    commit does.
    """

    seal: Seal
    copied_end: int
    last: Places

    def pack(self, shape: Shape, store_id: bytes) -> bytes:
        sector = bytearray(SECTOR_BYTES)
        _FIELDS.pack_into(
            sector,
            DIGEST_BYTES,
            MAGIC,
            VERSION,
            shape.page_bytes,
            shape.proof_bytes,
            self.copied_end,
            self.seal.generation,
            self.seal.salt,
            len(self.last),
        )
        places = self.last.astype("<u4").tobytes()
        sector[_LAST_AT : _LAST_AT + len(places)] = places
        sector[:DIGEST_BYTES] = _digest(store_id, memoryview(sector)[DIGEST_BYTES:])
        return bytes(sector)

    @classmethod
    def unpack(cls, shape: Shape, store_id: bytes, sector: bytes) -> Header | None:
        """None where this is no header of this store and shape, or not a whole one."""
        if len(sector) != SECTOR_BYTES or sector[:DIGEST_BYTES] != _digest(
            store_id, memoryview(sector)[DIGEST_BYTES:]
        ):
            return None
        magic, version, page_bytes, proof_bytes, copied_end, generation, salt, num_last = (
            _FIELDS.unpack_from(sector, DIGEST_BYTES)
        )
        if magic != MAGIC or version != VERSION or num_last > shape.per_page:
            return None
        if (page_bytes, proof_bytes) != (shape.page_bytes, shape.proof_bytes):
            return None
        last = np.frombuffer(sector, dtype="<u4", count=num_last, offset=_LAST_AT)
        return cls(Seal(generation, salt), copied_end, last)


def _digest(store_id: bytes, rest: memoryview) -> bytes:
    return blake2b(rest, digest_size=DIGEST_BYTES, key=store_id, person=b"kvferry.header").digest()


def read_header(file: JournalFile, shape: Shape, store_id: bytes) -> Header | None:
    """The file's journal, from whichever of the two sectors is whole; None if there is none.

    OSError where that cannot be told because a sector cannot be read: a drive that errs for a
    moment must not cost everything it holds.
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


def write_header(file: JournalFile, header: Header, shape: Shape, store_id: bytes) -> None:
    """Make the file hold this journal; it does once this returns, and may if it raises."""
    write_whole(file, 0, header.pack(shape, store_id) * 2)
    file.sync()


def erase_header(file: JournalFile) -> None:
    """Make the file hold no journal; it does not once this returns, and may if it raises."""
    write_whole(file, 0, bytes(HEADER_BYTES))
    file.sync()


# ------------------------------------------------------------------------------------------------
# One journal: where its next page goes. Appends whole pages, and never touches one again.


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
