"""Which block lies at which place, on the medium: a journal in one of two files, in turn.

::

    note_written ─┐
    note_lost   ──┼─> queued ── commit ──> appended, synced: promised
    forget      ──┘                │
                                   └─ no room: live records to the other file, then the switch

    switch    copy, sync │ header of the new, sync │ old header erased, sync │ append to the new
    forget                 old header erased, sync │ header of the new, sync │ append to the new

Each bar is a barrier. The header vouches for all pages copied before it, so it comes after they are
on the medium. Until the old header is gone both journals say the same, because nothing is appended
in between; so damage to one header can never bring back what the other has left behind. To forget
is the other way round: with no header nothing is there, which is what was asked for.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.tiers.disk.journal import (
    HEADER_BYTES,
    LOST,
    MOST_PLACES,
    NO_PLACES,
    PLACE,
    DiskFile,
    DiskJournal,
    Flags,
    Header,
    JournalFile,
    Pages,
    Places,
    Records,
    Shape,
    erase_header,
    last_places,
    ours,
    read_header,
    read_whole,
    unpack,
    write_header,
    write_whole,
)
from kvferry.types import NO_SLOTS, SlotArray

Proofs = npt.NDArray[np.uint8]


class Entries:
    """One entry per place, of the proof's bytes and five more: no keys, those stay in the journal.

    ``present`` and ``proofs`` say what may be read now. ``newest`` is the number of the newest
    record about a place in the current journal (page times records per page, and its row), 0 for
    none: a record is live exactly if its place's newest is it.
    """

    def __init__(self, num_places: int, shape: Shape) -> None:
        self.present = np.zeros(num_places, dtype=bool)
        self.proofs: Proofs = np.zeros((num_places, shape.proof_bytes), dtype=np.uint8)
        self.newest = np.zeros(num_places, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.present)


def flatten(shape: Shape, pages: Pages, first: int) -> tuple[Records, npt.NDArray[np.uint32]]:
    """All records of these pages in their order, and their numbers."""
    rows = np.arange(shape.per_page)
    used = rows < pages["count"][:, None]
    numbers = (first + np.arange(len(pages)))[:, None] * shape.per_page + rows
    if used.all():
        return pages["records"].reshape(-1), numbers.reshape(-1).astype(np.uint32)
    return pages["records"][used], numbers[used].astype(np.uint32)


def places_of(records: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The places the records are about, and which of them were lost."""
    raw = records["place"]
    return (raw & PLACE).astype(np.int64), (raw & LOST) != 0


# ------------------------------------------------------------------------------------------------
# From a journal's bytes to what may be believed: the newest record of every place and every key.
#
# ::
#
#     pages     | copied before the header | commit | commit | last commit | an older journal's
#     whole?    |  .  .  x  .  .  .  .  .  .  .  .  .  .  x  . |  .  x  .    |  x  x  x
#                        bad                            bad     base  cut
#
# A commit begins only after the one before it is on the medium, and each of its pages says where it
# began (``base``). So every page before the greatest base of all whole pages was on the medium
# once:
#
# - behind it, the first page that is not whole ends the journal (a torn tail). Nothing there was
# ever
#   promised. It is cut, and erased, so that it cannot come back behind later pages.
# - before it, a page that is not whole has gone bad since. What it said is unknown, but the page
#   after it repeats which places it spoke of: these are left out, all others are believed. Where
# the
#   page after it is bad too, everything older is left out.
#
# Nothing that was forgotten can come back this way: forgetting ends the journal itself.

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


# ------------------------------------------------------------------------------------------------
# A journal written anew without what is out of date, a step at a time, beside its commits.
#
# The copy follows the old journal from its first page, in order, and takes the records that are
# live
# when it comes by. Meanwhile the old journal grows; the copy catches up, and ends when nothing is
# left to follow. A record that it took may be contradicted later in the old journal: what
# contradicts
# it is copied too, because it comes behind. Order is kept, so the newest stays the newest.


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
    def is_tier(self) -> bool:
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


# ------------------------------------------------------------------------------------------------
# Which of a ledger's two files holds its journal; the other is left without one.


def newest_header(
    files: Sequence[JournalFile], shape: Shape, store_id: bytes
) -> tuple[JournalFile, Header] | None:
    """The file with the journal that counts, and its header. Only reads.

    After a crash between the two halves of a switch both files have one; the newer one counts.
    """
    found = [(file, read_header(file, shape, store_id)) for file in files]
    there = [(file, header) for file, header in found if header is not None]
    return max(there, key=lambda each: each[1].seal.generation, default=None)


