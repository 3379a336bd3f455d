"""A store on disk, opened whole: locked, sized, its files there, its ledger recovered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from kvferry.core.lifecycle import Closing
from kvferry.errors import KvferryError, StoreError
from kvferry.tiers.disk import superblock as forget_mark
from kvferry.tiers.disk.blocks import allocate
from kvferry.tiers.disk.folder import (
    BLOCKS_NAME,
    DiskBound,
    DiskRoom,
    StoreFolder,
    StoreLock,
    alone_in,
    set_aside,
)
from kvferry.tiers.disk.journal import Shape
from kvferry.tiers.disk.ledger import FILE_NAMES, Ledger, journal_bytes
from kvferry.tiers.disk.superblock import (
    FORGET_MARK_FILE_BYTES,
    FORGET_MARK_FILE_NAME,
    StoreIdentity,
    Superblock,
    SuperblockError,
    read_superblock,
    sync_folder,
)

log = logging.getLogger(__name__)

KeyCheck = Callable[[bytes], bytes]
"""From a store's id to what the key in use gives for it: ``CHECK_BYTES`` that betray nothing."""


class Store(Closing):
    """One rank's blocks on one drive. Owns the lock, the size and the ledger of the store.

    Leaves the bytes of blocks, in ``blocks_path``, to others: place ``p`` is the ``pitch`` bytes
    from ``p * pitch`` on. ``notes`` tells people what opening it did.
    """

    def __init__(self, lock: StoreLock, superblock: Superblock, ledger: Ledger) -> None:
        self.folder = lock.folder
        self.superblock = superblock
        self.ledger = ledger
        self.notes: list[str] = []
        self._lock = lock

    @classmethod
    def open(
        cls,
        root: Path,
        identity: StoreIdentity,
        bound: DiskBound,
        *,
        key_check: KeyCheck | None = None,
        may_create: bool = True,
        on_behalf_of: int | None = None,
    ) -> Store:
        """The store of ``identity`` under ``root``, brought to the size of its share.

        StoreError, with what to do, where it cannot be had; StoreInUseError where another process
        has it. ``may_create`` false: an engine that had it open before opens it again. A directory
        that has vanished is not made anew, and a mark to forget stays: the engine may still write
        what it is for.
        ``on_behalf_of`` is the process others are told of.
        """
        try:
            return _open(cls, root, identity, bound, key_check, may_create, on_behalf_of)
        except OSError as error:
            raise StoreError(
                f"{root}: the store cannot be opened: {error.strerror or error}; see that the "
                "directory is there, is writable for this user and has room"
            ) from error

    @property
    def num_places(self) -> int:
        return self.superblock.num_places

    @property
    def store_id(self) -> bytes:
        """Drawn when the store was made: names it among all stores there ever were."""
        return self.superblock.store_id

    @property
    def blocks_path(self) -> Path:
        return self.folder / BLOCKS_NAME

    def close(self) -> None:
        """Commit, then let the store go. Safe to call twice. JournalError if the commit failed."""
        try:
            self.ledger.close()
        finally:
            self._lock.release()


def _open(
    cls: type[Store],
    root: Path,
    identity: StoreIdentity,
    bound: DiskBound,
    key_check: KeyCheck | None,
    may_create: bool,
    on_behalf_of: int | None,
) -> Store:
    if may_create:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as undo:
        with alone_in(root):
            lock, superblock, notes = _claim(root, identity, key_check, on_behalf_of)
            undo.callback(lock.release)
            room = DiskRoom(root, identity, bound, _shrink)
            num_places = room.make()
            if superblock is None:
                superblock = Superblock(identity, num_places)
                if key_check is not None:
                    check = key_check(superblock.store_id)
                    superblock = replace(superblock, key_check=check)
            size = _Sizing(lock.folder, superblock, num_places)
            if not size.lengthen():
                notes.append(
                    f"{root}: the file system cannot promise space; files grow as they fill"
                )
            # While it shrinks others would count its old size; else they need not wait for this.
            ledger = size.shorten() if size.is_smaller else None
        if ledger is None:
            ledger = size.open_ledger()
        undo.callback(_give_back, ledger)
        if forget_mark.is_due(lock.folder):
            ledger.forget()
            ledger.commit()
            notes.append("it was told to forget everything, and has")
            if may_create:
                forget_mark.settle(lock.folder)
        undo.pop_all()
    store = cls(lock, size.superblock, ledger)
    store.notes += [*notes, *room.notes]
    log.info("%s: %d places; %s", lock.folder, num_places, ledger.report)
    return store


