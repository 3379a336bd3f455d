"""What blocks are called in a shared store, and the seal that proves that a block is ours.

Everything that decides a block's bytes is in its name: the format, the namespace's digest, the
rank's part of how many, the block's key. Servers that agree in all of it share; others cannot even
ask. The seal behind the bytes says the same again, under a checksum over both, so whatever a store
answers with, a wrong block is never taken for the one asked for.

Where blocks are encrypted, names are digests under the fleet's key: who has another key asks for
other names, and who sees the names cannot even try which prompt would give them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import xxhash

from kvferry.remote_settings import SPARE_BYTES
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, derived_key
from kvferry.types import KEY_BYTES

FORMAT = 2
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
    """Whose blocks these are: names and seals of one rank of one namespace.

    ``secret`` is the key of this rank's blocks alone (:meth:`with_key`), where they are encrypted.
    """

    namespace: bytes
    block_bytes: int
    rank: int = 0
    num_ranks: int = 1
    secret: bytes | None = field(default=None, repr=False)

    def with_key(self, key: bytes | None) -> Whose:
        """The same, encrypted with a key that is derived from the fleet's."""
        if key is None:
            return self
        return replace(self, secret=derived_key(key, self.head(bytes(KEY_BYTES)), b"kvferry-fleet"))

    @property
    def object_bytes(self) -> int:
        """A block with its proof."""
        return self.block_bytes + (SEAL_BYTES if self.secret is None else TAG_BYTES + NONCE_BYTES)

    def folder(self, generation: int = SHARED) -> str:
        """What the names of all blocks of one generation begin with."""
        namespace = self._hidden(self.namespace)
        return (
            f"kvferry-{FORMAT}/{namespace.hex()}/r{self.rank}of{self.num_ranks}/{generation:016x}"
        )

    def names(self, keys: Iterable[bytes], generation: int = SHARED) -> list[str]:
        folder = self.folder(generation)
        return [f"{folder}/{self._hidden(key).hex()}" for key in keys]

    def _hidden(self, what: bytes) -> bytes:
        if self.secret is None:
            return what
        return hashlib.blake2b(
            what, key=self.secret, digest_size=32, person=b"kvferry-names"
        ).digest()

    def seal(self, block: memoryview, key: bytes) -> bytes:
        """What is stored behind these bytes."""
        head = self.head(key)
        return head + _digest(block, head)

    def is_whole(self, stored: memoryview, key: bytes) -> bool:
        """Whether these stored bytes are this block of ours, to the last bit."""
        if len(stored) != self.object_bytes:
            return False
        block, seal = stored[: self.block_bytes], bytes(stored[self.block_bytes :])
        head = self.head(key)
        return seal[: _SEAL.size] == head and seal[_SEAL.size :] == _digest(block, head)

    def head(self, key: bytes) -> bytes:
        """Everything but its bytes that a block must agree with."""
        assert len(key) == KEY_BYTES
        return _SEAL.pack(
            _MAGIC, FORMAT, 0, self.block_bytes, self.namespace, key, self.rank, self.num_ranks
        )


def _digest(block: memoryview, head: bytes) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(block)
    digest.update(head)
    return digest.digest()
