"""What proves that bytes are the block that was written: its content, its key and its place.

Without a key: xxh3-128 over the bytes, seeded by key, place and store, so that a block that was
damaged, mixed up by the drive, or left by somebody else does not match. With one: AES-256-GCM, with
key, place and store as associated data; the tag is the proof, and the drive sees no plain byte.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, Cipher, derived_key
from kvferry.tiers.disk.messages import Numbers, Words
from kvferry.tiers.disk.status import Flags
from kvferry.tiers.mapping import PrivateMemory

Proofs = npt.NDArray[np.uint8]


class Buffer:
    """Blocks on their way, ``pitch`` bytes apart: ``plain`` as the engine has them, ``stored`` as
    the drive has them. One memory where these are the same.
    """

    def __init__(self, num_blocks: int, pitch: int, *, is_sealed: bool) -> None:
        self._memory = PrivateMemory(num_blocks * pitch).bytes
        self.pitch = pitch
        self.plain = self._memory.data
        self.address = int(self._memory.ctypes.data)
        self.stored = self.plain
        if is_sealed:  # and room for the tag that follows the last block
            self.stored = PrivateMemory(num_blocks * pitch + TAG_BYTES).bytes.data


class Prover(Protocol):
    """Makes proofs of blocks in a buffer, and checks them."""

    proof_bytes: int
    is_sealed: bool

    def prove(self, buffer: Buffer, places: Numbers, keys: Words) -> Proofs:
        """Bring blocks 0, 1, ... from plain to stored; returns a proof of each."""

    def check(self, buffer: Buffer, places: Numbers, keys: Words, proofs: Proofs) -> Flags:
        """Bring blocks 0, 1, ... from stored to plain; says which are what they should be."""


class Digests:
    """xxh3-128: finds every fault of a drive, and no forger."""

    proof_bytes = 16
    is_sealed = False

    def __init__(self, block_bytes: int, store: bytes) -> None:
        try:
            import xxhash
        except ImportError as error:
            raise ConfigError(f"disk: {error}; pip install 'kvferry[disk]'") from error
        self._digest: Any = xxhash.xxh3_128_digest
        self._seed: Any = xxhash.xxh3_64_intdigest
        self._block_bytes = block_bytes
        self._store = hashlib.blake2b(store, digest_size=32, person=b"kvferry-digest").digest()

    def prove(self, buffer: Buffer, places: Numbers, keys: Words) -> Proofs:
        return np.frombuffer(
            b"".join(
                self._digest(buffer.plain[start : start + self._block_bytes], seed=seed)
                for start, seed in self._each(buffer, places, keys)
            ),
            dtype=np.uint8,
        ).reshape(-1, self.proof_bytes)

    def check(self, buffer: Buffer, places: Numbers, keys: Words, proofs: Proofs) -> Flags:
        return (self.prove(buffer, places, keys) == proofs).all(axis=1)

    def _each(self, buffer: Buffer, places: Numbers, keys: Words) -> list[tuple[int, int]]:
        names = _names(places, keys, self._store)
        return [(at * buffer.pitch, self._seed(name)) for at, name in enumerate(names)]


class Seals:
    """AES-256-GCM under a key of the store's own."""

    proof_bytes = NONCE_BYTES + TAG_BYTES
    is_sealed = True

    def __init__(self, block_bytes: int, store: bytes, key: bytes) -> None:
        self._cipher = Cipher(store_key(key, store), "disk_key_file", "disk-encryption")
        self._block_bytes = block_bytes
        self._store = hashlib.blake2b(store, digest_size=32, person=b"kvferry-seal").digest()

    def prove(self, buffer: Buffer, places: Numbers, keys: Words) -> Proofs:
        proofs = np.empty((len(places), self.proof_bytes), dtype=np.uint8)
        for at, name in enumerate(_names(places, keys, self._store)):
            start = at * buffer.pitch
            end = start + self._block_bytes
            # The tag lands where the next block begins, which comes next and overwrites it.
            out = buffer.stored[start : end + TAG_BYTES]
            nonce = self._cipher.seal(buffer.plain[start:end], name, out)
            proofs[at] = np.frombuffer(nonce + bytes(out[-TAG_BYTES:]), dtype=np.uint8)
            out[-TAG_BYTES:] = bytes(TAG_BYTES)
        return proofs

    def check(self, buffer: Buffer, places: Numbers, keys: Words, proofs: Proofs) -> Flags:
        ok = np.zeros(len(places), dtype=bool)
        for at, name in enumerate(_names(places, keys, self._store)):
            start = at * buffer.pitch
            end = start + self._block_bytes
            sealed = buffer.stored[start : end + TAG_BYTES]
            proof = proofs[at].tobytes()
            after = bytes(sealed[-TAG_BYTES:])  # the next block's first bytes
            sealed[-TAG_BYTES:] = proof[NONCE_BYTES:]
            plain = buffer.plain[start:end]
            ok[at] = self._cipher.unseal(proof[:NONCE_BYTES], sealed, name, plain)
            sealed[-TAG_BYTES:] = after
        return ok


def open_prover(block_bytes: int, store: bytes, key: bytes | None) -> Prover:
    """Proofs for the store with this identity, sealed if there is a key."""
    return Digests(block_bytes, store) if key is None else Seals(block_bytes, store, key)


def store_key(key: bytes, store: bytes) -> bytes:
    """The key of one store: what one rank and drive seal never meets another's nonces."""
    return derived_key(key, store, b"kvferry-store")


def key_check(key: bytes, store: bytes) -> bytes:
    """What a store keeps to tell a wrong key by: it says nothing of the key."""
    return hashlib.blake2b(
        b"check", key=store_key(key, store), digest_size=16, person=b"kvferry-check"
    ).digest()


def _names(places: Numbers, keys: Words, store: bytes) -> list[bytes]:
    """Everything but its content that a block must agree with, one text of bytes each."""
    key, place = keys.tobytes(), places.tobytes()
    return [
        key[32 * at : 32 * at + 32] + place[8 * at : 8 * at + 8] + store
        for at in range(len(places))
    ]