def _claim(
    root: Path, identity: StoreIdentity, key_check: KeyCheck | None, on_behalf_of: int | None
) -> tuple[StoreLock, Superblock | None, list[str]]:
    """The folder, locked, and what its superblock says; one that nobody can read is set aside."""
    folder = root / identity.folder_name
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = StoreLock.take(folder, on_behalf_of=on_behalf_of)
    try:
        superblock = read_superblock(folder)
        if superblock is not None:
            _require_same(folder, superblock, identity, key_check)
            superblock = replace(superblock, identity=identity)  # the label may be another
        return lock, superblock, []
    except SuperblockError as error:
        aside = set_aside(lock)
        lock.release()
        note = f"{error}; the store was set aside as {aside.name}, and an empty one made"
        log.warning("%s", note)
        again, superblock, notes = _claim(root, identity, key_check, on_behalf_of)
        return again, superblock, [note, *notes]
    except BaseException:
        lock.release()
        raise


def _give_back(ledger: Ledger) -> None:
    with suppress(KvferryError):  # whatever is wrong was said already
        ledger.close()


def _require_same(
    folder: Path, superblock: Superblock, identity: StoreIdentity, key_check: KeyCheck | None
) -> None:
    """Refuse a store that is not ours to read, by name; it is left as it is."""
    its = superblock.identity
    remedy = f"give another directory (disk), or remove it: kvferry disk purge {folder}"
    if its.is_sealed != identity.is_sealed:
        holds = "encrypted" if its.is_sealed else "unencrypted"
        key = "no key was given" if its.is_sealed else "a key was given"
        raise StoreError(f"{folder} holds {holds} blocks, and {key} (disk_key_file); {remedy}")
    for what in ("namespace", "block_bytes", "pitch", "proof_bytes"):
        has, wanted = getattr(its, what), getattr(identity, what)
        if has != wanted:
            if isinstance(has, bytes):
                has, wanted = has.hex(), wanted.hex()
            raise StoreError(f"{folder} has {what} {has}, this server {wanted}; {remedy}")
    if its.folder_name != identity.folder_name:
        raise StoreError(f"{folder} was {its.folder_name} once, and was moved here; {remedy}")
    if key_check is not None and key_check(superblock.store_id) != superblock.key_check:
        raise StoreError(
            f"{folder} was encrypted with another key than the one given (disk_key_file); give "
            f"that one, {remedy}"
        )


class _Sizing:
    """Brings a store's files to the size for so many places. A crash in between loses nothing.

    ::

        grow      files longer │ superblock │ ledger may name the new places
        shrink    ledger no longer names the last places, on the medium │ superblock │ files shorter
    """

    def __init__(self, folder: Path, superblock: Superblock, num_places: int) -> None:
        self.superblock = replace(superblock, num_places=num_places)
        self._folder = folder
        identity = superblock.identity
        length = journal_bytes(Shape(identity.proof_bytes), num_places)
        self._lengths = dict.fromkeys(FILE_NAMES, length)
        self._lengths[BLOCKS_NAME] = num_places * identity.pitch
        self._lengths[FORGET_MARK_FILE_NAME] = FORGET_MARK_FILE_BYTES
        self.is_smaller = any(self._length(name) > self._lengths[name] for name in self._lengths)

    def lengthen(self) -> bool:
        """Make every file at least as long as it must be; whether all have their room for it."""
        whole = [
            allocate(self._folder / name, max(self._length(name), length))
            for name, length in self._lengths.items()
        ]
        sync_folder(self._folder)
        if not self.is_smaller:
            self._write_superblock()
        return all(whole)

    def open_ledger(self) -> Ledger:
        mine = self.superblock
        proof_bytes = mine.identity.proof_bytes
        return Ledger.open(self._folder, mine.store_id, mine.num_places, proof_bytes)

    def shorten(self) -> Ledger:
        """Cut what is too long, once the ledger has let go of it."""
        ledger = self.open_ledger()
        try:
            self._write_superblock()
            for name, length in self._lengths.items():
                if self._length(name) > length:
                    allocate(self._folder / name, length)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _write_superblock(self) -> None:
        self.superblock.write(self._folder)
        sync_folder(self._folder.parent)

    def _length(self, name: str) -> int:
        path = self._folder / name
        return path.stat().st_size if path.exists() else 0


def _shrink(other: StoreFolder, num_places: int) -> None:
    """Make a store that nobody has open smaller."""
    assert other.superblock is not None
    lock = StoreLock.take(other.path)
    try:
        _Sizing(other.path, other.superblock, num_places).shorten().close()
    finally:
        lock.release()
    log.info("%s: made smaller, to %d places", other.path, num_places)
