"""What a store says of itself: its identity, when it last forgot, and whether it must forget.

The superblock is one sector, written twice. It is replaced as a whole file, by rename: at every
moment there is an old one or a new one.

The epoch is the time at which all was last forgotten. A tier on several drives may be told to
forget while one of them is away; the others note the time. When that drive comes back, in this life
of the server or a later one, its epoch is older than theirs, and it forgets before anything of it
is read.

The reset mark is an order to forget everything, left in a store's folder by a process that cannot
reach the engine that has the store open (vLLM's scheduler speaks to its ranks only with the next
step). It holds from the moment it is on the medium::

    mark, sync: promised ──> the engine hears and its drive forgets, or there is a crash ──>
        the next process that opens the store forgets first ──> epoch: the mark is settled

Until it is settled, everything in the store is forgotten at the next opening; so is what an engine
writes meanwhile that has not heard of it. What an engine writes that has heard has keys that no
other life asks for. (So its drive settles nothing: it could not tell the two apart.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.errors import InputError, StoreError
from kvferry.tiers.disk.journal_pages import (
    DIGEST_BYTES,
    MAX_PROOF_BYTES,
    SECTOR_BYTES,
    DiskFile,
    read_whole,
    write_whole,
)
from kvferry.tiers.disk.protocol import StoreAt
from kvferry.tiers.ipc.process import run_module

log = logging.getLogger(__name__)

NAMESPACE_BYTES = 32
MAX_LABEL_BYTES = 256
FOLDER = re.compile(r"kvferry-[0-9a-f]{16}-r[0-9]+of[0-9]+-d[0-9]+of[0-9]+")
"""What the folder of a store is called."""

FILE_NAME = "superblock"
FILE_BYTES = 4096
FORMAT_VERSION = 1
MAGIC = b"KVFERRY\0"
STORE_ID_BYTES = 16
CHECK_BYTES = 16
_HEAD = struct.Struct("<8sI4x")
_FIELDS = struct.Struct(
    f"<{STORE_ID_BYTES}s{NAMESPACE_BYTES}s{NAMESPACE_BYTES}sQQQIIIIII{CHECK_BYTES}sQBxH4x"
)
_NAMES = (
    *("store_id", "namespace", "family", "block_bytes", "pitch", "num_places", "rank", "num_ranks"),
    *("stripe", "num_stripes", "is_sealed", "proof_bytes", "key_check", "created"),
    *("family_bytes", "label_bytes"),
)
_FIELDS_AT, _LABEL_AT = DIGEST_BYTES + _HEAD.size, 192

EPOCH_FILE_NAME = "epoch"
RESET_MARK_FILE_NAME = "forget"
RESET_MARK_FILE_BYTES = 4096
_NUMBER_BYTES = 8
MODULE = "kvferry.tiers.disk.superblock"
_MARK, _FIND = "mark", "find"


@dataclass(frozen=True)
class StoreIdentity:
    """What must agree for a store to be read: whose blocks, how large, which part of them.

    ``namespace`` decides the bytes of this rank's blocks; ``family`` is the same for all ranks of
    one server. ``label`` is for people, and need not agree.
    """

    namespace: bytes
    block_bytes: int
    pitch: int
    proof_bytes: int
    is_sealed: bool = False
    rank: int = 0
    num_ranks: int = 1
    stripe: int = 0
    num_stripes: int = 1
    family: bytes = b""
    label: str = ""

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES or len(self.family) > NAMESPACE_BYTES:
            raise InputError(
                f"a store's namespace has {NAMESPACE_BYTES} bytes and its family at most as many, "
                f"got {len(self.namespace)} and {len(self.family)}"
            )
        if not 0 < self.block_bytes <= self.pitch or self.pitch % 4096:
            raise InputError(
                f"blocks of {self.block_bytes} bytes cannot lie {self.pitch} bytes apart: a place "
                "is a multiple of 4096 bytes and holds a block"
            )
        if not 0 < self.proof_bytes <= MAX_PROOF_BYTES:
            raise InputError(f"a proof of {self.proof_bytes} bytes: 1 to {MAX_PROOF_BYTES} fit")
        for what, number, of in (
            ("rank", self.rank, self.num_ranks),
            ("directory", self.stripe, self.num_stripes),
        ):
            if not 0 <= number < of < 1 << 31:
                raise InputError(f"there is no {what} {number} of {of}")

    @property
    def folder_name(self) -> str:
        """What the store's folder is called."""
        return (
            f"kvferry-{self.namespace.hex()[:16]}-r{self.rank}of{self.num_ranks}"
            f"-d{self.stripe}of{self.num_stripes}"
        )


