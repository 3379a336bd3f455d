"""The first thing read of a store: what it is, in one sector that is written twice.

It is replaced as a whole file, by rename: at every moment there is an old one or a new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvferry.errors import InputError, StoreError
from kvferry.tiers.disk.journal import (
    DIGEST_BYTES,
    MOST_PROOF_BYTES,
    SECTOR_BYTES,
    DiskFile,
    JournalFile,
    read_whole,
    write_whole,
)

NAMESPACE_BYTES = 32
MOST_LABEL_BYTES = 256
FOLDER = re.compile(r"kvferry-[0-9a-f]{16}-r[0-9]+of[0-9]+-d[0-9]+of[0-9]+")
"""What the folder of a store is called."""


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
        if not 0 < self.proof_bytes <= MOST_PROOF_BYTES:
            raise InputError(f"a proof of {self.proof_bytes} bytes: 1 to {MOST_PROOF_BYTES} fit")
        for what, number, of in (
            ("rank", self.rank, self.num_ranks),
            ("directory", self.stripe, self.num_stripes),
        ):
            if not 0 <= number < of < 1 << 31:
                raise InputError(f"there is no {what} {number} of {of}")

    @property
    def folder_name(self) -> str:
        return (
            f"kvferry-{self.namespace.hex()[:16]}-r{self.rank}of{self.num_ranks}"
            f"-d{self.stripe}of{self.num_stripes}"
        )

    @property
    def short_label(self) -> str:
        """The label, no longer than a superblock has room for."""
        return self.label.encode()[:MOST_LABEL_BYTES].decode(errors="ignore")


# ------------------------------------------------------------------------------------------------
# The first thing read of a store: what it is, in one sector that is written twice.
#
# It is replaced as a whole file, by rename: at every moment there is an old one or a new one.

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
_LABEL_AT = 192


class SuperblockError(StoreError):
    """A superblock that is there and cannot be believed. ``version`` is another format's, or 0."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True)
class Superblock:
    """What a store says of itself. ``key_check`` tells a wrong key by name; zero without a key."""

    identity: StoreIdentity
    num_places: int
    store_id: bytes = field(default_factory=lambda: secrets.token_bytes(STORE_ID_BYTES))
    key_check: bytes = bytes(CHECK_BYTES)
    created: int = field(default_factory=lambda: int(time.time()))

    def pack(self) -> bytes:
        sector = bytearray(SECTOR_BYTES)
        mine = self.identity
        label = mine.short_label.encode()
        _HEAD.pack_into(sector, DIGEST_BYTES, MAGIC, FORMAT_VERSION)
        _FIELDS.pack_into(
            sector,
            DIGEST_BYTES + _HEAD.size,
            self.store_id,
            mine.namespace,
            mine.family,
            mine.block_bytes,
            mine.pitch,
            self.num_places,
            mine.rank,
            mine.num_ranks,
            mine.stripe,
            mine.num_stripes,
            int(mine.is_sealed),
            mine.proof_bytes,
            self.key_check,
            self.created,
            len(mine.family),
            len(label),
        )
        sector[_LABEL_AT : _LABEL_AT + len(label)] = label
        sector[:DIGEST_BYTES] = _digest(sector[DIGEST_BYTES:])
        return bytes(sector)

    @classmethod
    def unpack(cls, sector: bytes) -> Superblock:
        """SuperblockError, with the reason, where this is none of ours."""
        if len(sector) != SECTOR_BYTES or _digest(sector[DIGEST_BYTES:]) != sector[:DIGEST_BYTES]:
            raise SuperblockError("it is damaged: its checksum does not match")
        magic, version = _HEAD.unpack_from(sector, DIGEST_BYTES)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise SuperblockError(
                f"it has format {version}, this kvferry reads {FORMAT_VERSION}", version
            )
        (
            store_id,
            namespace,
            family,
            block_bytes,
            pitch,
            num_places,
            rank,
            num_ranks,
            stripe,
            num_stripes,
            sealing,
            proof_bytes,
            key_check,
            created,
            family_bytes,
            label_bytes,
        ) = _FIELDS.unpack_from(sector, DIGEST_BYTES + _HEAD.size)
        try:
            identity = StoreIdentity(
                namespace=namespace,
                block_bytes=block_bytes,
                pitch=pitch,
                proof_bytes=proof_bytes,
                is_sealed=bool(sealing),
                rank=rank,
                num_ranks=num_ranks,
                stripe=stripe,
                num_stripes=num_stripes,
                family=family[:family_bytes],
                label=sector[_LABEL_AT : _LABEL_AT + label_bytes].decode(),
            )
        except ValueError as error:  # whole, but nothing that we would have written
            raise SuperblockError(f"it makes no sense: {error}") from error
        return cls(identity, num_places, store_id, key_check, created)

    def write(self, folder: Path) -> None:
        """Make this the store's superblock, at once or not at all; on the medium on return."""
        data = (self.pack() * 2).ljust(FILE_BYTES, b"\0")
        with contextlib.suppress(OSError):
            if (folder / FILE_NAME).read_bytes() == data:
                return  # on a disk that is full there would be no room for another
        temporary = folder / f"{FILE_NAME}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(f"{temporary} could not be written whole")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, folder / FILE_NAME)
        sync_folder(folder)


