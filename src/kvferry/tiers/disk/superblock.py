"""The first thing read of a store: what it is, in one sector that is written twice.

It is replaced as a whole file, by rename: at every moment there is an old one or a new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.tiers.disk.pages import DIGEST_BYTES, SECTOR_BYTES
from kvferry.tiers.disk.store_identity import NAMESPACE_BYTES, StoreIdentity

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
