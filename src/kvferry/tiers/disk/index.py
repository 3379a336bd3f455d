"""The index of a store on disk: a table of pages, two copies each, with the block at each place.

::

    file     page 0, one copy | page 0, other copy | page 1, one copy | page 1, other copy | ...
    page     digest | commit | number | reset number | record | record | ...
    record   turn | key | proof                            the place follows from the position

A commit writes each changed page over the older of its two copies, then syncs. Of the intact copies
of a page, the one with the greater commit number counts, so a commit that was cut short loses
nothing older. The next commit begins only after this one is on the medium.

A page counts only if it has the current reset number. So after a reset all older pages count as
empty, and stay on disk until they are overwritten.

The table need not be right about a place: a block that does not match its proof is a miss. So
damage to the newer copy of a page brings back an older state, and never wrong bytes.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.errors import StoreError
from kvferry.tiers.disk.files import DIGEST_BYTES, DiskFile, read_whole, runs, write_whole
from kvferry.tiers.disk.state import FILE_NAME as STATE_NAME
from kvferry.tiers.disk.state import NOT_KEPT, raise_reset, read_reset, write_reset
from kvferry.tiers.disk.superblock import Superblock
from kvferry.types import NO_SLOTS, SlotArray

Pages = npt.NDArray[Any]
Proofs = npt.NDArray[np.uint8]
Records = npt.NDArray[Any]

FILE_NAME = "index"
MAX_PLACES = 1 << 31
_HEAD_BYTES = 64
_CHUNK_PAGES = 512
"""Pages read, checked or written together: 4 MiB with both copies."""
_UNSEEN_COMMITS = 1 << 32
"""Added to the commit number if a page is unreadable: more commits than a store ever makes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a store's records and pages, which follow from the size of its proofs."""

    proof_bytes: int
    page_bytes: int = 4096

    @cached_property
    def record(self) -> np.dtype[Any]:
        return np.dtype(
            [("turn", "<u8"), ("key", "<u8", (KEY_WORDS,)), ("proof", "u1", (self.proof_bytes,))]
        )

    @cached_property
    def per_page(self) -> int:
        """Number of places that one page describes."""
        return (self.page_bytes - _HEAD_BYTES) // self.record.itemsize

    @cached_property
    def page(self) -> np.dtype[Any]:
        fields: dict[str, tuple[Any, int]] = {
            "digest": (f"V{DIGEST_BYTES}", 0),
            "commit": ("<u8", 16),
            "number": ("<u4", 24),
            "reset": ("<u8", 32),
            "records": ((self.record, (self.per_page,)), _HEAD_BYTES),
        }
        return np.dtype(
            {
                "names": list(fields),
                "formats": [each[0] for each in fields.values()],
                "offsets": [each[1] for each in fields.values()],
                "itemsize": self.page_bytes,
            }
        )

    def pages_for(self, num_places: int) -> int:
        return -(-num_places // self.per_page)

    def file_bytes(self, num_places: int) -> int:
        """Return the length of the index file of a store with ``num_places`` places."""
        return 2 * self.page_bytes * self.pages_for(num_places)


def copies_of(pages: Pages, which: SlotArray) -> Pages:
    """Return the copy ``which`` of each page, with the bytes between its fields."""
    raw = pages.view(np.uint8).reshape(len(pages), 2, -1)
    return raw[np.arange(len(pages)), which].view(pages.dtype)[:, 0]


def num_blocks(records: Records) -> int:
    return int(np.count_nonzero(records["turn"]))


@dataclass
class RecoveryReport:
    """Blocks and pages recovered, and the pages that were skipped."""

    words: str = ""
    """A remark on the recovery; mostly empty."""
    num_blocks: int = 0
    num_pages: int = 0
    torn_pages: int = 0
    """Pages with one copy damaged, after a crash or by the medium: the other one counts."""
    bad_pages: int = 0
    """Pages that were written and have no intact copy."""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.num_blocks} blocks from {self.num_pages} pages in {self.seconds:.2f} s"]
        if self.torn_pages:
            parts.append(f"one copy of {self.torn_pages} pages was not whole")
        if self.bad_pages:
            parts.append(f"{self.bad_pages} pages had gone bad, their blocks were left out")
        return "; ".join([*parts, self.words] if self.words else parts)