class SuperblockError(StoreError):
    """A superblock that is there and cannot be used. ``version`` is another format's, or 0."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True)
class Superblock:
    """A store's identity and size. ``key_check`` recognises a wrong key; zero without a key."""

    identity: StoreIdentity
    num_places: int
    store_id: bytes = field(default_factory=lambda: secrets.token_bytes(STORE_ID_BYTES))
    key_check: bytes = bytes(CHECK_BYTES)
    created: int = field(default_factory=lambda: int(time.time()))

    def pack(self) -> bytes:
        """Return the superblock as one sector."""
        sector = bytearray(SECTOR_BYTES)
        # As much of the label as there is room for, in whole characters.
        label = self.identity.label.encode()[:MAX_LABEL_BYTES].decode(errors="ignore").encode()
        values: dict[str, Any] = {**vars(self), **vars(self.identity)}
        values |= {"family_bytes": len(self.identity.family), "label_bytes": len(label)}
        _HEAD.pack_into(sector, DIGEST_BYTES, MAGIC, FORMAT_VERSION)
        _FIELDS.pack_into(sector, _FIELDS_AT, *(values[name] for name in _NAMES))
        sector[_LABEL_AT : _LABEL_AT + len(label)] = label
        sector[:DIGEST_BYTES] = _digest(sector[DIGEST_BYTES:], b"kvferry.super")
        return bytes(sector)

    @classmethod
    def unpack(cls, sector: bytes) -> Superblock:
        """Return the superblock in a sector. SuperblockError, with the reason, if it is none."""
        digest = _digest(sector[DIGEST_BYTES:], b"kvferry.super")
        if len(sector) != SECTOR_BYTES or digest != sector[:DIGEST_BYTES]:
            raise SuperblockError("it is damaged: its checksum does not match")
        magic, version = _HEAD.unpack_from(sector, DIGEST_BYTES)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise SuperblockError(
                f"it has format {version}, this kvferry reads format {FORMAT_VERSION}", version
            )
        values = dict(zip(_NAMES, _FIELDS.unpack_from(sector, _FIELDS_AT), strict=True))
        values["family"] = values["family"][: values["family_bytes"]]
        values["is_sealed"] = bool(values["is_sealed"])
        try:
            values["label"] = sector[_LABEL_AT : _LABEL_AT + values["label_bytes"]].decode()
            identity = StoreIdentity(
                **{each.name: values[each.name] for each in fields(StoreIdentity)}
            )
        except ValueError as error:  # whole, but nothing that we would have written
            raise SuperblockError(f"it makes no sense: {error}") from error
        mine = {name: values[name] for name in ("num_places", "store_id", "key_check", "created")}
        return cls(identity, **mine)

    def write(self, folder: Path) -> None:
        """Make this the store's superblock, at once or not at all; on the medium on return."""
        data = (self.pack() * 2).ljust(FILE_BYTES, b"\0")
        with contextlib.suppress(OSError):
            if (folder / FILE_NAME).read_bytes() == data:
                return  # on a full disk there would be no room for another
        _replace_file(folder / FILE_NAME, data)


