"""A journal's header: which journal this file holds now, or that it holds none.

It is one sector, written twice, side by side: damage to one of them costs nothing. A file whose
header is zero (or is nobody's) holds no journal, whatever its pages say.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvferry.tiers.disk.files import JournalFile, read_whole, write_whole
from kvferry.tiers.disk.pages import DIGEST_BYTES, SALT_BYTES, SECTOR_BYTES, Places, Seal, Shape

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
