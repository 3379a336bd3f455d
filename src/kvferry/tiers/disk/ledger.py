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

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import ClosedError, InputError, JournalError
from kvferry.keys import Keys
from kvferry.tiers.disk.compaction import Compaction
from kvferry.tiers.disk.entries import Entries, Proofs
from kvferry.tiers.disk.files import DiskFile, JournalFile
from kvferry.tiers.disk.finding import find_journal
from kvferry.tiers.disk.header import erase_header
from kvferry.tiers.disk.journal import DiskJournal
from kvferry.tiers.disk.pages import LOST, MOST_PLACES, Records, Shape
from kvferry.tiers.disk.recovery import RecoveryReport, read_live
from kvferry.types import SlotArray

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
        """Copy so many pages more, or all; switch once the copy is level with the journal."""
        if self._compaction is None:
            target = DiskJournal.begin(self._other, self.shape, self._journal.seal.generation + 1)
            self._compaction = Compaction(self._journal, target, self._entries)
        compaction = self._compaction
        try:
            compaction.step(num_pages or COPY_PAGES)
            while num_pages is None and not compaction.is_level:
                compaction.step(COPY_PAGES)
            if compaction.is_level:
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
