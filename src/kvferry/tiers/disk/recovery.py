"""From a journal's bytes to what may be believed: the newest record of every place and every key.

::

    pages     | copied before the header | commit | commit | last commit | an older journal's
    whole?    |  .  .  x  .  .  .  .  .  .  .  .  .  .  x  . |  .  x  .    |  x  x  x
                       bad                            bad     base  cut

A commit begins only after the one before it is on the medium, and each of its pages says where it
began (``base``). So every page before the greatest base of all whole pages was on the medium once:

- behind it, the first page that is not whole ends the journal (a torn tail). Nothing there was ever
  promised. It is cut, and erased, so that it cannot come back behind later pages.
- before it, a page that is not whole has gone bad since. What it said is unknown, but the page
  after it repeats which places it spoke of: these are left out, all others are believed. Where the
  page after it is bad too, everything older is left out.

Nothing that was forgotten can come back this way: forgetting ends the journal itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.tiers.disk.entries import Entries, Proofs, flatten, places_of
from kvferry.tiers.disk.files import JournalFile, read_whole
from kvferry.tiers.disk.header import Header
from kvferry.tiers.disk.pages import (
    NO_PLACES,
    PLACE,
    Flags,
    Places,
    Shape,
    last_places,
    ours,
    unpack,
)
from kvferry.types import NO_SLOTS, SlotArray

Words = npt.NDArray[np.uint64]

CHUNK_PAGES = 1024
"""Read and looked at together: 4 MiB."""


@dataclass
class RecoveryReport:
    """What recovery did, for people to read."""

    words: str = ""
    """How the journal was found, where that needs saying."""
    num_blocks: int = 0
    num_pages: int = 0
    torn_pages: int = 0
    """Pages behind the cut, whole or half: written, never promised."""
    bad_pages: int = 0
    doubtful_blocks: int = 0
    """Left out because a bad page spoke of their places."""
    blocks_beyond: int = 0
    """Left out because the store has fewer places now."""
    doubled_blocks: int = 0
    """Left out because the same block was written to another place later."""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.num_blocks} blocks from {self.num_pages} pages in {self.seconds:.2f} s"]
        for count, what in (
            (self.torn_pages, "pages of a torn tail were cut"),
            (self.bad_pages, "pages had gone bad"),
            (self.doubtful_blocks, "blocks were left out because of them"),
            (self.blocks_beyond, "blocks lay beyond the store's size"),
            (self.doubled_blocks, "older copies of blocks were left out"),
        ):
            if count:
                parts.append(f"{count} {what}")
        if self.words:
            parts.append(self.words)
        return "; ".join(parts)


@dataclass(eq=False)
class Found:
    """A journal as it was found: where it ends, what it says, and what is to be mended."""

    entries: Entries
    base: int
    """Pages before this one were on the medium once."""
    end: int
    """The page after the last that is believed: where the next one goes."""
    before: Places
    """The places in the last page, for the next one to repeat."""
    junk_end: int
    """Behind the last whole page; what lies between ``end`` and this must be erased."""
    doubled: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Places left out because their block is elsewhere: they must be noted as lost."""
    report: RecoveryReport = field(default_factory=RecoveryReport)

    @property
    def is_untidy(self) -> bool:
        """Whether the journal should be written anew: bad pages in it, or places that we lack."""
        return bool(self.report.bad_pages or self.report.blocks_beyond)


def recover(file: JournalFile, header: Header, shape: Shape, num_places: int) -> Found:
    """What ``file``, whose header is ``header``, says of the places below ``num_places``.

    Only reads. Memory: the entries, 16 bytes a place besides, and a chunk of pages.
    """
    began = time.monotonic()
    whole, base = _scan(file, header, shape)
    end = base + _num_leading(whole[base:])
    junk_end = int(np.flatnonzero(whole).max(initial=end - 1)) + 1
    found = Found(Entries(num_places, shape), base, end, header.last, junk_end)
    report = found.report
    report.num_pages = end - shape.first_page
    report.torn_pages = int(np.count_nonzero(whole[end:]))
    if end < len(whole):
        half = unpack(shape, read_pages(file, shape, end, 1))
        report.torn_pages += int(half["generation"][0] == header.seal.generation)
    first_words = np.zeros(num_places, dtype=np.uint64)
    report.blocks_beyond = _replay(file, whole[:end], shape, found.entries, first_words)
    _leave_out_doubtful(file, header, shape, whole, base, found)
    _leave_out_doubled(file, shape, first_words, found)
    report.num_blocks = int(np.count_nonzero(found.entries.present))
    report.seconds = time.monotonic() - began
    if end > max(header.copied_end, shape.first_page):
        last = unpack(shape, read_pages(file, shape, end - 1, 1))
        found.before = last_places(last) if whole[end - 1] else NO_PLACES
    return found