class PageTable:
    """The pages of one index file. Owns the file; leaves the order of commits to ``DiskIndex``."""

    def __init__(self, file: DiskFile, store_id: bytes, num_places: int, shape: Shape) -> None:
        self.file = file
        self.shape = shape
        self.num_places = num_places
        self._digest = blake2b(digest_size=DIGEST_BYTES, key=store_id, person=b"kvferry.page")

    def read(self, numbers: SlotArray) -> tuple[Pages, npt.NDArray[np.uint64]]:
        """Return both copies of these ascending pages, and their commit numbers: 0 if damaged.

        Bytes that the medium does not return read as ones, and so count as damaged.
        """
        size = self.shape.page_bytes
        raw = bytearray(2 * size * len(numbers))
        for first, last in runs(numbers):
            at = 2 * size * first
            self._fill(2 * size * int(numbers[first]), memoryview(raw)[at : 2 * size * last])
        pages = np.frombuffer(raw, dtype=self.shape.page).reshape(len(numbers), 2)
        commits = np.where(pages["number"] == numbers[:, None], pages["commit"], 0)
        for at in np.flatnonzero(commits).tolist():
            page = memoryview(raw)[at * size : (at + 1) * size]
            if self._seal(page) != page[:DIGEST_BYTES]:
                commits.ravel()[at] = 0
        return pages, commits

    def _fill(self, offset: int, out: memoryview) -> None:
        size = self.shape.page_bytes
        try:
            data = read_whole(self.file, offset, len(out))
            out[: len(data)] = data
        except OSError:
            if len(out) == size:
                out[:] = b"\xff" * size
                return
            for at in range(0, len(out), size):
                self._fill(offset + at, out[at : at + size])

    def write(self, numbers: SlotArray, copies: SlotArray, pages: Pages) -> None:
        """Seal and write one copy of each of these pages; on the medium after a sync."""
        size = self.shape.page_bytes
        raw = bytearray(pages.tobytes())
        for at, (number, copy) in enumerate(zip(numbers.tolist(), copies.tolist(), strict=True)):
            page = memoryview(raw)[at * size : (at + 1) * size]
            page[:DIGEST_BYTES] = self._seal(page)
            write_whole(self.file, (2 * number + copy) * size, page)

    def _seal(self, page: memoryview) -> bytes:
        digest = self._digest.copy()
        digest.update(page[DIGEST_BYTES:])
        return digest.digest()

    def recover(self, reset: int) -> tuple[Records, npt.NDArray[np.uint64], RecoveryReport]:
        """Return the records that count under this reset number, one per place, and a report.

        With them comes each page's last commit, 0 if it has no intact copy. Changes nothing.
        """
        began, shape, report = time.monotonic(), self.shape, RecoveryReport()
        num_pages = shape.pages_for(self.num_places)
        records = np.zeros((num_pages, shape.per_page), dtype=shape.record)
        newest = np.zeros(num_pages, dtype=np.uint64)
        for first in range(0, num_pages, _CHUNK_PAGES):
            numbers = np.arange(first, min(first + _CHUNK_PAGES, num_pages))
            pages, commits = self.read(numbers)
            found = pages[np.arange(len(pages)), commits.argmax(axis=1)]
            is_whole = commits.any(axis=1)
            counts = is_whole & (found["reset"] == reset)
            records[numbers[counts]] = found["records"][counts]
            newest[numbers] = commits.max(axis=1)
            written = pages.view(np.uint8).reshape(len(pages), 2, -1).any(axis=2)
            is_torn = (written & (commits == 0)).any(axis=1)
            report.torn_pages += int(np.count_nonzero(is_torn & is_whole))
            report.bad_pages += int(np.count_nonzero(is_torn & ~is_whole))
        # After a store was shrunk, its last page may describe places that are gone.
        records = records.ravel()[: self.num_places]
        report.num_pages = int(np.count_nonzero(newest))
        report.num_blocks = num_blocks(records)
        report.seconds = time.monotonic() - began
        return records, newest, report


