"""Opens a store on disk: for the drive process that serves it, or to verify its blocks."""

from __future__ import annotations

import contextlib
import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvferry.core.lifecycle import Closing
from kvferry.errors import StoreError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk import quota, state
from kvferry.tiers.disk import superblock as sb
from kvferry.tiers.disk.block_file import BlockFile, Buffer, key_check, open_prover
from kvferry.tiers.disk.files import DiskFile, create_file, sync_folder
from kvferry.tiers.disk.index import FILE_NAME as INDEX_NAME
from kvferry.tiers.disk.index import DiskIndex, PageTable, Shape
from kvferry.tiers.disk.protocol import ReadyMessage
from kvferry.tiers.disk.quota import StoreLock
from kvferry.tiers.disk.superblock import DiskBound, StoreIdentity, Superblock

log = logging.getLogger(__name__)

_BUFFER_BYTES = 32 << 20


class Store(Closing):
    """One rank's blocks on one drive. Owns the lock, the size and the index of the store.

    Leaves the bytes of blocks, in ``blocks_path``, to ``BlockFile``. ``notes`` tells people what
    opening changed.
    """

    def __init__(
        self, lock: StoreLock, superblock: Superblock, index: DiskIndex, notes: list[str]
    ) -> None:
        self.folder = lock.folder
        self.blocks_path = lock.folder / quota.BLOCKS_NAME
        self.superblock = superblock
        self.index = index
        self.num_places = superblock.num_places
        self.notes = notes
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
        """Open the store of ``identity`` under ``root``, or create it at the size of its share.

        An existing one keeps its size unless the bound is smaller, and grows if there is room.
        ``before`` is the ready message of the engine's earlier drive process: the store must be the
        same. ``on_behalf_of`` is the process that the lock names.

        Raises StoreError, with a remedy; StoreInUseError if another process has it.
        """
        folder = root / identity.folder_name
        notes: list[str] = []
        try:
            with ExitStack() as undo:
                if before is not None:
                    lock = undo.enter_context(StoreLock.take(folder, on_behalf_of=on_behalf_of))
                    superblock = _require_unchanged(folder, _superblock(folder), before)
                    number = before.reset_number
                else:
                    root.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with quota.directory_lock(root):
                        with suppress(FileExistsError):
                            folder.mkdir(mode=0o700)
                        lock = undo.enter_context(StoreLock.take(folder, on_behalf_of=on_behalf_of))
                        found = _superblock(folder, notes)
                        if found is not None:
                            _require_identity(folder, found, identity, key)
                        share = quota.SpaceQuota(root, identity, bound)
                        num_places = share.claim(0 if found is None else found.num_places)
                        notes += share.notes
                        superblock = _resize_store(folder, found, identity, num_places, key, notes)
                    number = None
                index = DiskIndex.open(folder, superblock, number, is_kept)
                undo.pop_all()
        except OSError as error:
            raise StoreError(
                f"{root}: the store cannot be opened: {error.strerror or error}; see that the "
                "directory is there, is writable for this user and has room"
            ) from error
        log.info("%s: %d places; %s", folder, superblock.num_places, index.report)
        return cls(lock, replace(superblock, identity=identity), index, notes)

    def close(self) -> None:
        """Commit, then release the store. Safe to call twice. StoreError if the commit failed."""
        try:
            self.index.close()
        finally:
            self._lock.close()


