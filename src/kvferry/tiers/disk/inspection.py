"""For people who look after stores: what there is, whether it is sound, and its end.

::

    list_stores   whose, how large, how full, last used, open in which process
    verify_store  every block read and held against its proof, with the store locked
    purge_store   gone, as far as a file system can promise it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys
from kvferry.errors import StoreError
from kvferry.tiers.disk.blocks import BlockFile, Buffer, key_check, open_prover
from kvferry.tiers.disk.folder import (
    BLOCKS_NAME,
    StoreFolder,
    StoreLock,
    alone_in,
    remove_store,
    stores_under,
)
from kvferry.tiers.disk.journal import DiskFile, Header, JournalFile, Seal, Shape
from kvferry.tiers.disk.ledger import (
    FILE_NAMES,
    Proofs,
    RecoveryReport,
    newest_header,
    read_live,
    recover,
)
from kvferry.tiers.disk.superblock import Superblock, is_due, read_superblock
from kvferry.types import SlotArray

_PIECE = 1024  # blocks that a checker is given at once
_LOOKS = 3


@dataclass(frozen=True)
class StoreSummary:
    """A store, for a list. ``num_blocks`` is None where nobody can say."""

    folder: StoreFolder
    num_blocks: int | None


@dataclass(frozen=True, eq=False)
class StoreContent:
    """What a store's journal says, read without changing anything."""

    superblock: Superblock
    blocks_path: Path
    report: RecoveryReport
    pieces: Callable[[], Iterator[tuple[Keys, SlotArray, Proofs]]]
    """Keys, places and proofs of all blocks, in the order written; can be asked again."""
    is_current: Callable[[], bool]
    """Whether this is still the store's journal; it is for ever while nobody has it open."""


class BlockChecker(Protocol):
    """Reads blocks of a store and says which of them match their proofs. Owns what it reads by."""

    def close(self) -> None: ...

    def __call__(self, places: SlotArray, keys: Keys, proofs: Proofs) -> npt.NDArray[np.bool_]: ...


@dataclass
class VerifyReport:
    """What verifying found: how many blocks, and the places of those that are not as written."""

    num_blocks: int
    num_checked: int
    bad_places: list[int]
    recovery: RecoveryReport

    @property
    def is_sound(self) -> bool:
        return not self.bad_places and not self.recovery.bad_pages


def list_stores(root: Path, *, count_blocks: bool = True) -> list[StoreSummary]:
    """All stores under a directory, open ones too. Counting their blocks reads their journals.

    The blocks of a store that is open are those of some moment just now.
    """
    summaries = []
    for folder in stores_under(root):
        num_blocks = None
        if count_blocks and folder.superblock is not None and not folder.trouble:
            num_blocks = _count_blocks(folder)
        summaries.append(StoreSummary(folder, num_blocks))
    return summaries


def _count_blocks(folder: StoreFolder) -> int | None:
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError, StoreError), _content(folder.path) as content:
            # Of a journal that its server replaced while we read it we saw the half of two.
            if content.is_current():
                return content.report.num_blocks
    return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[StoreContent]:
    """A store's content while nobody else can open it; StoreInUseError if somebody has it open."""
    _require_store(path)
    lock = StoreLock.take(path)
    try:
        with _content(path) as content:
            yield content
    finally:
        lock.release()


