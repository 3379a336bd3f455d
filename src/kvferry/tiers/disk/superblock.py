"""The superblock of a store: its identity and its size.

The superblock is one sector, stored twice in a file of constant length. The first copy is written
and synced, then the second: at every moment one of them is intact, and the first intact one counts.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import struct
import time
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.errors import StoreError
from kvferry.tiers.disk.files import (
    DIGEST_BYTES,
    SECTOR,
    SECTOR_BYTES,
    DiskFile,
    read_whole,
    write_whole,
)

NAMESPACE_BYTES = 32
MAX_LABEL_BYTES = 256
FOLDER = re.compile(r"kvferry-[0-9a-f]{16}-r[0-9]+of[0-9]+-d[0-9]+of[0-9]+")
"""Pattern of the name of a store's folder."""

FILE_NAME = "superblock"
FILE_BYTES = 4096
FORMAT_VERSION = 3
MAGIC = b"KVFERRY\0"
STORE_ID_BYTES = 16
CHECK_BYTES = 16
HASH_BYTES, SEAL_BYTES = 16, 28
"""Bytes of a block's proof without and with encryption: see ``block_file``."""

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


class StoreAt(NamedTuple):
    """A store's folder, its random id, and the host that has it open."""

    folder: str
    store_id: bytes
    host: str = ""


@dataclass(frozen=True)
class StoreIdentity:
    """What must match before a store is read: the blocks' origin, size, rank and drive.

    ``namespace`` decides the bytes of this rank's blocks; ``family`` is the same for all ranks of
    one engine. ``label`` is for people, and need not match.
    """

    namespace: bytes
    block_bytes: int
    is_sealed: bool = False
    rank: int = 0
    num_ranks: int = 1
    stripe: int = 0
    num_stripes: int = 1
    family: bytes = b""
    label: str = ""

    @property
    def pitch(self) -> int:
        """Bytes from one place to the next: a multiple of ``SECTOR``, as O_DIRECT needs."""
        return -(-self.block_bytes // SECTOR) * SECTOR

    @property
    def proof_bytes(self) -> int:
        return SEAL_BYTES if self.is_sealed else HASH_BYTES

    @property
    def folder_name(self) -> str:
        return (
            f"kvferry-{self.namespace.hex()[:16]}-r{self.rank}of{self.num_ranks}"
            f"-d{self.stripe}of{self.num_stripes}"
        )


@dataclass(frozen=True)
class DiskBound:
    """Limits on the bytes of stores under one directory.

    ``size`` bounds all of this host's stores there, of all servers; ``keep_free`` stays free on the
    file system. ``num_ranks_here`` ranks of this server share the space; so do the ranks of
    ``families``, all engines of this server here.
    """

    size: int
    keep_free: int = 0
    num_ranks_here: int = 1
    families: frozenset[bytes] = frozenset()


class SuperblockError(StoreError):
    """A superblock cannot be used. ``version`` is its format if that is another one, else 0."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True)
class Superblock:
    """A store's identity and size. ``key_check`` detects a wrong key; zeros without encryption."""

    identity: StoreIdentity
    num_places: int
    store_id: bytes = field(default_factory=lambda: secrets.token_bytes(STORE_ID_BYTES))
    key_check: bytes = bytes(CHECK_BYTES)
    created: int = field(default_factory=lambda: int(time.time()))

    def pack(self) -> bytes:
        sector = bytearray(SECTOR_BYTES)
        # The label is cut to the room for it, in whole characters.
        label = self.identity.label.encode()[:MAX_LABEL_BYTES].decode(errors="ignore").encode()
        mine = self.identity
        values: dict[str, Any] = {**vars(self), **vars(mine)}
        values |= {"pitch": mine.pitch, "proof_bytes": mine.proof_bytes}
        values |= {"family_bytes": len(mine.family), "label_bytes": len(label)}
        _HEAD.pack_into(sector, DIGEST_BYTES, MAGIC, FORMAT_VERSION)
        _FIELDS.pack_into(sector, _FIELDS_AT, *(values[name] for name in _NAMES))
        sector[_LABEL_AT : _LABEL_AT + len(label)] = label
        sector[:DIGEST_BYTES] = _digest(sector[DIGEST_BYTES:])
        return bytes(sector)

    @classmethod
    def unpack(cls, sector: bytes) -> Superblock:
        """Return the superblock in a sector. SuperblockError, with the reason, if it is invalid."""
        digest = _digest(sector[DIGEST_BYTES:])
        if len(sector) != SECTOR_BYTES or digest != sector[:DIGEST_BYTES]:
            raise SuperblockError("it is damaged: its checksum does not match")
        magic, version = _HEAD.unpack_from(sector, DIGEST_BYTES)
        if magic != MAGIC or version != FORMAT_VERSION:
            words = f"it has format {version}, this kvferry reads format {FORMAT_VERSION}"
            raise SuperblockError(words, version)
        values = dict(zip(_NAMES, _FIELDS.unpack_from(sector, _FIELDS_AT), strict=True))
        values["family"] = values["family"][: values["family_bytes"]]
        values["is_sealed"] = bool(values["is_sealed"])
        values["label"] = sector[_LABEL_AT : _LABEL_AT + values["label_bytes"]].decode()
        identity = StoreIdentity(**{each.name: values[each.name] for each in fields(StoreIdentity)})
        mine = {name: values[name] for name in ("num_places", "store_id", "key_check", "created")}
        return cls(identity, **mine)

    def write(self, folder: Path) -> None:
        """Write this superblock into the store's file, unless it is there; durable on return."""
        with contextlib.closing(DiskFile(folder / FILE_NAME)) as file:
            sector = self.pack()
            if read_whole(file, 0, 2 * SECTOR_BYTES) != sector * 2:
                for at in (0, SECTOR_BYTES):
                    write_whole(file, at, sector)
                    file.sync()


def read_superblock(folder: Path) -> Superblock | None:
    """Return the store's superblock, from an intact copy; None if there is no file.

    Raises SuperblockError if neither copy can be used, StoreError if the file cannot be read.
    """
    try:
        with contextlib.closing(DiskFile(folder / FILE_NAME, writable=False)) as file:
            data = read_whole(file, 0, 2 * SECTOR_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:  # it may be intact: the drive has a passing fault
        raise StoreError(f"{folder / FILE_NAME} cannot be read: {error}") from error
    faults = []
    for at in (0, SECTOR_BYTES):
        try:
            return Superblock.unpack(data[at : at + SECTOR_BYTES])
        except SuperblockError as error:
            faults.append(error)
    worst = max(faults, key=lambda fault: fault.version)
    raise SuperblockError(f"{folder / FILE_NAME}: {worst}", worst.version) from worst


def _digest(data: bytes | bytearray) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES, person=b"kvferry.super").digest()
