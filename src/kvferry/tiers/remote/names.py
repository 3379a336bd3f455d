"""What blocks are called in a shared store, and the seal that proves that a block is ours.

Everything that decides a block's bytes is in its name: the format, the namespace's digest, the
rank's part of how many, the block's key. Servers that agree in all of it share; others cannot even
ask. The seal behind the bytes says the same again, under a checksum over both, so whatever a store
answers with, a wrong block is never taken for the one asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from kvferry.remote_settings import SPARE_BYTES
from kvferry.types import KEY_BYTES

FORMAT = 1
"""Of names and seals. Another format is another place: never read as if it were ours."""

SHARED = 0
"""The generation that all servers begin in. Who forgets goes to one of its own."""

_SEAL = struct.Struct(
    "<8sIIQ32s32sII"
)  # magic, format, 0, bytes, namespace, key, rank, of how many
_MAGIC = b"kvferry\x00"
_DIGEST_BYTES = 16
SEAL_BYTES = _SEAL.size + _DIGEST_BYTES
assert SEAL_BYTES <= SPARE_BYTES, "it lies behind a host slot"


@dataclass(frozen=True)
class Whose:
    """Whose blocks these are: names and seals of one rank of one namespace."""

    namespace: bytes
    block_bytes: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def object_bytes(self) -> int:
        """A block with its seal."""
        return self.block_bytes + SEAL_BYTES

    def folder(self, generation: int = SHARED) -> str:
        """What the names of all blocks of one generation begin with."""
        return (
            f"kvferry-{FORMAT}/{self.namespace.hex()}/r{self.rank}of{self.num_ranks}/"
            f"{generation:016x}"
        )

    def names(self, keys: Iterable[bytes], generation: int = SHARED) -> list[str]:
        folder = self.folder(generation)
        return [f"{folder}/{key.hex()}" for key in keys]

    def seal(self, block: memoryview, key: bytes) -> bytes:
        """What is stored behind these bytes."""
        head = self._head(key)
        return head + _digest(block, head)

    def is_whole(self, stored: memoryview, key: bytes) -> bool:
        """Whether these stored bytes are this block of ours, to the last bit."""
        if len(stored) != self.object_bytes:
            return False
        block, seal = stored[: self.block_bytes], bytes(stored[self.block_bytes :])
        head = self._head(key)
        return seal[: _SEAL.size] == head and seal[_SEAL.size :] == _digest(block, head)

    def _head(self, key: bytes) -> bytes:
        assert len(key) == KEY_BYTES
        return _SEAL.pack(
            _MAGIC, FORMAT, 0, self.block_bytes, self.namespace, key, self.rank, self.num_ranks
        )


def _digest(block: memoryview, head: bytes) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(block)
    digest.update(head)
    return digest.digest()
