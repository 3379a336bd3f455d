"""Which block lies at which place, on the medium: a journal in one of two files, in turn.

::

    record_written ─┐
    record_lost   ──┼─> queued ── commit ──> appended, synced: durable
    reset         ──┘                │
                                     └─ no room: live records to the other file, then the switch

    switch    copy, sync │ header of the new, sync │ old header erased, sync │ append to the new
    reset                    reset number, sync │ append under the new number

Each bar is a barrier. The header vouches for all pages copied before it, so it comes after they are
on the medium. Until the old header is gone both journals say the same, because nothing is appended
in between; so damage to one header can never bring back what the other has left behind. After a
reset the older pages stay where they are, but their number is another, and so they do not count.

Recovery finds the newest record of every place and every key::

    pages     | copied before the header | commit | commit | last commit | an older journal's
    valid?    |  .  .  x  .  .  .  .  .  .  .  .  .  .  x  . |  .  x  .    |  x  x  x
                       bad                            bad     base  cut

A commit begins only after the one before it is on the medium, and each of its pages says where it
began (``base``). So every page before the greatest base of all valid pages was on the medium once:

- behind it, the first invalid page ends the journal (a torn tail). Nothing there was ever promised.
  It is cut, and erased, so that it cannot come back behind later pages.
- before it, an invalid page has gone bad since. What it said is unknown, but the page after it
  repeats which places it spoke of: these are left out, all others are believed. Where the page
  after it is bad too, everything older is left out.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.tiers.disk.files import DiskFile, read_whole, write_whole
from kvferry.tiers.disk.journal_pages import (
    HEADER_BYTES,
    LOST,
    MAX_PLACES,
    NO_PLACES,
    PLACE,
    Flags,
    Header,
    Pages,
    PageWriter,
    Places,
    Records,
    Shape,
    erase_header,
    last_places,
    read_header,
    unpack,
    valid_pages,
    write_header,
)
from kvferry.tiers.disk.state import FILE_NAME as STATE_NAME
from kvferry.tiers.disk.state import NOT_KEPT, raise_reset, read_reset, write_reset
from kvferry.types import NO_SLOTS, SlotArray

log = logging.getLogger(__name__)

Proofs = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

FILE_NAMES = ("journal-0", "journal-1")
CHUNK_PAGES = 1024
"""Read and checked together: 4 MiB."""

COPY_PAGES = 4096
"""Copied in one step of a compaction: 16 MiB, a few hundredths of a second."""

_MIN_SLACK_PAGES = 256


def slack_pages(shape: Shape, num_places: int) -> int:
    """Pages of a journal beyond those that all places fill: room for commits."""
    return max(_MIN_SLACK_PAGES, shape.pages_for(num_places) // 4)


def journal_bytes(shape: Shape, num_places: int) -> int:
    """How long each of the two files must be."""
    pages = shape.first_page + shape.pages_for(num_places) + slack_pages(shape, num_places)
    return pages * shape.page_bytes


class Entries:
    """One entry per place, of the proof's bytes and five more: keys stay in the journal.

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

    def live(self, places: SlotArray, numbers: npt.NDArray[np.uint32]) -> Flags:
        """Which of these records are the newest about their places."""
        live: Flags = places < len(self)
        live[live] = self.newest[places[live]] == numbers[live]
        return live


def _records_of(
    shape: Shape, pages: Pages, first: int
) -> tuple[Records, npt.NDArray[np.uint32], SlotArray]:
    """All records of these pages in their order, their numbers, and their places."""
    rows = np.arange(shape.per_page)
    used = rows < pages["count"][:, None]
    numbers = ((first + np.arange(len(pages)))[:, None] * shape.per_page + rows).astype(np.uint32)
    if used.all():
        records, numbers = pages["records"].reshape(-1), numbers.reshape(-1)
    else:
        records, numbers = pages["records"][used], numbers[used]
    return records, numbers, (records["place"] & PLACE).astype(np.int64)


