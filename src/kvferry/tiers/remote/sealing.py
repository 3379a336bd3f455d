"""A block as it lies in a shared store, and the proof that it is ours: checksums, or AES-GCM.

::

    without a key   | the block's bytes | seal |          the seal says whose, under a checksum
    with a key      | sealed bytes | tag | nonce |        whose it is was sealed with it

The first can be made and checked where the bytes are. The second is another copy.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.tiers.cipher import NONCE_BYTES, Cipher
from kvferry.tiers.mapping import PrivateMemory
from kvferry.tiers.remote.names import Whose


class Sealing(Protocol):
    """Makes objects of blocks, and blocks of objects. One thread; one block at a time."""

    def plain(self, room: memoryview) -> memoryview:
        """Where the bytes of a block are to be before it is sealed into this room."""

    def seal(self, room: memoryview, key: bytes) -> None:
        """Make the object of the block with this key, whose bytes lie in :meth:`plain`."""

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        """The bytes of the block with this key, good until the next call; None: it is not ours."""


class Checksums:
    """xxh3-128 behind the bytes: finds every fault of a store, and no forger."""

    def __init__(self, whose: Whose) -> None:
        self._whose = whose

    def plain(self, room: memoryview) -> memoryview:
        return room[: self._whose.block_bytes]

    def seal(self, room: memoryview, key: bytes) -> None:
        block_bytes = self._whose.block_bytes
        room[block_bytes:] = self._whose.seal(room[:block_bytes], key)

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        return self.plain(stored) if self._whose.is_whole(stored, key) else None


class Encryption:
    """AES-256-GCM: who has not the key reads nothing, and makes nothing that is taken for ours."""

    def __init__(self, whose: Whose) -> None:
        assert whose.secret is not None
        self._whose = whose
        self._cipher = Cipher(whose.secret, "remote_key_file", "remote-encryption")
        self._block = PrivateMemory(whose.block_bytes).bytes.data

    def plain(self, room: memoryview) -> memoryview:
        return self._block

    def seal(self, room: memoryview, key: bytes) -> None:
        sealed = room[:-NONCE_BYTES]
        room[-NONCE_BYTES:] = self._cipher.seal(self._block, self._whose.head(key), sealed)

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        if len(stored) != self._whose.object_bytes:
            return None
        sealed, nonce = stored[:-NONCE_BYTES], bytes(stored[-NONCE_BYTES:])
        is_ours = self._cipher.unseal(nonce, sealed, self._whose.head(key), self._block)
        return self._block if is_ours else None


def open_sealing(whose: Whose) -> Sealing:
    return Checksums(whose) if whose.secret is None else Encryption(whose)
