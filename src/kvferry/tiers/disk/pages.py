"""A journal's pages, byte by byte: how records are packed, and whether what is read is ours.

::

    page    | digest | generation | number | base | counts | places before | record | record | ...
    record  | place (and whether it was lost) | key | proof |

A page's digest covers all of it and is keyed by the salt in the journal's header, which is drawn
anew whenever a journal begins: what an earlier journal left in the same file is never ours. The
digest also fixes where the page lies, so a page at another place is not ours either.

``before`` repeats the places that the page before it names. A page that has gone bad can so be told
by its neighbour which places it spoke of, and only those are doubtful.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.keys import KEY_WORDS

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