def read_superblock(folder: Path) -> Superblock | None:
    """Return the store's superblock, from whichever copy is whole; None if there is no file.

    Raises SuperblockError if neither copy can be used.
    """
    try:
        data = (folder / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SuperblockError(f"{folder / FILE_NAME} cannot be read: {error}") from error
    try:
        return Superblock.unpack(data[:SECTOR_BYTES])
    except SuperblockError as error:
        try:
            return Superblock.unpack(data[SECTOR_BYTES : 2 * SECTOR_BYTES])
        except SuperblockError as second:
            raise SuperblockError(
                f"{folder / FILE_NAME}: {second if second.version else error}",
                error.version or second.version,
            ) from error


def sync_folder(folder: Path) -> None:
    """Return once names made, changed and removed in ``folder`` are on the medium."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace_file(path: Path, data: bytes) -> None:
    """Give a file this content, at once or not at all; on the medium on return."""
    temporary = path.with_name(f"{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(f"{temporary} could not be written whole")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _digest(data: bytes | bytearray, person: bytes, size: int = DIGEST_BYTES) -> bytes:
    return blake2b(data, digest_size=size, person=person).digest()


# -- epoch and reset mark -------------------------------------------------------------------------


def _pack_number(number: int, person: bytes) -> bytes:
    data = number.to_bytes(_NUMBER_BYTES, "little")
    return data + _digest(data, person, _NUMBER_BYTES)


def _unpack_number(data: bytes, person: bytes) -> int | None:
    """Return the number, or None if its digest does not match."""
    number = int.from_bytes(data[:_NUMBER_BYTES], "little")
    return number if data == _pack_number(number, person) else None


def read_epoch(folder: Path) -> int:
    """Return the store's epoch; 0, older than all, if there is none or it is damaged."""
    try:
        data = (folder / EPOCH_FILE_NAME).read_bytes()
    except OSError:
        return 0
    return _unpack_number(data, b"kvferry.epoch") or 0


def write_epoch(folder: Path, epoch: int) -> None:
    """Write the epoch. Only after the store has forgotten, or stale blocks would be kept."""
    _replace_file(folder / EPOCH_FILE_NAME, _pack_number(epoch, b"kvferry.epoch"))


def read_mark(file: DiskFile) -> int | None:
    """Return the number of the last reset mark; 0: there was none; None: it cannot be read."""
    data = read_whole(file, 0, 2 * _NUMBER_BYTES)
    return _unpack_number(data, b"kvferry.forget") if any(data) else 0


def write_mark(file: DiskFile, number: int) -> None:
    """Leave a reset mark; on the medium on return. The file has its bytes, also on a full disk.

    One sector, in place: after a crash it is the old one or the new one, and any other content
    counts as a mark.
    """
    write_whole(file, 0, _pack_number(number, b"kvferry.forget").ljust(SECTOR_BYTES, b"\0"))
    file.sync()


def mark_in(folder: Path) -> int | None:
    """As :func:`read_mark`, of a store; a store without the file has no mark."""
    try:
        with contextlib.closing(DiskFile(folder / RESET_MARK_FILE_NAME, writable=False)) as file:
            return read_mark(file)
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def is_marked(folder: Path) -> bool:
    """Whether everything in this store counts as forgotten, whatever its journal says."""
    number = mark_in(folder)
    return number is None or number > read_epoch(folder)


def settle(folder: Path) -> None:
    """Settle the reset mark. Only after the store has forgotten, while no mark can be left."""
    number = mark_in(folder)
    try:
        if number is not None:
            write_epoch(folder, max(number, read_epoch(folder)))
        else:
            with contextlib.closing(DiskFile(folder / RESET_MARK_FILE_NAME)) as file:
                write_mark(file, 0)
    except OSError as error:  # at worst it forgets once more when it is next opened
        log.warning("%s: that it has forgotten cannot be noted: %s", folder, error)


def mark_stores(stores: Sequence[StoreAt]) -> str:
    """Leave a reset mark in each store; return why not all of them are marked, or nothing."""
    folders = [Path(store.folder) for store in stores]
    known = [number for each in folders for number in (read_epoch(each), mark_in(each) or 0)]
    # Newer than whatever any of them has forgotten, also if the clock was put back.
    number = max(time.time_ns(), *known) + 1
    failed = []
    for store, folder in zip(stores, folders, strict=True):
        try:
            if not is_here(store):
                raise OSError("the store is no longer there")
            with contextlib.closing(DiskFile(folder / RESET_MARK_FILE_NAME)) as file:
                write_mark(file, number)
        except OSError as error:
            failed.append(f"{folder}: {error.strerror or error}")
    return "; ".join(failed)


def is_here(store: StoreAt) -> bool:
    """Whether this very store lies under its name on this host."""
    try:
        superblock = read_superblock(Path(store.folder))
    except (OSError, StoreError):
        return False
    return superblock is not None and superblock.store_id == store.store_id


# A drive that hangs may hang the process that reads or writes there, and keep that process from
# ending. So stores that other processes have open are looked at and marked from a child process.


def find_apart(stores: Sequence[StoreAt], timeout: float) -> list[StoreAt]:
    """Return those stores that are on this host; all, if that is not known in ``timeout`` seconds.

    To take a store that hangs for another host's would claim a reset that was not made.
    """
    try:
        found = _apart(_FIND, stores, timeout)
        return [store for store, is_so in zip(stores, found, strict=True) if is_so]
    except (OSError, ValueError, TypeError) as error:
        log.warning("whether stores on disk are on this host is not known: %s", error)
        return list(stores)


def mark_apart(stores: Sequence[StoreAt], timeout: float) -> str:
    """As :func:`mark_stores`, from a child process, in ``timeout`` seconds at most."""
    try:
        return str(_apart(_MARK, stores, timeout))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _apart(what: str, stores: Sequence[StoreAt], timeout: float) -> Any:
    told = [what, [[store.folder, store.store_id.hex()] for store in stores]]
    answer = run_module(MODULE, json.dumps(told).encode(), timeout)
    # What Python loads at its start may print something first.
    return json.loads(answer.splitlines()[-1] if answer else b"")


def main() -> None:
    """Run in the child: read what to do with which stores, print the answer, both as JSON."""
    what, told = json.load(sys.stdin)
    stores = [StoreAt(folder, bytes.fromhex(store_id)) for folder, store_id in told]
    print(json.dumps(mark_stores(stores) if what == _MARK else [is_here(each) for each in stores]))