def verify_store(
    path: Path,
    open_checker: Callable[[StoreContent], BlockChecker],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Hold every block against its proof; changes nothing. ``progress`` is told done and total."""
    with reading(path) as content, contextlib.ExitStack() as undo:
        check = undo.enter_context(contextlib.closing(open_checker(content)))
        total = content.report.num_blocks
        report = VerifyReport(total, 0, [], content.report)
        for keys, places, proofs in content.pieces():
            for start in range(0, len(places), _PIECE):
                part = slice(start, start + _PIECE)
                right = check(places[part], keys[part], proofs[part])
                report.bad_places += places[part][~right].tolist()
                report.num_checked += len(right)
                progress(report.num_checked, total)
    return report


def purge_store(path: Path) -> str:
    """Remove a store that nobody has open; returns what that means, for people.

    StoreInUseError if somebody has it open, StoreError if there is none.
    """
    found = _require_store(path)
    with alone_in(path.parent):
        remove_store(path)
    if found.superblock is not None and found.superblock.identity.is_sealed:
        rest = "its blocks were encrypted: without the key, what a drive may still hold is noise"
    else:
        rest = (
            "its bytes were given back to the file system, not overwritten: an SSD may hold them "
            "until it needs the room. Encrypt (disk_key_file) what must never be read again"
        )
    return f"{path} is gone, {found.num_bytes} bytes; {rest}"


def _require_store(path: Path) -> StoreFolder:
    """The store at ``path``; StoreError where there is nothing that we made."""
    found = next((each for each in stores_under(path.parent) if each.path == path), None)
    if found is None:
        raise StoreError(f"{path} is no store of kvferry; kvferry disk ls shows which there are")
    return found


@contextlib.contextmanager
def _content(path: Path) -> Iterator[StoreContent]:
    superblock = read_superblock(path)
    if superblock is None:
        raise StoreError(f"{path} was never finished, and holds nothing")
    shape = Shape(superblock.identity.proof_bytes)
    with contextlib.ExitStack() as undo:
        files = []
        for name in FILE_NAMES:
            files.append(DiskFile(path / name, writable=False))
            undo.callback(files[-1].close)
        newest = newest_header(files, shape, superblock.store_id)
        is_forgotten = is_due(path)
        if newest is None or is_forgotten:
            words = "no journal could be read"
            yield StoreContent(
                superblock,
                path / BLOCKS_NAME,
                RecoveryReport(words="told to forget everything" if is_forgotten else words),
                lambda: iter(()),
                lambda: is_due(path) or newest_header(files, shape, superblock.store_id) is None,
            )
            return
        file, header = newest
        found = recover(file, header, shape, superblock.num_places)
        yield StoreContent(
            superblock,
            path / BLOCKS_NAME,
            found.report,
            lambda: read_live(file, shape, found.entries, found.end),
            lambda: _seal(newest_header(files, shape, superblock.store_id)) == header.seal,
        )


def _seal(newest: tuple[JournalFile, Header] | None) -> Seal | None:
    return None if newest is None else newest[1].seal


# ------------------------------------------------------------------------------------------------
# Reads the blocks of a store that nobody has open, and holds them against their proofs.

_BUFFER_BYTES = 32 << 20


class FileChecker:
    """Checks blocks of one store, some megabytes at a time. Owns the file and a buffer."""

    def __init__(self, content: StoreContent, key: bytes | None) -> None:
        """StoreError where the key is missing or another one."""
        superblock, mine = content.superblock, content.superblock.identity
        if mine.is_sealed and key is None:
            raise StoreError(
                "it is encrypted: name the key, by disk_key_file or KVFERRY_DISK_KEY, to verify it"
            )
        key = key if mine.is_sealed else None
        if key is not None and key_check(key, superblock.store_id) != superblock.key_check:
            raise StoreError("it is encrypted with another key than the one given")
        self._prover = open_prover(mine.block_bytes, superblock.store_id, key)
        self._most = max(1, _BUFFER_BYTES // mine.pitch)
        self._buffer = Buffer(self._most, mine.pitch, is_sealed=mine.is_sealed)
        self._pitch = mine.pitch
        self._file = BlockFile(str(content.blocks_path), mine.pitch)

    def __call__(self, places: SlotArray, keys: Keys, proofs: Proofs) -> npt.NDArray[np.bool_]:
        """Which of these blocks are as they were written; what cannot be read is not."""
        order = np.argsort(places, kind="stable")
        right = np.zeros(len(places), dtype=bool)
        for start in range(0, len(order), self._most):
            part = order[start : start + self._most]
            read = self._read(places[part])
            found = self._prover.check(self._buffer, places[part], keys.array[part], proofs[part])
            right[part] = found & read
        return right

    def _read(self, places: SlotArray) -> npt.NDArray[np.bool_]:
        """Bring ascending places into the buffer, side by side; neighbours by one call."""
        done = np.zeros(len(places), dtype=bool)
        ends = np.flatnonzero(np.diff(places, append=places[-1:] + 2) != 1) + 1
        first = 0
        for end in ends.tolist():
            data = self._buffer.stored[first * self._pitch : end * self._pitch]
            try:
                self._file.read(int(places[first]), data)
                done[first:end] = True
            except OSError:
                for at in range(first, end):
                    done[at] = self._read_one(int(places[at]), at)
            first = end
        return done

    def _read_one(self, place: int, at: int) -> bool:
        try:
            self._file.read(place, self._buffer.stored[at * self._pitch : (at + 1) * self._pitch])
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._file.close()


def checker_of(key: bytes | None) -> Callable[[StoreContent], FileChecker]:
    """For ``verify_store``: opens checkers with this key."""
    return lambda content: FileChecker(content, key)
