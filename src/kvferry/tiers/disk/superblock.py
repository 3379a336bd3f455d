"""What a store says of itself: its identity and its size.

The superblock is one sector, twice in a file that has its bytes from the day the store is made. The
first copy is written and synced, then the second: at every moment one of them is whole, and the
first that is whole counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import time
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.errors import InputError, StoreError
from kvferry.tiers.disk.files import (
    DIGEST_BYTES,
    SECTOR_BYTES,
    DiskFile,
    open_file,
    read_whole,
    sync_folder,
    write_whole,
)

NAMESPACE_BYTES = 32
MAX_LABEL_BYTES = 256
FOLDER = re.compile(r"kvferry-[0-9a-f]{16}-r[0-9]+of[0-9]+-d[0-9]+of[0-9]+")
"""What the folder of a store is called."""

FILE_NAME = "superblock"
FILE_BYTES = 4096
FORMAT_VERSION = 3
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
        """Make this the store's superblock, in the bytes of its file; on the medium on return."""
        path = folder / FILE_NAME
        with contextlib.closing(DiskFile(path)) as file:
            sector = self.pack()
            if read_whole(file, 0, 2 * SECTOR_BYTES) != sector * 2:
                for at in (0, SECTOR_BYTES):
                    write_whole(file, at, sector)
                    file.sync()

    def create(self, folder: Path) -> None:
        """Make this the superblock of a store that has none, at once or not at all."""
        data = (self.pack() * 2).ljust(FILE_BYTES, b"\0")
        temporary = f"{FILE_NAME}.new"
        fd = open_file(str(folder / temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(f"{folder / temporary} could not be written whole")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(folder / temporary, folder / FILE_NAME)
        sync_folder(folder)


def read_superblock(folder: Path) -> Superblock | None:
    """Return the store's superblock, from whichever copy is whole; None if there is no file.

    Raises SuperblockError if neither copy can be used, StoreError if it cannot be read.
    """
    try:
        with contextlib.closing(DiskFile(folder / FILE_NAME, writable=False)) as file:
            data = read_whole(file, 0, 2 * SECTOR_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:  # it may be whole: the drive has a bad moment
        raise StoreError(f"{folder / FILE_NAME} cannot be read: {error}") from error
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


def _digest(data: bytes | bytearray, person: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES, person=person).digest()