class DiskIndex:
    """The index of one store on disk. Owns its files and the state of every place.

    Any thread may record changes, which never waits for the medium. ``commit`` and ``close`` do
    wait, and are called by one thread at a time. Any thread may read ``proofs`` (one row per place)
    and ``present`` (which places hold a readable block). Keys are on the medium alone.
    """

    def __init__(
        self,
        file: DiskFile,
        state: DiskFile,
        store_id: bytes,
        num_places: int,
        shape: Shape,
        reset_number: int | None = None,
        is_kept: bool = True,
    ) -> None:
        """Recover from ``file``. Raises StoreError.

        The reset number is that of the file ``state``. An engine that had the store open before
        gives the ``reset_number`` that it knows. If that one is older, no block counts, and no
        block recorded under it will.
        """
        self._table = PageTable(file, store_id, num_places, shape)
        self._state = state
        self._lock = threading.Lock()  # guards the queue and ``present``; never held during I/O
        self._queue: list[tuple[int, SlotArray, Records]] = []
        """Changes not durable yet: ``num_recorded`` after each, its places, its records."""
        self._reset_due: tuple[int, bool] | None = None
        self.num_pending = 0
        """Number of blocks that are written and not durable yet."""
        self.is_failed = False
        """Whether a commit failed: then this object makes nothing durable any more."""
        self._is_closed = False
        try:
            known, is_damaged = self._read_reset()
            self.reset_number = known if reset_number is None else reset_number
            """The reset number under which blocks are recorded now."""
            self._page_reset = self.reset_number if is_kept else NOT_KEPT
            counts = known if self.reset_number == known else NOT_KEPT - 1
            records, commits, self.report = self._table.recover(counts)
            last = int(commits.max(initial=0))
            self._commit = last + (_UNSEEN_COMMITS if self.report.bad_pages else 0)
            """Number of the last commit. Copies with a later one may not be on the medium: none
            counts."""
            self.num_recorded = int(records["turn"].max(initial=0))
            """Number of blocks recorded so far: a point in their order, for ``commit``."""
            self.present, self.proofs = records["turn"] > 0, records["proof"].copy()
            self._recovered: Records = records
            if is_damaged:
                self.report.words = "its reset number was damaged: everything is left out"
            self._write_again(np.flatnonzero(commits == last) if last else NO_SLOTS)
        except OSError as error:
            raise StoreError(f"the index cannot be opened: {error}") from error

    def _read_reset(self) -> tuple[int, bool]:
        """Return the store's reset number, and whether a damaged one was replaced at random."""
        with self._state.locked():  # the scheduler's child may write a greater one
            known = read_reset(self._state)
            is_damaged = known is None
            if known is None:  # smaller than any from a clock, so other drives keep their blocks
                known = randbits(32) + 1
            if known:  # after a failed sync the page cache may show what is not on the medium
                write_reset(self._state, known)
            return known, is_damaged

    def _write_again(self, numbers: SlotArray) -> None:
        """Rewrite the pages of the last commit as they were found.

        A killed process may leave in the page cache what never reached the medium, and after a
        failed sync the kernel would not write it any more.
        """
        if not len(numbers):
            return
        for start in range(0, len(numbers), _CHUNK_PAGES):
            some = numbers[start : start + _CHUNK_PAGES]
            pages, commits = self._table.read(some)
            newest = commits.argmax(axis=1)
            self._table.write(some, newest, copies_of(pages, newest))
        self._table.file.sync()

    @classmethod
    def open(
        cls,
        folder: Path,
        store: Superblock,
        reset_number: int | None = None,
        is_kept: bool = True,
    ) -> DiskIndex:
        """Open the index in ``folder``; its files must exist and be long enough."""
        with ExitStack() as undo:
            try:
                file, state = (
                    undo.enter_context(closing(DiskFile(folder / name)))
                    for name in (FILE_NAME, STATE_NAME)
                )
            except OSError as error:
                raise StoreError(f"{folder}: the index cannot be opened: {error}") from error
            known = store.num_places, Shape(store.identity.proof_bytes), reset_number, is_kept
            index = cls(file, state, store.store_id, *known)
            undo.pop_all()
            return index

    @property
    def num_blocks(self) -> int:
        """Number of places that hold a readable block."""
        return int(np.count_nonzero(self.present))

    def take_recovered(self) -> tuple[Keys, SlotArray]:
        """Return keys and places of all recovered blocks in the order written; only once."""
        records, self._recovered = self._recovered, self._recovered[:0].copy()
        places = np.flatnonzero(records["turn"])
        places = places[np.argsort(records["turn"][places])]
        return Keys(np.ascontiguousarray(records["key"][places])), places

    # -- recording --------------------------------------------------------------------------------

    def record_written(self, places: SlotArray, keys: Keys, proofs: Proofs) -> None:
        """Record blocks as readable at these places; a later commit makes them durable.

        Their bytes must be on the medium before that commit.
        """
        records = np.zeros(len(places), dtype=self._table.shape.record)
        records["key"] = keys.array
        records["proof"] = proofs
        with self._lock:
            records["turn"] = self.num_recorded + 1 + np.arange(len(places), dtype=np.uint64)
            self._enqueue(places, records)
            self.num_pending += len(places)
            self.proofs[places] = proofs
            self.present[places] = True

    def record_lost(self, places: SlotArray) -> None:
        with self._lock:
            self._enqueue(places, np.zeros(len(places), dtype=self._table.shape.record))
            self.present[places] = False

    def reset(self, number: int, *, is_kept: bool = True) -> None:
        """Drop everything recorded so far. The next commit makes that durable.

        Blocks recorded from now on have this number; unless ``is_kept`` no other process finds
        them.
        """
        with self._lock:
            self._keep([])
            # The number must grow even if the clock was put back.
            self.reset_number = max(number, self.reset_number + 1)
            self._reset_due = (self.reset_number, is_kept)
            self.present.fill(False)

    def _enqueue(self, places: SlotArray, records: Records) -> None:
        self.num_recorded += len(places)
        self._queue.append((self.num_recorded, places, records))

    def _keep(self, queue: list[tuple[int, SlotArray, Records]]) -> None:
        self._queue = queue
        self.num_pending = sum(num_blocks(records) for _, _, records in queue)

    # -- committing -------------------------------------------------------------------------------

    def commit(self, num_recorded: int | None = None) -> None:
        """Make everything recorded before this call durable.

        With ``num_recorded``, a former value of that attribute: only blocks recorded by then, whose
        bytes are on the medium already. (A later reset is committed all the same.)

        Raises StoreError if that failed: nothing recorded since the last good commit is durable.
        The files may now show bytes that are not on the medium, so no commit may follow.
        """
        with self._lock:
            upto = self.num_recorded if num_recorded is None else num_recorded
            due, some = self._reset_due, [each for each in self._queue if each[0] <= upto]
        try:
            if due is not None:
                # First the number, then pages with it: older pages must not count beside them.
                raise_reset(self._state, due[0])
                self._page_reset = due[0] if due[1] else NOT_KEPT
            if some:
                places = np.concatenate([each[1] for each in some])
                self._write(places, np.concatenate([each[2] for each in some]))
        except OSError as error:
            raise StoreError(
                f"the index could not be written: {error}; {self.num_pending} blocks wait"
            ) from error
        with self._lock:
            if self._reset_due is due:
                self._reset_due = None
            self._keep([each for each in self._queue if each[0] > upto])

    def _write(self, places: SlotArray, records: Records) -> None:
        numbers = places // self._table.shape.per_page
        touched = np.unique(numbers)
        for start in range(0, len(touched), _CHUNK_PAGES):
            some = touched[start : start + _CHUNK_PAGES]
            mine = (some[0] <= numbers) & (numbers <= some[-1])
            self._write_pages(some, numbers[mine], places[mine], records[mine])
        self._table.file.sync()
        self._commit += 1

    def _write_pages(
        self, some: SlotArray, numbers: SlotArray, places: SlotArray, records: Records
    ) -> None:
        """Apply these records to these pages, and write them over their older copies."""
        pages, commits = self._table.read(some)
        commits[commits > self._commit] = 0
        newest = commits.argmax(axis=1)
        changed = copies_of(pages, newest)
        is_stale = ~commits.any(axis=1) | (changed["reset"] != self._page_reset)
        changed.view(np.uint8).reshape(len(some), -1)[is_stale] = 0
        row = np.searchsorted(some, numbers)
        # Of two records of one place the last assignment stays, which is the newest.
        changed["records"][row, places % self._table.shape.per_page] = records
        changed["commit"], changed["number"] = self._commit + 1, some
        changed["reset"] = self._page_reset
        self._table.write(some, 1 - newest, changed)

    def close(self) -> None:
        """Commit unless a commit failed before, and close the files. Safe to call twice.

        Raises StoreError if this commit failed; the files are closed all the same.
        """
        if self._is_closed:
            return
        try:
            if not self.is_failed:
                self.commit()
        finally:
            self._is_closed = True
            self._table.file.close()
            self._state.close()
