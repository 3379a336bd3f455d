"""Objects in a shared store, one for each block: their names and seals.

An object's name has everything that decides a block's bytes: the format, the namespace's digest,
the rank and the number of ranks, the block's key. Servers that agree in all of it share blocks;
others ask for other names, and so do other formats. The seal behind the bytes repeats the name,
under a checksum over both. So a wrong block is never taken for the requested one, whatever a store
answers.

With encryption, names are digests under the fleet's key: another key leads to other names, and the
names do not help to guess a prompt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import xxhash

from kvferry.core.keys import KEY_BYTES
from kvferry.hostmem.slots import PrivateMemory
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, Cipher, derived_key

FORMAT = 2
"""Version of names and seals. It is part of every name, so no other version is ever read."""

SHARED = 0
"""The generation in which all servers begin. A server that forgets moves to one of its own."""

# magic, format, 0, block bytes, namespace, key, rank, number of ranks
_SEAL = struct.Struct("<8sIIQ32s32sII")
_MAGIC = b"kvferry\x00"
_DIGEST_BYTES = 16
SEAL_BYTES = _SEAL.size + _DIGEST_BYTES


@dataclass(frozen=True)
class ObjectFormat:
    """Names and seals of the blocks of one rank of one namespace.

    With encryption, ``secret`` is the key of this rank's blocks alone (:meth:`with_key`).
    """

    namespace: bytes
    block_bytes: int
    rank: int = 0
    num_ranks: int = 1
    secret: bytes | None = field(default=None, repr=False)

    def with_key(self, key: bytes | None) -> ObjectFormat:
        """Return this format, encrypted with a key that is derived from the fleet's key."""
        if key is None:
            return self
        return replace(self, secret=derived_key(key, self.head(bytes(KEY_BYTES)), b"kvferry-fleet"))

    @property
    def object_bytes(self) -> int:
        return self.block_bytes + (SEAL_BYTES if self.secret is None else TAG_BYTES + NONCE_BYTES)

    def folder(self, generation: int = SHARED) -> str:
        """Return the first part of the names of all blocks of one generation."""
        namespace = self._hidden(self.namespace)
        return (
            f"kvferry-{FORMAT}/{namespace.hex()}/r{self.rank}of{self.num_ranks}/{generation:016x}"
        )

    def names(self, keys: Iterable[bytes], generation: int = SHARED) -> list[str]:
        folder = self.folder(generation)
        return [f"{folder}/{self._hidden(key).hex()}" for key in keys]

    def _hidden(self, content: bytes) -> bytes:
        if self.secret is None:
            return content
        return hashlib.blake2b(
            content, key=self.secret, digest_size=32, person=b"kvferry-names"
        ).digest()

    def seal(self, block: memoryview, key: bytes) -> bytes:
        """Return the seal that is stored behind these bytes."""
        head = self.head(key)
        digest = xxhash.xxh3_128(block)
        digest.update(head)
        return head + digest.digest()

    def head(self, key: bytes) -> bytes:
        """Return everything but the bytes that must agree for a block."""
        assert len(key) == KEY_BYTES
        return _SEAL.pack(
            _MAGIC, FORMAT, 0, self.block_bytes, self.namespace, key, self.rank, self.num_ranks
        )


class ChecksumSealer:
    """Seals with xxh3-128 behind the bytes: it detects every fault of a store, but no forgery.

    Works in place: ``| the block's bytes | seal |``.
    """

    def __init__(self, objects: ObjectFormat) -> None:
        self._objects = objects

    def plain(self, room: memoryview) -> memoryview:
        """Return the memory that takes a block's bytes before :meth:`seal`."""
        return room[: self._objects.block_bytes]

    def seal(self, room: memoryview, key: bytes) -> None:
        """Make the object of the block with this key, whose bytes are in :meth:`plain`."""
        room[self._objects.block_bytes :] = self._objects.seal(self.plain(room), key)

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        """Return the bytes of the block with this key, until the next call; None if foreign."""
        block = self.plain(stored)
        return block if stored[len(block) :] == self._objects.seal(block, key) else None


class AesSealer:
    """Seals with AES-256-GCM: without the secret, blocks can neither be read nor forged.

    Works on a copy: ``| sealed bytes | tag | nonce |``. The methods are those of
    :class:`ChecksumSealer`.
    """

    def __init__(self, objects: ObjectFormat) -> None:
        assert objects.secret is not None
        self._objects = objects
        self._cipher = Cipher(objects.secret, "remote_key_file", "remote-encryption")
        self._block = PrivateMemory(objects.block_bytes).bytes.data

    def plain(self, room: memoryview) -> memoryview:
        return self._block

    def seal(self, room: memoryview, key: bytes) -> None:
        sealed = room[:-NONCE_BYTES]
        room[-NONCE_BYTES:] = self._cipher.seal(self._block, self._objects.head(key), sealed)

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        if len(stored) != self._objects.object_bytes:
            return None
        sealed, nonce = stored[:-NONCE_BYTES], bytes(stored[-NONCE_BYTES:])
        is_ours = self._cipher.unseal(nonce, sealed, self._objects.head(key), self._block)
        return self._block if is_ours else None


Sealer = ChecksumSealer | AesSealer
"""Converts blocks to objects and back, for one thread and one block at a time."""


def open_sealer(objects: ObjectFormat) -> Sealer:
    """Return the sealer of a format: AES if it has a secret, else checksums."""
    return ChecksumSealer(objects) if objects.secret is None else AesSealer(objects)