def _superblock(folder: Path, notes: list[str] | None = None) -> Superblock | None:
    """Return the superblock; None if it is missing or damaged: the store then begins anew.

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
    """Raise StoreError if another process replaced or resized the store of this engine."""
    if superblock is None or superblock.store_id != before.store.store_id:
        raise StoreError(f"{folder} is another store than the one this engine had open")
    if superblock.num_places != before.num_places:
        raise StoreError(
            f"{folder} has {superblock.num_places} places now, this engine knows "
            f"{before.num_places}; it is used again when the engine starts again"
        )
    return superblock


def _require_identity(
    folder: Path, superblock: Superblock, identity: StoreIdentity, key: bytes | None
) -> None:
    """Raise StoreError if a store has another identity or key; leave it as it is."""
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


def _resize_store(
    folder: Path,
    found: Superblock | None,
    identity: StoreIdentity,
    num_places: int,
    key: bytes | None,
    notes: list[str],
) -> Superblock:
    """Create the store, or resize it to ``num_places``; return its superblock.

    A crash in between loses nothing that fits::

        grow      files longer | superblock | index may name the new places
        shrink    superblock | files shorter; the index's records of the rest do not count
    """
    if found is None:
        superblock = Superblock(identity, num_places)
        if key is not None:
            superblock = replace(superblock, key_check=key_check(key, superblock.store_id))
        for name in (INDEX_NAME, quota.BLOCKS_NAME):  # of a store with a damaged superblock
            (folder / name).unlink(missing_ok=True)
        _make_state(folder, 0)
        notes += quota.set_lengths(folder, superblock)
        create_file(folder / sb.FILE_NAME, sb.FILE_BYTES)
        superblock.write(folder)
        sync_folder(folder)
        sync_folder(folder.parent)
        return superblock
    state_file = folder / state.FILE_NAME
    if not state_file.exists() or state_file.stat().st_size < state.FILE_BYTES:
        # Without the reset number no block may count.
        _make_state(folder, None)
    superblock = replace(found, identity=identity, num_places=num_places)
    if num_places < found.num_places:
        superblock.write(folder)
    try:
        notes += quota.set_lengths(folder, superblock)
    except OSError as error:
        notes.append(f"{folder} does not grow: {error.strerror or error}")
        superblock = replace(superblock, num_places=found.num_places)
        notes += quota.set_lengths(folder, superblock)
    superblock.write(folder)
    return superblock


def _make_state(folder: Path, reset_number: int | None) -> None:
    create_file(folder / state.FILE_NAME, state.FILE_BYTES)
    if reset_number is not None:
        with contextlib.closing(DiskFile(folder / state.FILE_NAME)) as file:
            state.write_reset(file, reset_number)


def verify_store(path: Path, key: bytes | None = None) -> tuple[int, list[int]]:
    """Compare every block with its proof; return the number of blocks, and bad ones' places.

    Raises StoreError if the store cannot be read, or is encrypted with another key than ``key``;
    StoreInUseError if a process has it open.
    """
    superblock = sb.read_superblock(path)
    if superblock is None:
        raise StoreError("it was never finished, and holds nothing")
    mine, bad = superblock.identity, list[int]()
    key = key if mine.is_sealed else None
    if mine.is_sealed and (not key or key_check(key, superblock.store_id) != superblock.key_check):
        raise StoreError("it is encrypted: name its key, by disk_key_file or KVFERRY_DISK_KEY")
    prover = open_prover(mine.block_bytes, superblock.store_id, key)
    most = max(1, _BUFFER_BYTES // mine.pitch)
    buffer = Buffer(most, mine.pitch, is_sealed=mine.is_sealed)
    with ExitStack() as undo:
        undo.enter_context(StoreLock.take(path))
        blocks = BlockFile(str(path / quota.BLOCKS_NAME), mine.pitch)
        undo.callback(blocks.close)
        index, numbers = (
            undo.enter_context(contextlib.closing(DiskFile(path / name, writable=False)))
            for name in (INDEX_NAME, state.FILE_NAME)
        )
        shape, reset = Shape(mine.proof_bytes), state.read_reset(numbers)
        table = PageTable(index, superblock.store_id, superblock.num_places, shape)
        # With a damaged reset number no block counts.
        records = table.recover(state.NOT_KEPT - 1 if reset is None else reset)[0]
        places = np.flatnonzero(records["turn"])
        for start in range(0, len(places), most):
            here = places[start : start + most]
            read = list(blocks.move(Way.READ, here, np.arange(len(here)), buffer))
            right = prover.check(buffer, here, records["key"][here], records["proof"][here])
            for first, last, error in read:
                right[first:last] &= error is None
            bad += here[~right].tolist()
    return len(places), bad