def find_journal(
    files: tuple[JournalFile, JournalFile], shape: Shape, store_id: bytes, num_places: int
) -> tuple[DiskJournal, Found]:
    """The journal, ready for the next commit, and what it says; a new one where there is none.

    Leaves exactly one header, and nothing behind the journal's end that could be taken for more.
    """
    newest = newest_header(files, shape, store_id)
    if newest is None:
        return _begin(files, shape, store_id, num_places)
    file, header = newest
    found = recover(file, header, shape, num_places)
    # A killed process may leave in the page cache what never reached the medium, and after a failed
    # sync the kernel would not write it any more. What is believed here is written again.
    size = shape.page_bytes
    tail = read_whole(file, found.base * size, (found.end - found.base) * size)
    write_whole(file, found.base * size, tail + bytes((found.junk_end - found.end) * size))
    write_header(file, header, shape, store_id)
    for other in files:
        if other is not file:
            erase_header(other)
    return DiskJournal(file, shape, header.seal, found.end, found.before), found


def _begin(
    files: tuple[JournalFile, JournalFile], shape: Shape, store_id: bytes, num_places: int
) -> tuple[DiskJournal, Found]:
    is_new = not any(any(read_whole(file, 0, HEADER_BYTES)) for file in files)
    for file in files:
        erase_header(file)
    journal = DiskJournal.begin(files[0], shape, 1)
    journal.declare(store_id)
    found = Found(Entries(num_places, shape), journal.end, journal.end, journal.before, journal.end)
    if not is_new:
        found.report.words = "no journal could be read: everything is left out"
    return journal, found


# ------------------------------------------------------------------------------------------------
# Which block lies at which place, on the medium: a journal in one of two files, in turn.
#
# ::
#
#     note_written ─┐
#     note_lost   ──┼─> queued ── commit ──> appended, synced: promised
#     forget      ──┘                │
#                                    └─ no room: live records to the other file, then the switch
#
#     switch    copy, sync │ header of the new, sync │ old header erased, sync │ append to the new
#     forget                 old header erased, sync │ header of the new, sync │ append to the new
#
# Each bar is a barrier. The header vouches for all pages copied before it, so it comes after
# they are
# on the medium. Until the old header is gone both journals say the same, because nothing is
# appended
# in between; so damage to one header can never bring back what the other has left behind. To forget
# is the other way round: with no header nothing is there, which is what was asked for.

log = logging.getLogger(__name__)

FILE_NAMES = ("journal-0", "journal-1")
COPY_PAGES = 4096
"""Followed in one step of a compaction: 16 MiB, a few hundredths of a second."""

_LEAST_SLACK_PAGES = 256


