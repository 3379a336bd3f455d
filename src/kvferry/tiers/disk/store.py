"""A store on disk, opened whole: for a server that uses it, or for inspection.

::

    Store.open      locked, brought to its size, its index recovered: for one drive process
    list_stores     whose, how large, how full, last used, open in which process
    verify_store    every block read and compared with its proof, with the store locked
    purge_store     removed, as far as a file system can promise it
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.lifecycle import Closing
from kvferry.errors import StoreError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk import quota, state
from kvferry.tiers.disk import superblock as sb
from kvferry.tiers.disk.block_file import BlockFile, Buffer, Prover, key_check, open_prover
from kvferry.tiers.disk.files import DiskFile, allocate, create_file, sync_folder
from kvferry.tiers.disk.index import FILE_NAME as INDEX_NAME
from kvferry.tiers.disk.index import (
    DiskIndex,
    PageTable,
    Proofs,
    RecoveryReport,
    Shape,
)
from kvferry.tiers.disk.protocol import ReadyMessage
from kvferry.tiers.disk.quota import StoreFolder, StoreLock
from kvferry.tiers.disk.superblock import DiskBound, StoreIdentity, Superblock
from kvferry.types import SlotArray

log = logging.getLogger(__name__)

_BUFFER_BYTES = 32 << 20


class Store(Closing):
    """One rank's blocks on one drive. Owns the lock, the size and the index of the store.

    Leaves the bytes of blocks, in ``blocks_path``, to others: place ``p`` is the ``pitch`` bytes
    from ``p * pitch`` on. ``notes`` tells people what opening it did.
    """

    def __init__(self, lock: StoreLock, superblock: Superblock, index: DiskIndex) -> None:
        self.folder = lock.folder
        self.blocks_path = lock.folder / quota.BLOCKS_NAME
        self.superblock = superblock
        self.index = index
        self.num_places = superblock.num_places
        self.store_id = superblock.store_id
        """Drawn when the store was made: no two stores have the same."""
        self.notes: list[str] = []
        self._lock = lock

    @classmethod
    def open(
        cls,
        root: Path,
        identity: StoreIdentity,
        bound: DiskBound,
        *,
        key: bytes | None = None,
        before: ReadyMessage | None = None,
        is_kept: bool = True,
        on_behalf_of: int | None = None,
    ) -> Store:
        """Open the store of ``identity`` under ``root``: a new one at the size of its share.

        One that is there keeps its size unless the bound is smaller, and grows if there is room.
        ``before`` is what an engine has open that starts its drive process again: then no size
        changes, and a store that is gone is made anew with as many places. ``on_behalf_of`` is the
        process that the lock names.

        Raises StoreError, with what to do; StoreInUseError if another process has it.
        """
        folder = root / identity.folder_name
        notes: list[str] = []
        try:
            with ExitStack() as undo:
                if before is not None and folder.exists():
                    lock = undo.enter_context(StoreLock.take(folder, on_behalf_of=on_behalf_of))
                    superblock = _require_unchanged(folder, _superblock(folder), before)
                    _require_same(folder, superblock, identity, key)
                    index = DiskIndex.open(folder, superblock, before.reset_number, is_kept)
                else:
                    if before is None:
                        root.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with quota.alone_in(root):
                        with suppress(FileExistsError):
                            folder.mkdir(mode=0o700)
                        lock = undo.enter_context(StoreLock.take(folder, on_behalf_of=on_behalf_of))
                        found = _superblock(folder, notes)
                        if found is not None:
                            _require_same(folder, found, identity, key)
                        share = quota.SpaceQuota(root, identity, bound, _shrink)
                        num_places = share.claim(0 if found is None else found.num_places)
                        notes += share.notes
                        superblock = _sized(folder, found, identity, num_places, key, before, notes)
                        if is_shorter := _is_too_long(folder, superblock):
                            # While it shrinks others would count its old size.
                            index = _shortened(folder, superblock)
                    if not is_shorter:  # others need not wait for this
                        index = DiskIndex.open(folder, superblock, is_kept=is_kept)
                undo.pop_all()
        except OSError as error:
            raise StoreError(
                f"{root}: the store cannot be opened: {error.strerror or error}; see that the "
                "directory is there, is writable for this user and has room"
            ) from error
        store = cls(lock, replace(superblock, identity=identity), index)
        store.notes = notes
        log.info("%s: %d places; %s", folder, store.num_places, index.report)
        return store

    def close(self) -> None:
        """Commit, then let the store go. Safe to call twice. StoreError if the commit failed."""
        try:
            self.index.close()
        finally:
            self._lock.close()


def _superblock(folder: Path, notes: list[str] | None = None) -> Superblock | None:
    """Return the superblock; None if there is none, or a damaged one: then the store begins anew.

    One of another format is refused and left as it is; so is a damaged one without ``notes``.
    """
    try:
        return sb.read_superblock(folder)
    except sb.SuperblockError as error:
        if error.version or notes is None:
            raise StoreError(f"{error}; remove it: kvferry disk purge {folder}") from error
        notes.append(f"{error}; the store begins anew, empty")
        log.warning("%s", notes[-1])
        return None


def _require_unchanged(
    folder: Path, superblock: Superblock | None, before: ReadyMessage
) -> Superblock:
    """Refuse a store that is not as the engine knows it: another process was there meanwhile."""
    if superblock is None or superblock.store_id != before.store.store_id:
        raise StoreError(f"{folder} is another store than the one this engine had open")
    if superblock.num_places != before.num_places:
        raise StoreError(
            f"{folder} has {superblock.num_places} places now, this engine knows "
            f"{before.num_places}; it is used again when the engine starts again"
        )
    return superblock


def _require_same(
    folder: Path, superblock: Superblock, identity: StoreIdentity, key: bytes | None
) -> None:
    """Refuse a store that is not ours to read, and leave it as it is."""
    its = superblock.identity
    remedy = f"give another directory (disk), or remove it: kvferry disk purge {folder}"
    if its.is_sealed != identity.is_sealed:
        holds = "encrypted" if its.is_sealed else "unencrypted"
        given = "no key was given" if its.is_sealed else "a key was given"
        raise StoreError(f"{folder} holds {holds} blocks, and {given} (disk_key_file); {remedy}")
    for what in ("namespace", "block_bytes"):
        has, wanted = getattr(its, what), getattr(identity, what)
        if has != wanted:
            if isinstance(has, bytes):
                has, wanted = has.hex(), wanted.hex()
            raise StoreError(f"{folder} has {what} {has}, this server {wanted}; {remedy}")
    if its.folder_name != identity.folder_name:
        raise StoreError(f"{folder} was {its.folder_name} once, and was moved here; {remedy}")
    if key is not None and key_check(key, superblock.store_id) != superblock.key_check:
        raise StoreError(
            f"{folder} was encrypted with another key than the one given (disk_key_file); give "
            f"that one, {remedy}"
        )


# -- sizes: a crash in between loses nothing ------------------------------------------------------
#
#   grow      files longer │ superblock │ index may name the new places
#   shrink    index no longer names the last places, synced │ superblock │ files shorter


def _lengths(superblock: Superblock) -> dict[str, int]:
    return {
        INDEX_NAME: Shape(superblock.identity.proof_bytes).file_bytes(superblock.num_places),
        quota.BLOCKS_NAME: superblock.num_places * superblock.identity.pitch,
    }


def _is_too_long(folder: Path, superblock: Superblock) -> bool:
    return any(_length(folder / name) > most for name, most in _lengths(superblock).items())


def _length(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _sized(
    folder: Path,
    found: Superblock | None,
    identity: StoreIdentity,
    num_places: int,
    key: bytes | None,
    before: ReadyMessage | None,
    notes: list[str],
) -> Superblock:
    """Bring the store to so many places at least, or make it; return its superblock."""
    if before is not None:
        if num_places < before.num_places:
            raise StoreError(f"{folder.parent} has no room for {before.num_places} blocks any more")
        num_places = before.num_places
    if found is None:
        superblock = Superblock(identity, num_places)
        if key is not None:
            superblock = replace(superblock, key_check=key_check(key, superblock.store_id))
        with suppress(FileNotFoundError):
            os.unlink(folder / INDEX_NAME)  # that of a store whose superblock was damaged
        _make_state(folder, before.reset_number if before is not None else 0)
        _lengthen(folder, superblock, notes)
        create_file(folder / sb.FILE_NAME, sb.FILE_BYTES)
        superblock.write(folder)
        sync_folder(folder)
        sync_folder(folder.parent)
        return superblock
    if _length(folder / state.FILE_NAME) < state.FILE_BYTES:
        # What was reset is not known any more, so nothing of it may count.
        _make_state(folder, None)
    superblock = replace(found, identity=identity, num_places=num_places)
    try:
        _lengthen(folder, superblock, notes)
    except OSError as error:
        notes.append(f"{folder} does not grow: {error.strerror or error}")
        superblock = replace(superblock, num_places=found.num_places)
        _lengthen(folder, superblock, notes)
    if num_places >= found.num_places:
        superblock.write(folder)
    return superblock


def _make_state(folder: Path, reset_number: int | None) -> None:
    create_file(folder / state.FILE_NAME, state.FILE_BYTES)
    if reset_number is not None:
        with contextlib.closing(DiskFile(folder / state.FILE_NAME)) as file:
            state.write_reset(file, reset_number)


def _lengthen(folder: Path, superblock: Superblock, notes: list[str]) -> None:
    """Make every file at least as long as it must be."""
    for name, length in _lengths(superblock).items():
        if _length(folder / name) < length and not allocate(folder / name, length):
            notes.append(
                f"{folder}: the file system cannot reserve space for {name}; it grows as it fills"
            )


def _shortened(folder: Path, superblock: Superblock) -> DiskIndex:
    """Cut files that are too long, once the index no longer names what is cut."""
    index = DiskIndex.open(folder, superblock)
    try:
        superblock.write(folder)
        for name, length in _lengths(superblock).items():
            if _length(folder / name) > length:
                allocate(folder / name, length)
    except BaseException:
        index.close()
        raise
    return index


def _shrink(other: StoreFolder, num_places: int) -> None:
    assert other.superblock is not None
    with StoreLock.take(other.path):
        _shortened(other.path, replace(other.superblock, num_places=num_places)).close()
    log.info("%s: made smaller, to %d places", other.path, num_places)


# -- inspection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreSummary:
    """A store, for a list. ``num_blocks`` is None if that is unknown."""

    folder: StoreFolder
    num_blocks: int | None


@dataclass(frozen=True, eq=False)
class StoreContent:
    """What a store's index says, read without changing anything."""

    superblock: Superblock
    report: RecoveryReport
    pieces: Iterator[tuple[Keys, SlotArray, Proofs]]
    """Keys, places and proofs of all blocks, by ascending place."""