def read_superblock(folder: Path) -> Superblock | None:
    """The store's superblock, from whichever copy is whole; None where there is no file.

    SuperblockError where neither can be believed.
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
        except SuperblockError:
            raise SuperblockError(f"{folder / FILE_NAME}: {error}", error.version) from error


def sync_folder(folder: Path) -> None:
    """Names made, changed and removed in ``folder`` are on the medium when this returns."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(rest: bytes | bytearray) -> bytes:
    return blake2b(rest, digest_size=DIGEST_BYTES, person=b"kvferry.super").digest()


# ------------------------------------------------------------------------------------------------
# When a store last forgot everything, so that drives which were apart at that time can tell.
#
# A tier on several drives may be told to forget while one of them is away. The others note the time
# of it, each in a file of its store. When the one comes back, in this life of the server or a later
# one, its time is older than theirs, and it forgets too before anything of it is read.

EPOCH_FILE_NAME = "epoch"
_NUMBER_BYTES = 8


def read_epoch(folder: Path) -> int:
    """The store's epoch; 0 where there is none, or none that can be believed: older than all."""
    try:
        data = (folder / EPOCH_FILE_NAME).read_bytes()
    except OSError:
        return 0
    number = data[:_NUMBER_BYTES]
    return int.from_bytes(number, "little") if data == number + _epoch_digest(number) else 0


def write_epoch(folder: Path, epoch: int) -> None:
    """Only after the store has forgotten: one that says so and has not would keep what is stale."""
    number = epoch.to_bytes(_NUMBER_BYTES, "little")
    aside = folder / f"{EPOCH_FILE_NAME}.new"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, number + _epoch_digest(number))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(aside, folder / EPOCH_FILE_NAME)
    sync_folder(folder)


def _epoch_digest(number: bytes) -> bytes:
    return blake2b(number, digest_size=_NUMBER_BYTES, person=b"kvferry.epoch").digest()


# ------------------------------------------------------------------------------------------------
# An order to forget everything, left in a store's folder for whoever has it open or opens it next.
#
# Who orders it may be another process than the engine that has the store open, and may not reach
# that
# engine for a while (vLLM's scheduler speaks to its ranks with the next step only). The mark is
# good
# from the moment it is on the medium::
#
#     mark, sync: promised ──> the engine hears and its drive forgets, or there is a crash ──>
#         whoever opens the store in the next life forgets first ──> epoch: the mark is settled
#
# Until it is settled everything in the store is forgotten at the next opening. So is what an engine
# that has not heard of it writes meanwhile; and what one that has heard writes has names that no
# other life asks for. (So its drive settles nothing: it could not tell the two apart.)

log = logging.getLogger(__name__)

FORGET_MARK_FILE_NAME = "forget"
FORGET_MARK_FILE_BYTES = 4096
_SECTOR_BYTES, _FORGET_MARK_NUMBER_BYTES = 512, 8


def read_mark(file: JournalFile) -> int | None:
    """The number of the last order; 0: there was none; None: who knows, so there may be one."""
    data = read_whole(file, 0, 2 * _FORGET_MARK_NUMBER_BYTES)
    number = data[:_FORGET_MARK_NUMBER_BYTES]
    if not any(data):
        return 0
    return (
        int.from_bytes(number, "little") if data == number + _forget_mark_digest(number) else None
    )


def write_mark(file: JournalFile, number: int) -> None:
    """Order it; on the medium on return. The file has its bytes: a full disk is no reason to fail.

    One sector, in place: it is the old one or the new one after a crash, and any other counts as an
    order.
    """
    data = number.to_bytes(_FORGET_MARK_NUMBER_BYTES, "little")
    write_whole(file, 0, (data + _forget_mark_digest(data)).ljust(_SECTOR_BYTES, b"\0"))
    file.sync()


def ordered_in(folder: Path) -> int | None:
    """As :func:`read_mark`, of a store; one from before there were marks has none."""
    try:
        file = DiskFile(folder / FORGET_MARK_FILE_NAME, writable=False)
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    try:
        return read_mark(file)
    except OSError:
        return None
    finally:
        file.close()


def is_due(folder: Path) -> bool:
    """Whether everything in this store counts as forgotten, though its journal knows nothing."""
    number = ordered_in(folder)
    return number is None or number > read_epoch(folder)


def settle(folder: Path) -> None:
    """Only after the store has forgotten, and while nobody can order anew: the mark is old now."""
    number = ordered_in(folder)
    try:
        if number is not None:
            write_epoch(folder, max(number, read_epoch(folder)))
            return
        file = DiskFile(folder / FORGET_MARK_FILE_NAME)
        try:
            write_mark(file, 0)
        finally:
            file.close()
    except OSError as error:  # at worst it forgets once more when it is next opened
        log.warning("%s: that it has forgotten cannot be noted: %s", folder, error)


def _forget_mark_digest(number: bytes) -> bytes:
    return blake2b(number, digest_size=_FORGET_MARK_NUMBER_BYTES, person=b"kvferry.forget").digest()