def slack_pages(shape: Shape, num_places: int) -> int:
    """Pages of a journal beyond those that all places fill: room for commits."""
    return max(_LEAST_SLACK_PAGES, shape.pages_for(num_places) // 4)


def journal_bytes(shape: Shape, num_places: int) -> int:
    """How long each of the two files must be."""
    pages = shape.first_page + shape.pages_for(num_places) + slack_pages(shape, num_places)
    return pages * shape.page_bytes


class Ledger:
    """The index of one store on disk. Owns both journals and what is known of every place.

    Notes may come from any thread and never wait for the medium; ``commit`` and ``close`` are
    called by one thread at a time, and do. ``proofs`` and ``present`` are for everybody to read.
    """

    def __init__(
        self,
        files: tuple[JournalFile, JournalFile],
        store_id: bytes,
        num_places: int,
        shape: Shape,
    ) -> None:
        """Recover from ``files``, each long enough for ``journal_bytes``; JournalError if not."""
        if not 0 < num_places < MOST_PLACES:
            raise InputError(f"a store has 1 to {MOST_PLACES - 1} places, not {num_places}")
        self.shape = shape
        self._files = files
        self._store_id = store_id
        self._slack = slack_pages(shape, num_places)
        self._lock = threading.Lock()  # the queue, and what is present; never held while waiting
        self._queue: list[tuple[int, Records]] = []  # each with its turn among all notes
        self._num_noted = 0
        self._forget = False
        self._forget_due = False  # taken from the queue, and not yet on the medium
        self._unsaved: Records = np.empty(0, dtype=shape.record)
        self._to_erase: list[JournalFile] = []
        self._compaction: Compaction | None = None
        self._is_sealed = False
        self._closed = False
        self.trouble = ""
        """Why the journal could not be written anew the last time; commits may still succeed."""
        for file in files:
            if file.num_bytes < journal_bytes(shape, num_places):
                raise JournalError(
                    f"a journal of {file.num_bytes} bytes is too short for {num_places} places: it "
                    f"needs {journal_bytes(shape, num_places)}"
                )
        try:
            self._journal, found = find_journal(files, shape, store_id, num_places)
            self._entries: Entries = found.entries
            self.report: RecoveryReport = found.report
            if found.is_untidy or found.end * shape.page_bytes > journal_bytes(shape, num_places):
                self._compact(None)
            if len(found.doubled):
                self.note_lost(found.doubled)
        except OSError as error:
            raise JournalError(f"the journal cannot be opened: {error}") from error

    @classmethod
    def open(cls, folder: Path, store_id: bytes, num_places: int, proof_bytes: int) -> Ledger:
        """The ledger in ``folder``, whose two files are there and long enough (see ``Store``)."""
        files: list[DiskFile] = []
        try:
            files.extend(DiskFile(folder / name) for name in FILE_NAMES)
            return cls((files[0], files[1]), store_id, num_places, Shape(proof_bytes))
        except OSError as error:
            raise JournalError(f"{folder}: the journal cannot be opened: {error}") from error
        except BaseException:
            for file in files:
                file.close()
            raise

    # -- what is known --------------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        return len(self._entries)

    @property
    def proofs(self) -> Proofs:
        """One row per place; only meaningful where ``present``."""
        return self._entries.proofs

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which places hold a block that may be read now."""
        return self._entries.present

    @property
    def num_blocks(self) -> int:
        return int(np.count_nonzero(self.present))

    @property
    def num_unsaved(self) -> int:
        """Records noted that no commit has promised yet."""
        with self._lock:
            return len(self._unsaved) + sum(len(records) for _, records in self._queue)

    @property
    def num_noted(self) -> int:
        """How many notes were made so far: a point in their order, for ``commit``."""
        with self._lock:
            return self._num_noted

    @property
    def num_journal_bytes(self) -> int:
        """How far the journal has grown; it is written anew before its file is full."""
        return self._journal.end * self.shape.page_bytes

    @property
    def is_compacting(self) -> bool:
        """Whether a commit soon would have something to do though nothing was noted."""
        return self._compaction is not None

    def pieces(self) -> Iterator[tuple[Keys, SlotArray, Proofs]]:
        """Keys, places and proofs of all committed blocks, in the order written, some at a time.

        For whoever has just opened the ledger: a commit in between would change what is read.
        """
        return read_live(self._journal.file, self.shape, self._entries, self._journal.end)

    # -- noting ---------------------------------------------------------------------------------

    def note_written(self, places: SlotArray, keys: Keys, proofs: Proofs) -> None:
        """These blocks lie at these places now, and can be read; their bytes are on their way.

        Before the commit that is to promise them, their bytes must be on the medium.
        """
        if not len(places) == len(keys) == len(proofs):
            raise InputError(f"{len(places)} places, {len(keys)} keys and {len(proofs)} proofs")
        self._require_places(places)
        records = np.zeros(len(places), dtype=self.shape.record)
        records["place"] = places
        records["key"] = keys.array
        records["proof"] = proofs
        with self._lock:
            self._queue_up(records)
            self._entries.proofs[places] = proofs
            self._entries.present[places] = True

    def note_lost(self, places: SlotArray) -> None:
        """What lay at these places can be read no more."""
        self._require_places(places)
        records = np.zeros(len(places), dtype=self.shape.record)
        records["place"] = places
        records["place"] |= LOST
        with self._lock:
            self._queue_up(records)
            self._entries.present[places] = False

    def forget(self) -> None:
        """Everything noted so far is gone. The next commit makes sure that it stays gone."""
        with self._lock:
            self._queue.clear()
            self._num_noted += 1
            self._forget = True
            self._entries.present.fill(False)

    def _queue_up(self, records: Records) -> None:
        self._num_noted += 1
        self._queue.append((self._num_noted, records))

    def _require_places(self, places: SlotArray) -> None:
        if self._closed:
            raise ClosedError("the ledger is closed")
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < self.num_places:
            raise InputError(
                f"there are places 0 to {self.num_places - 1}, got {int(places.min())} to "
                f"{int(places.max())}"
            )

    # -- making sure ----------------------------------------------------------------------------

    def commit(self, num_noted: int | None = None) -> None:
        """Put all that was noted before this call on the medium: afterwards it is promised.

        With ``num_noted``, as it was at some moment, only what was noted before that moment: whose
        bytes are on the medium already. (What was forgotten later is forgotten all the same.)

        JournalError where that failed: nothing noted since the last good commit is promised, all
        of it is kept, and the next commit tries again. With nothing noted since the last commit, it
        marks that one as complete, once, so that damage to it can later be told from a crash.
        """
        if self._closed:
            raise ClosedError("the ledger is closed")
        self._save(num_noted)
        self._compact_some()

    def close(self) -> None:
        """Commit and mark that as complete, then give the files back. Safe to call twice.

        JournalError where the commit failed; the files are given back all the same.
        """
        if self._closed:
            return
        try:
            self._save()
            self._save()
        finally:
            self._closed = True
            for file in self._files:
                file.close()

    def _save(self, num_noted: int | None = None) -> None:
        with self._lock:
            upto = self._num_noted if num_noted is None else num_noted
            forget, self._forget = self._forget, False
            queued = [records for turn, records in self._queue if turn <= upto]
            self._queue = self._queue[len(queued) :]
        if forget:  # whatever waited was noted before
            self._unsaved = self._unsaved[:0]
            self._forget_due = True
        self._unsaved = np.concatenate((self._unsaved, *queued))
        try:
            self._mend()
            if self._forget_due:
                self._forget_all()
            self._append_unsaved()
        except OSError as error:
            raise JournalError(
                f"the journal could not be written: {error}; {len(self._unsaved)} records wait"
            ) from error

    def _append_unsaved(self) -> None:
        """Append what waits, in as many pieces as there is room for."""
        if not len(self._unsaved):
            if not self._is_sealed:
                self._make_room()
                self._journal.append(self._unsaved)
                self._is_sealed = True
            return
        while len(self._unsaved):
            self._make_room()
            count = min(len(self._unsaved), self._journal.num_pages_free * self.shape.per_page)
            records = self._unsaved[:count]
            first = self._journal.append(records)
            places = (records["place"] & ~LOST).astype(np.int64)
            self._entries.newest[places] = first + np.arange(count, dtype=np.uint32)
            self._unsaved = self._unsaved[count:]
            self._is_sealed = False

    def _make_room(self) -> None:
        """See to it that at least one page is free."""
        if self._journal.num_pages_free < 1:
            self._compact(None)

    def _forget_all(self) -> None:
        """Leave both journals without a word of what was, and begin a new one."""
        self._compaction = None
        erase_header(self._journal.file)
        # A crash here leaves no journal at all, which says the same: nothing is there.
        fresh = DiskJournal.begin(self._other, self.shape, self._journal.seal.generation + 1)
        fresh.declare(self._store_id)
        self._journal = fresh
        self._entries.newest.fill(0)
        self._is_sealed = True
        self._forget_due = False

    # -- writing anew ---------------------------------------------------------------------------

    @property
    def _other(self) -> JournalFile:
        first, second = self._files
        return second if self._journal.file is first else first

    def _compact_some(self) -> None:
        """A step of writing the journal anew, where that is due. It is no commit's failure."""
        if self._compaction is None and self._journal.num_pages_free >= self._slack // 2:
            return
        try:
            self._compact(COPY_PAGES)
            self.trouble = ""
        except OSError as error:
            if self.trouble != str(error):
                log.warning("the journal could not be written anew: %s", error)
            self.trouble = str(error)

    def _compact(self, num_pages: int | None) -> None:
        """Copy so many pages more, or all; switch once the copy is tier with the journal."""
        if self._compaction is None:
            target = DiskJournal.begin(self._other, self.shape, self._journal.seal.generation + 1)
            self._compaction = Compaction(self._journal, target, self._entries)
        compaction = self._compaction
        try:
            compaction.step(num_pages or COPY_PAGES)
            while num_pages is None and not compaction.is_tier:
                compaction.step(COPY_PAGES)
            if compaction.is_tier:
                self._switch(compaction)
        except OSError:
            self._compaction = None
            raise

    def _switch(self, compaction: Compaction) -> None:
        newest = compaction.finish()
        old = self._journal
        # Whether this header is there is unknown until declare returns: were it there and we went
        # on with the old journal, a crash would bring back a past without what came since.
        self._to_erase = [compaction.target.file]
        compaction.target.declare(self._store_id)
        self._to_erase = [old.file]
        self._journal = compaction.target
        self._entries.newest[:] = newest
        self._compaction = None
        self._is_sealed = True
        self._mend()

    def _mend(self) -> None:
        """Erase the header of the journal that must not be found any more, if there is one."""
        for file in self._to_erase:
            erase_header(file)
        self._to_erase = []