# -- recovery -------------------------------------------------------------------------------------


@dataclass
class RecoveryReport:
    """What recovery found and left out."""

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
        return "; ".join([*parts, self.words] if self.words else parts)


@dataclass(eq=False)
class Recovered:
    """A journal as it was found: where it ends, what it says, and what is to be mended."""

    entries: Entries
    base: int
    """Pages before this one were on the medium once."""
    end: int
    """The page after the last that is believed: the next one goes there."""
    before: Places
    """The places in the last page, for the next one to repeat."""
    junk_end: int
    """The page after the last valid one; what lies between ``end`` and this must be erased."""
    doubled: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Places left out because their block is elsewhere: they must be recorded as lost."""
    report: RecoveryReport = field(default_factory=RecoveryReport)

    def leave_out(self, places: SlotArray, number: int) -> None:
        """Drop what these places held before the record of this number."""
        entries = self.entries
        places = places[places < len(entries)]
        doubtful = places[entries.newest[places] < number]
        self.report.doubtful_blocks += int(np.count_nonzero(entries.present[doubtful]))
        entries.present[doubtful] = False
        entries.newest[doubtful] = 0


def recover(
    file: DiskFile, header: Header, shape: Shape, num_places: int, reset: int = 0
) -> Recovered:
    """Return what ``file``, whose header is ``header``, says of the places below ``num_places``.

    Only pages of the reset number ``reset`` count. Only reads. Memory: the entries, 16 bytes a
    place besides, and a chunk of pages.
    """
    began = time.monotonic()
    valid, base = _scan(file, header, shape)
    behind = np.flatnonzero(~valid[base:])
    end = base + int(behind[0]) if len(behind) else len(valid)
    junk_end = int(np.flatnonzero(valid).max(initial=end - 1)) + 1
    found = Recovered(Entries(num_places, shape), base, end, header.last, junk_end)
    report = found.report
    report.num_pages = end - shape.first_page
    report.torn_pages = int(np.count_nonzero(valid[end:]))
    if end < len(valid):
        half = unpack(shape, read_pages(file, shape, end, 1))
        report.torn_pages += int(half["generation"][0] == header.seal.generation)
    first_words = np.zeros(num_places, dtype=np.uint64)
    beyond = _replay(file, valid[:end], shape, found.entries, first_words, reset)
    report.blocks_beyond = beyond
    _leave_out_doubtful(file, header, shape, valid, found)
    _leave_out_doubled(file, shape, first_words, found)
    report.num_blocks = int(np.count_nonzero(found.entries.present))
    report.seconds = time.monotonic() - began
    if end > max(header.copied_end, shape.first_page):
        last = unpack(shape, read_pages(file, shape, end - 1, 1))
        found.before = last_places(last) if valid[end - 1] else NO_PLACES
    return found


def read_live(
    file: DiskFile, shape: Shape, entries: Entries, end: int
) -> Iterator[tuple[Keys, SlotArray, Proofs]]:
    """Yield keys, places and proofs of all blocks there are, in the order written, in pieces."""
    for first in range(shape.first_page, end, CHUNK_PAGES):
        raw = read_pages(file, shape, first, min(CHUNK_PAGES, end - first))
        # Records of bad pages are the newest of no place.
        records, numbers, places = _records_of(shape, unpack(shape, raw), first)
        live = entries.live(places, numbers)
        live[live] = entries.present[places[live]]
        records = records[live]
        yield Keys(np.ascontiguousarray(records["key"])), places[live], records["proof"].copy()


def read_pages(file: DiskFile, shape: Shape, first: int, count: int) -> bytes:
    """Return ``count`` pages; what the medium does not give is zero, and so is no valid page."""
    size = shape.page_bytes
    try:
        return read_whole(file, first * size, count * size).ljust(count * size, b"\0")
    except OSError:
        if count == 1:
            return bytes(size)
        return b"".join(read_pages(file, shape, first + at, 1) for at in range(count))


def _scan(file: DiskFile, header: Header, shape: Shape) -> tuple[Flags, int]:
    """Which pages are valid, and before which all were on the medium once."""
    num_pages = file.num_bytes // shape.page_bytes
    valid = np.zeros(num_pages, dtype=bool)
    base = min(max(header.copied_end, shape.first_page), num_pages)
    for first in range(shape.first_page, num_pages, CHUNK_PAGES):
        raw = read_pages(file, shape, first, min(CHUNK_PAGES, num_pages - first))
        right = valid_pages(shape, header.seal, raw, first)
        valid[first : first + len(right)] = right
        base = max(base, int(unpack(shape, raw)["base"][right].max(initial=0)))
    return valid, base


def _without(pages: Pages, is_left_out: Flags) -> Pages:
    """These pages, with no record in those that are left out."""
    if is_left_out.any():
        pages = pages.copy()
        pages["count"][is_left_out] = 0
    return pages


def _replay(
    file: DiskFile, valid: Flags, shape: Shape, entries: Entries, first_words: Words, reset: int
) -> int:
    """Enter every record of pages that count in its turn; return how many are beyond all places."""
    beyond = 0
    for first in range(shape.first_page, len(valid), CHUNK_PAGES):
        right = valid[first : first + CHUNK_PAGES]
        pages = unpack(shape, read_pages(file, shape, first, len(right)))
        pages = _without(pages, ~right | (pages["reset"] != reset))
        records, numbers, places = _records_of(shape, pages, first)
        lost = (records["place"] & LOST) != 0
        here = places < len(entries)
        if not here.all():
            beyond += int(np.count_nonzero(~here & ~lost))
            records, numbers, places, lost = records[here], numbers[here], places[here], lost[here]
        # Of a place that is named twice the last assignment stays, which is the newest record.
        entries.newest[places] = numbers
        entries.present[places] = ~lost
        entries.proofs[places] = records["proof"]
        first_words[places] = records["key"][:, 0]
    return beyond


def _leave_out_doubtful(
    file: DiskFile, header: Header, shape: Shape, valid: Flags, found: Recovered
) -> None:
    """Drop what pages that went bad may have contradicted."""
    bad = np.flatnonzero(~valid[shape.first_page : found.base]) + shape.first_page
    found.report.bad_pages = len(bad)
    is_repeated = np.append(valid, False)[bad + 1] | (bad + 1 == header.copied_end)
    for number in bad[~is_repeated][-1:].tolist():  # the page after it is bad too
        found.leave_out(np.arange(len(found.entries)), number * shape.per_page)
        bad = bad[bad > number]
    for number in bad.tolist():
        if number + 1 == header.copied_end:
            named = header.last
        else:
            after = unpack(shape, read_pages(file, shape, number + 1, 1))[0]
            named = after["before"][: int(after["count_before"])]
        found.leave_out((named & PLACE).astype(np.int64), number * shape.per_page)


def _leave_out_doubled(file: DiskFile, shape: Shape, first_words: Words, found: Recovered) -> None:
    """Of a key that is at several places keep the one written last."""
    entries = found.entries
    words = first_words[entries.present]
    words.sort()
    twice = words[1:][words[1:] == words[:-1]]
    del words
    if not len(twice):
        return
    # Sharing a first word is rare and proves nothing: keys that do are compared whole.
    asked = entries.present & np.isin(first_words, twice)
    parts = [
        (keys.array[asked[places]], places[asked[places]])
        for keys, places, _ in read_live(file, shape, entries, found.end)
    ]
    keys = np.concatenate([part[0] for part in parts])
    places = np.concatenate([part[1] for part in parts])
    order = np.lexsort((np.arange(len(places)), *keys.T))
    keys, places = keys[order], places[order]
    found.doubled = places[:-1][(keys[1:] == keys[:-1]).all(axis=1)]
    found.report.doubled_blocks = len(found.doubled)
    entries.present[found.doubled] = False


def newest_header(
    files: Sequence[DiskFile], shape: Shape, store_id: bytes
) -> tuple[DiskFile, Header] | None:
    """Return the file with the journal that counts, and its header. Only reads.

    After a crash between the two halves of a switch both files have one; the newer one counts.
    """
    found = [(file, read_header(file, shape, store_id)) for file in files]
    there = [(file, header) for file, header in found if header is not None]
    return max(there, key=lambda each: each[1].seal.generation, default=None)


def find_journal(
    files: tuple[DiskFile, DiskFile], shape: Shape, store_id: bytes, num_places: int, reset: int = 0
) -> tuple[PageWriter, Recovered]:
    """Return the journal, ready for the next commit, and what it says; a new one if there is none.

    Leaves exactly one header, and nothing behind the journal's end that could be taken for more.
    """
    newest = newest_header(files, shape, store_id)
    if newest is None:
        is_new = not any(any(read_whole(file, 0, HEADER_BYTES)) for file in files)
        for file in files:
            erase_header(file)
        pages = PageWriter.begin(files[0], shape, 1)
        pages.declare(store_id)
        found = Recovered(Entries(num_places, shape), pages.end, pages.end, NO_PLACES, pages.end)
        if not is_new:
            found.report.words = "no journal could be read: everything is left out"
        return pages, found
    file, header = newest
    found = recover(file, header, shape, num_places, reset)
    # A killed process may leave in the page cache what never reached the medium, and after a failed
    # sync the kernel would not write it any more. What is believed here is written again.
    size = shape.page_bytes
    tail = read_whole(file, found.base * size, (found.end - found.base) * size)
    write_whole(file, found.base * size, tail + bytes((found.junk_end - found.end) * size))
    write_header(file, header, shape, store_id)
    for other in files:
        if other is not file:
            erase_header(other)
    return PageWriter(file, shape, header.seal, found.end, found.before), found


# -- compaction -----------------------------------------------------------------------------------


class Compaction:
    """Copies the live records of ``source`` to ``target``, a step at a time, between commits.

    The copy follows the source from its first page and takes the records that are live when it
    reaches them. Meanwhile the source grows; the copy ends when it has caught up. A record that it
    took may be contradicted later in the source: what contradicts it is copied too, because it
    comes behind. Order is kept, so the newest stays the newest. The target counts for nothing
    until its header is written.
    """

    def __init__(self, source: PageWriter, target: PageWriter, entries: Entries) -> None:
        self.source = source
        self.target = target
        self.entries = entries
        self._next = source.shape.first_page
        self._began_at = source.end * source.shape.per_page
        self._newest = np.zeros(len(entries), dtype=np.uint32)

    @property
    def has_caught_up(self) -> bool:
        """Whether no page of the source is left to copy."""
        return self._next == self.source.end

    def step(self, num_pages: int) -> None:
        """Follow so many pages of the source, and write what is live in them."""
        shape = self.source.shape
        count = min(num_pages, self.source.end - self._next)
        raw = read_pages(self.source.file, shape, self._next, count)
        bad = ~valid_pages(shape, self.source.seal, raw, self._next)  # not to be sealed anew
        if bad.any():
            number = self._next + int(np.flatnonzero(bad)[-1])
            if number * shape.per_page >= self._began_at:
                # It may contradict what was copied before: a copy begun now would not have that.
                raise OSError(errno.EIO, f"page {number} of the journal has gone bad")
        pages = _without(unpack(shape, raw), bad)
        records, numbers, places = _records_of(shape, pages, self._next)
        live = self.entries.live(places, numbers)
        # Lost before the copy began: what such a record contradicts was never copied.
        live &= ~(((records["place"] & LOST) != 0) & (numbers < self._began_at))
        self._next += count
        if live.any():
            first = self.target.write(records[live])
            # Records fill pages from the first on: they are numbered without a gap.
            self._newest[places[live]] = first + np.arange(np.count_nonzero(live), dtype=np.uint32)

    def finish(self) -> npt.NDArray[np.uint32]:
        """Sync; return the newest record of every place, in the target."""
        self.target.file.sync()
        return self._newest


class DiskJournal:
    """The index of one store on disk. Owns both files and what is known of every place.

    Recording may happen in any thread and never waits for the medium; ``commit`` and ``close`` are
    called by one thread at a time, and do wait. ``proofs`` (one row per place) and ``present``
    (which places hold a block that may be read now) are for all threads to read.
    """

    def __init__(
        self,
        files: tuple[DiskFile, DiskFile],
        state: DiskFile,
        store_id: bytes,
        num_places: int,
        shape: Shape,
        reset_number: int | None = None,
        is_kept: bool = True,
    ) -> None:
        """Recover from ``files``, each at least ``journal_bytes`` long; JournalError if not.

        The reset number is that of the file ``state``. An engine that had the store open before
        gives the ``reset_number`` that it knows: where that is older, nothing counts, and nothing
        that is recorded under it will.
        """
        if not 0 < num_places < MAX_PLACES:
            raise InputError(f"a store has 1 to {MAX_PLACES - 1} places, not {num_places}")
        self.shape = shape
        self._files = files
        self._store_id = store_id
        self._slack = slack_pages(shape, num_places)
        self._lock = threading.Lock()  # the queue, and what is present; never held while waiting
        self._queue: list[tuple[int, Records]] = []  # each with its turn among all calls
        self._num_recorded = 0
        self._reset: tuple[int, bool] | None = None  # to take from the queue
        self._reset_due: tuple[int, bool] | None = (
            None  # taken from the queue, and not yet on the medium
        )
        self._state = state
        self._unsaved: Records = np.empty(0, dtype=shape.record)
        self._to_erase: list[DiskFile] = []
        self._compaction: Compaction | None = None
        self._is_sealed = False
        self._is_closed = False
        self._trouble = ""
        needed = journal_bytes(shape, num_places)
        for file in files:
            if file.num_bytes < needed:
                raise JournalError(
                    f"a journal of {file.num_bytes} bytes is too short for {num_places} places: "
                    f"it needs {needed}"
                )
        try:
            known, is_damaged = self._read_reset()
            self.reset_number = known if reset_number is None else reset_number
            """Under which number blocks are recorded now."""
            counts = known if self.reset_number == known else NOT_KEPT - 1
            self._pages, found = find_journal(files, shape, store_id, num_places, counts)
            self._pages.reset = self.reset_number if is_kept else NOT_KEPT
            if is_damaged:
                found.report.words = "its reset number was damaged: everything is left out"
            self._entries = found.entries
            self.present, self.proofs = found.entries.present, found.entries.proofs
            self.report = found.report
            is_untidy = found.report.bad_pages or found.report.blocks_beyond
            if is_untidy or found.end * shape.page_bytes > needed:
                self._compact(None)
            if len(found.doubled):
                self.record_lost(found.doubled)
        except OSError as error:
            raise JournalError(f"the journal cannot be opened: {error}") from error

    def _read_reset(self) -> tuple[int, bool]:
        """Return the store's reset number, and whether it was damaged and so had to be drawn."""
        known = read_reset(self._state)
        is_damaged = known is None
        if known is None:  # less than any that a clock gives: other drives keep their blocks
            known = randbits(32) + 1
        if known:  # after a failed sync a kernel may show what it will never write
            write_reset(self._state, known)
        return known, is_damaged

    @classmethod
    def open(
        cls,
        folder: Path,
        store_id: bytes,
        num_places: int,
        proof_bytes: int,
        reset_number: int | None = None,
        is_kept: bool = True,
    ) -> DiskJournal:
        """Open the journal in ``folder``, whose files are there and long enough."""
        with ExitStack() as undo:
            try:
                files = []
                for name in (*FILE_NAMES, STATE_NAME):
                    files.append(DiskFile(folder / name))
                    undo.callback(files[-1].close)
                first, second, state = files
                shape = Shape(proof_bytes)
                known = (reset_number, is_kept)
                journal = cls((first, second), state, store_id, num_places, shape, *known)
            except OSError as error:
                raise JournalError(f"{folder}: the journal cannot be opened: {error}") from error
            undo.pop_all()
            return journal

    @property
    def num_blocks(self) -> int:
        """How many places hold a block that may be read now."""
        return int(np.count_nonzero(self.present))

    @property
    def num_recorded(self) -> int:
        """How many records calls were made so far: a point in their order, for ``commit``."""
        with self._lock:
            return self._num_recorded

    @property
    def num_journal_bytes(self) -> int:
        """How far the journal has grown; it is compacted before its file is full."""
        return self._pages.end * self.shape.page_bytes

    @property
    def is_compacting(self) -> bool:
        """Whether a commit soon would have something to do though nothing was recorded."""
        return self._compaction is not None

    def pieces(self) -> Iterator[tuple[Keys, SlotArray, Proofs]]:
        """Yield keys, places and proofs of all committed blocks, in the order written, in pieces.

        Only right after opening: a commit in between would change what is read.
        """
        return read_live(self._pages.file, self.shape, self._entries, self._pages.end)

    # -- recording --------------------------------------------------------------------------------

    def record_written(self, places: SlotArray, keys: Keys, proofs: Proofs) -> None:
        """These blocks lie at these places now and can be read; their bytes are on their way.

        Their bytes must be on the medium before the commit that makes them durable.
        """
        if not len(places) == len(keys) == len(proofs):
            raise InputError(f"{len(places)} places, {len(keys)} keys and {len(proofs)} proofs")
        self._require_places(places)
        records = np.zeros(len(places), dtype=self.shape.record)
        records["place"] = places
        records["key"] = keys.array
        records["proof"] = proofs
        with self._lock:
            self._enqueue(records)
            self.proofs[places] = proofs
            self.present[places] = True

    def record_lost(self, places: SlotArray) -> None:
        """What lay at these places can be read no more."""
        self._require_places(places)
        records = np.zeros(len(places), dtype=self.shape.record)
        records["place"] = places
        records["place"] |= LOST
        with self._lock:
            self._enqueue(records)
            self.present[places] = False

    def reset(self, number: int, *, is_kept: bool = True) -> None:
        """Everything recorded so far is gone. The next commit makes that durable.

        What is recorded from now on has this number; unless ``is_kept`` no other process finds it.
        """
        with self._lock:
            self._queue.clear()
            self._num_recorded += 1
            # After the clock was put back the number must still be one of its own.
            self.reset_number = max(number, self.reset_number + 1)
            self._reset = (self.reset_number, is_kept)
            self.present.fill(False)

    def _enqueue(self, records: Records) -> None:
        self._num_recorded += 1
        self._queue.append((self._num_recorded, records))

    def _require_places(self, places: SlotArray) -> None:
        if self._is_closed:
            raise ClosedError("the journal is closed")
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self.present):
            raise InputError(
                f"there are places 0 to {len(self.present) - 1}, got {int(places.min())} to "
                f"{int(places.max())}"
            )

    # -- committing -------------------------------------------------------------------------------

    def commit(self, num_recorded: int | None = None) -> None:
        """Put everything recorded before this call on the medium.

        With ``num_recorded``, as it was at some moment: only what was recorded before that moment,
        whose bytes are on the medium already. (A reset that came later holds all the same.)

        Raises JournalError if that failed: nothing recorded since the last good commit is durable,
        all of it is kept, and the next commit tries again. With nothing recorded since the last
        commit, it marks that one as complete, once: damage to it can later be told from a crash.
        """
        if self._is_closed:
            raise ClosedError("the journal is closed")
        self._save(num_recorded)
        self._compact_some()

    def close(self) -> None:
        """Commit, mark that as complete, and give the files back. Safe to call twice.

        Raises JournalError if the commit failed; the files are given back all the same.
        """
        if self._is_closed:
            return
        try:
            self._save()
            self._save()
        finally:
            self._is_closed = True
            for file in (*self._files, self._state):
                file.close()

    def _save(self, num_recorded: int | None = None) -> None:
        with self._lock:
            upto = self._num_recorded if num_recorded is None else num_recorded
            reset, self._reset = self._reset, None
            queued = [records for turn, records in self._queue if turn <= upto]
            self._queue = self._queue[len(queued) :]
        if reset is not None:  # whatever waited was recorded before
            self._unsaved = self._unsaved[:0]
            self._reset_due = reset
        self._unsaved = np.concatenate((self._unsaved, *queued))
        try:
            self._erase_stale()
            if self._reset_due is not None:
                self._begin_number(*self._reset_due)
            self._append_unsaved()
        except OSError as error:
            raise JournalError(
                f"the journal could not be written: {error}; {len(self._unsaved)} records wait"
            ) from error

    def _append_unsaved(self) -> None:
        """Append what waits, in as many pieces as there is room for."""
        while len(self._unsaved) or not self._is_sealed:
            if self._pages.num_pages_free < 1:
                self._compact(None)
                continue
            count = min(len(self._unsaved), self._pages.num_pages_free * self.shape.per_page)
            records = self._unsaved[:count]
            first = self._pages.append(records)
            places = (records["place"] & ~LOST).astype(np.int64)
            self._entries.newest[places] = first + np.arange(count, dtype=np.uint32)
            self._unsaved = self._unsaved[count:]
            self._is_sealed = not count
            if not len(self._unsaved):
                return  # the next commit seals this one

    def _begin_number(self, number: int, is_kept: bool) -> None:
        """Leave what was recorded before behind; it was recorded under another number."""
        # Before any page of the new number: with one there the older pages must not count.
        raise_reset(self._state, number)
        self._compaction = None
        self._entries.newest.fill(0)
        self._pages.reset = number if is_kept else NOT_KEPT
        self._reset_due = None

    @property
    def _other(self) -> DiskFile:
        first, second = self._files
        return second if self._pages.file is first else first

    # -- compacting -------------------------------------------------------------------------------

    def _compact_some(self) -> None:
        """Take a step of a compaction, if one is due. Its failure does not fail the commit."""
        if self._compaction is None and self._pages.num_pages_free >= self._slack // 2:
            return
        try:
            self._compact(COPY_PAGES)
            self._trouble = ""
        except OSError as error:
            if self._trouble != str(error):
                log.warning("the journal could not be compacted: %s", error)
            self._trouble = str(error)

    def _compact(self, num_pages: int | None) -> None:
        """Copy so many pages more, or all; switch once the copy has caught up."""
        if self._compaction is None:
            target = PageWriter.begin(self._other, self.shape, self._pages.seal.generation + 1)
            target.reset = self._pages.reset
            self._compaction = Compaction(self._pages, target, self._entries)
        compaction = self._compaction
        try:
            compaction.step(num_pages or COPY_PAGES)
            while num_pages is None and not compaction.has_caught_up:
                compaction.step(COPY_PAGES)
            if compaction.has_caught_up:
                self._switch(compaction)
        except OSError:
            self._compaction = None
            raise

    def _switch(self, compaction: Compaction) -> None:
        newest = compaction.finish()
        old = self._pages
        # Whether this header is there is unknown until declare returns: were it there and we went
        # on with the old journal, a crash would bring back a past without what came since.
        self._to_erase = [compaction.target.file]
        compaction.target.declare(self._store_id)
        self._to_erase = [old.file]
        self._pages = compaction.target
        self._entries.newest[:] = newest
        self._compaction = None
        self._is_sealed = True
        self._erase_stale()

    def _erase_stale(self) -> None:
        """Erase the header of the journal that must not be found any more, if there is one."""
        for file in self._to_erase:
            erase_header(file)
        self._to_erase = []