def read_live(
    file: JournalFile, shape: Shape, entries: Entries, end: int
) -> Iterator[tuple[Keys, SlotArray, Proofs]]:
    """Keys, places and proofs of all blocks there are, in the order written, in pieces."""
    for first in range(shape.first_page, end, CHUNK_PAGES):
        raw = read_pages(file, shape, first, min(CHUNK_PAGES, end - first))
        # Records of bad pages are nobody's newest.
        records, numbers = flatten(shape, unpack(shape, raw), first)
        places, _ = places_of(records)
        live = places < len(entries)
        live[live] = entries.newest[places[live]] == numbers[live]
        live[live] = entries.present[places[live]]
        records = records[live]
        yield Keys(np.ascontiguousarray(records["key"])), places[live], records["proof"].copy()


def read_pages(file: JournalFile, shape: Shape, first: int, count: int) -> bytes:
    """``count`` pages; what the medium does not give is zero, and so is nobody's page."""
    size = shape.page_bytes
    try:
        return read_whole(file, first * size, count * size).ljust(count * size, b"\0")
    except OSError:
        if count == 1:
            return bytes(size)
        return b"".join(read_pages(file, shape, first + at, 1) for at in range(count))


def _scan(file: JournalFile, header: Header, shape: Shape) -> tuple[Flags, int]:
    """Which pages are whole and ours, and before which all were on the medium once."""
    num_pages = file.num_bytes // shape.page_bytes
    whole = np.zeros(num_pages, dtype=bool)
    base = min(max(header.copied_end, shape.first_page), num_pages)
    for first in range(shape.first_page, num_pages, CHUNK_PAGES):
        raw = read_pages(file, shape, first, min(CHUNK_PAGES, num_pages - first))
        right = ours(shape, header.seal, raw, first)
        whole[first : first + len(right)] = right
        base = max(base, int(unpack(shape, raw)["base"][right].max(initial=0)))
    return whole, base


def _replay(
    file: JournalFile, whole: Flags, shape: Shape, entries: Entries, first_words: Words
) -> int:
    """Note every record of whole pages in its turn; returns how many were about places we lack."""
    beyond = 0
    for first in range(shape.first_page, len(whole), CHUNK_PAGES):
        right = whole[first : first + CHUNK_PAGES]
        pages = unpack(shape, read_pages(file, shape, first, len(right)))
        if not right.all():
            pages = pages.copy()
            pages["count"][~right] = 0
        records, numbers = flatten(shape, pages, first)
        places, lost = places_of(records)
        here = places < len(entries)
        if not here.all():
            beyond += int(np.count_nonzero(~here & ~lost))
            records, numbers = records[here], numbers[here]
            places, lost = places[here], lost[here]
        # Of a place that is named twice the last assignment stays, which is the newest record.
        entries.newest[places] = numbers
        entries.present[places] = ~lost
        entries.proofs[places] = records["proof"]
        first_words[places] = records["key"][:, 0]
    return beyond


def _leave_out_doubtful(
    file: JournalFile, header: Header, shape: Shape, whole: Flags, base: int, found: Found
) -> None:
    """Drop what pages that went bad may have contradicted."""
    bad = np.flatnonzero(~whole[shape.first_page : base]) + shape.first_page
    found.report.bad_pages = len(bad)
    told = np.append(whole, False)[bad + 1] | (bad + 1 == header.copied_end)
    for number in bad[~told][-1:].tolist():  # its neighbour is bad too: all that is older goes
        _leave_out(found, np.arange(len(found.entries)), number * shape.per_page)
        bad, told = bad[bad > number], told[bad > number]
    for number in bad.tolist():
        if number + 1 == header.copied_end:
            named = header.last
        else:
            after = unpack(shape, read_pages(file, shape, number + 1, 1))[0]
            named = after["before"][: int(after["count_before"])]
        places = (named & PLACE).astype(np.int64)
        _leave_out(found, places[places < len(found.entries)], number * shape.per_page)


def _leave_out(found: Found, places: SlotArray, number: int) -> None:
    """Drop what these places held before the record of this number."""
    entries = found.entries
    doubtful = places[entries.newest[places] < number]
    found.report.doubtful_blocks += int(np.count_nonzero(entries.present[doubtful]))
    entries.present[doubtful] = False
    entries.newest[doubtful] = 0


def _leave_out_doubled(file: JournalFile, shape: Shape, first_words: Words, found: Found) -> None:
    """Of a key that is at several places keep the one written last."""
    entries = found.entries
    words = first_words[entries.present]
    words.sort()
    twice = words[1:][words[1:] == words[:-1]]
    del words
    if not len(twice):
        return
    # Sharing a first word is rare and proves nothing: those that do are compared whole.
    asked = entries.present & np.isin(first_words, twice)
    parts = [
        (keys.array[asked[places]], places[asked[places]])
        for keys, places, _ in read_live(file, shape, entries, found.end)
    ]
    keys = np.concatenate([part[0] for part in parts])
    places = np.concatenate([part[1] for part in parts])
    order = np.lexsort((np.arange(len(places)), *keys.T))
    keys, places = keys[order], places[order]
    older = places[:-1][(keys[1:] == keys[:-1]).all(axis=1)]
    found.report.doubled_blocks = len(older)
    found.doubled = older
    entries.present[older] = False


def _num_leading(flags: Flags) -> int:
    return len(flags) if flags.all() else int(flags.argmin())