@dataclass
class VerifyReport:
    """What verifying found: how many blocks, and the places of those that are not as written."""

    num_blocks: int
    num_checked: int
    bad_places: list[int]
    recovery: RecoveryReport

    @property
    def is_sound(self) -> bool:
        """Whether every block and every page of the index is as it was written."""
        return not self.bad_places and not self.recovery.bad_pages


def list_stores(root: Path) -> list[StoreSummary]:
    """Return all stores under a directory, open ones too.

    The blocks of a store that is open are those of some moment just now.
    """
    return [StoreSummary(folder, _count_blocks(folder)) for folder in quota.stores_under(root)]


def _count_blocks(folder: StoreFolder) -> int | None:
    if folder.superblock is None or folder.trouble:
        return None
    with suppress(OSError, StoreError), _content(folder.path) as content:
        return content.report.num_blocks
    return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[StoreContent]:
    """Give a store's content, and keep it locked. StoreInUseError if a process has it open."""
    _require_store(path)
    with StoreLock.take(path), _content(path) as content:
        yield content


def verify_store(
    path: Path,
    key: bytes | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Compare every block with its proof; change nothing. ``progress`` is told done and total.

    Raises StoreError if the store is encrypted and ``key`` is missing or another one,
    StoreInUseError if a process has it open.
    """
    with reading(path) as content:
        mine, prover = content.superblock.identity, _prover(content.superblock, key)
        most = max(1, _BUFFER_BYTES // mine.pitch)
        buffer = Buffer(most, mine.pitch, is_sealed=mine.is_sealed)
        report = VerifyReport(content.report.num_blocks, 0, [], content.report)
        with contextlib.closing(BlockFile(str(path / quota.BLOCKS_NAME), mine.pitch)) as file:
            for keys, places, proofs in content.pieces:
                for start in range(0, len(places), most):
                    part = slice(start, start + most)
                    here = places[part]
                    read = list(file.move(Way.READ, here, np.arange(len(here)), buffer))
                    right = prover.check(buffer, here, keys.array[part], proofs[part])
                    for first, last, error in read:
                        right[first:last] &= error is None
                    report.bad_places += here[~right].tolist()
                    report.num_checked += len(right)
                    progress(report.num_checked, report.num_blocks)
    return report


def _prover(superblock: Superblock, key: bytes | None) -> Prover:
    mine = superblock.identity
    if not mine.is_sealed:
        return open_prover(mine.block_bytes, superblock.store_id, None)
    if key is None:
        raise StoreError(
            "it is encrypted: name the key, by disk_key_file or KVFERRY_DISK_KEY, to verify it"
        )
    if key_check(key, superblock.store_id) != superblock.key_check:
        raise StoreError("it is encrypted with another key than the one given")
    return open_prover(mine.block_bytes, superblock.store_id, key)


def purge_store(path: Path) -> str:
    """Remove a store; return what that means, for people.

    Raises StoreInUseError if a process has it open, StoreError if there is none.
    """
    found = _require_store(path)
    with quota.alone_in(path.parent):
        quota.remove_store(path)
    if found.superblock is not None and found.superblock.identity.is_sealed:
        rest = "its blocks were encrypted: without the key, what a drive may still hold is noise"
    else:
        rest = (
            "its bytes were given back to the file system, not overwritten: an SSD may hold them "
            "until it needs the room. Encrypt (disk_key_file) what must never be read again"
        )
    return f"{path} is gone, {found.num_bytes} bytes; {rest}"


def _require_store(path: Path) -> StoreFolder:
    found = next((each for each in quota.stores_under(path.parent) if each.path == path), None)
    if found is None:
        raise StoreError(f"{path} is no store of kvferry; kvferry disk ls shows which there are")
    return found


@contextlib.contextmanager
def _content(path: Path) -> Iterator[StoreContent]:
    superblock = sb.read_superblock(path)
    if superblock is None:
        raise StoreError(f"{path} was never finished, and holds nothing")
    with ExitStack() as undo:
        index, numbers = (
            undo.enter_context(contextlib.closing(DiskFile(path / name, writable=False)))
            for name in (INDEX_NAME, state.FILE_NAME)
        )
        reset = state.read_reset(numbers)
        shape = Shape(superblock.identity.proof_bytes)
        table = PageTable(index, superblock.store_id, superblock.num_places, shape)
        # Under a number that is not known nothing counts.
        counts = state.NOT_KEPT - 1 if reset is None else reset
        report = table.recover(counts).report
        if reset is None:
            report.words = "its reset number is damaged: everything is left out"
        yield StoreContent(superblock, report, table.pieces(counts))
