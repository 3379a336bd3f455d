"""The file of a store's blocks, and the proofs that bytes read are the blocks that were written.

Place ``p`` (a slot on disk) is the ``pitch`` bytes from ``p * pitch`` on. Adjacent places are read
and written by one long call. Calls use O_DIRECT if the file system has it: the page cache would
only hold a second copy of what host memory holds. Otherwise the kernel is told to drop the pages.

A proof covers a block's content, its key and its place. Without encryption it is xxh3-128 over the
bytes, seeded by key, place and store: a block that was damaged, mixed up by the drive, or left by
another store does not match. With encryption it is AES-256-GCM with key, place and store as
associated data; the tag is the proof, and the drive holds no plaintext.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, TransferError, install
from kvferry.hostmem.slots import PrivateMemory
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, Cipher, derived_key
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.files import SECTOR, open_file, runs
from kvferry.tiers.disk.superblock import HASH_BYTES, SEAL_BYTES
from kvferry.tiers.ipc.messages import Flags, Numbers, Words

_Call = Callable[[int, list[memoryview], int], int]


class BlockFile:
    """The places of one store on a drive. Owns the descriptor. Any thread may read and write."""

    def __init__(self, path: str, pitch: int) -> None:
        self._path = path
        self._pitch = pitch
        self.is_direct = True
        try:
            self._fd = open_file(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = open_file(path, os.O_RDWR)
            self.is_direct = False

    def read(self, place: int, data: memoryview) -> None:
        at = place * self._pitch
        self._transfer(os.preadv, at, data)
        if not self.is_direct:
            os.posix_fadvise(self._fd, at, len(data), os.POSIX_FADV_DONTNEED)

    def write(self, place: int, data: memoryview) -> None:
        self._transfer(os.pwritev, place * self._pitch, data)

    def _transfer(self, call: _Call, at: int, data: memoryview) -> None:
        while len(data):
            done = self._call(call, at, data)
            done = done if done == len(data) else done - done % SECTOR
            if not done:
                raise OSError(errno.EIO, f"less than a sector was moved at {at}, or the file ends")
            at, data = at + done, data[done:]

    def move(
        self, way: Way, places: Numbers, slots: Numbers, buffer: Buffer
    ) -> Iterator[tuple[int, int, Exception | None]]:
        """Read or write blocks, one call per run of adjacent places; yield ranges and their errors.

        ``slots`` are the blocks' positions in the buffer. The blocks of a failed run are tried one
        by one: one bad block fails alone.
        """
        call = self.read if way is Way.READ else self.write
        there, here = places.tolist(), slots.tolist()

        def attempt(first: int, last: int) -> Exception | None:
            start, end = here[first] * self._pitch, (here[first] + last - first) * self._pitch
            try:
                call(there[first], buffer.stored[start:end])
            except Exception as error:  # a faulty drive may raise anything
                return error
            return None

        for first, last in runs(places, slots):
            if (error := attempt(first, last)) is None or last - first == 1:
                yield first, last, error
            else:
                for at in range(first, last):
                    yield at, at + 1, attempt(at, at + 1)

    def sync(self) -> None:
        """Return once everything written is on the medium."""
        os.fdatasync(self._fd)
        if not self.is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raise OSError or TransferError if the path names another file now, or none."""
        mine, named = os.fstat(self._fd), os.lstat(self._path)
        if (mine.st_dev, mine.st_ino) != (named.st_dev, named.st_ino):
            raise TransferError(f"{self._path} is another file now")

    @property
    def is_whole(self) -> bool:
        """Whether the file system has reserved the whole file: writing cannot make it grow."""
        found = os.fstat(self._fd)
        return found.st_blocks * 512 >= found.st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _call(self, call: _Call, at: int, data: memoryview) -> int:
        try:
            return call(self._fd, [data], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        # The file system accepted O_DIRECT at open and refuses it now: go on without.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        return call(self._fd, [data], at)


Proofs = npt.NDArray[np.uint8]


class Buffer:
    """Holds blocks on their way between engine and drive, ``pitch`` bytes apart.

    ``plain`` is the engine's form, ``stored`` the drive's; one memory without encryption.
    """

    def __init__(self, num_blocks: int, pitch: int, *, is_sealed: bool) -> None:
        self._memory = PrivateMemory(num_blocks * pitch).bytes
        self.pitch = pitch
        self.plain = self._memory.data
        self.address = int(self._memory.ctypes.data)
        self.stored = self.plain
        if is_sealed:  # and room for the tag that follows the last block
            self.stored = PrivateMemory(num_blocks * pitch + TAG_BYTES).bytes.data


class HashProver:
    """Makes proofs with xxh3-128: they detect every fault of a drive, but no forgery."""

    proof_bytes = HASH_BYTES
    is_sealed = False

    def __init__(self, block_bytes: int, store: bytes) -> None:
        try:
            import xxhash
        except ImportError as error:
            raise ConfigError(f"disk: {error}; {install('disk')}") from error
        self._digest: Any = xxhash.xxh3_128_digest
        self._seed: Any = xxhash.xxh3_64_intdigest
        self._block_bytes = block_bytes
        self._store = hashlib.blake2b(store, digest_size=32, person=b"kvferry-digest").digest()

    def prove(self, buffer: Buffer, places: Numbers, keys: Words) -> Proofs:
        """Convert blocks 0, 1, ... of the buffer from plain to stored; return their proofs."""
        names = _names(places, keys, self._store)
        starts = range(0, len(names) * buffer.pitch, buffer.pitch)
        size, plain = self._block_bytes, buffer.plain
        return np.frombuffer(
            b"".join(
                self._digest(plain[start : start + size], seed=self._seed(name))
                for start, name in zip(starts, names, strict=True)
            ),
            dtype=np.uint8,
        ).reshape(-1, self.proof_bytes)

    def check(self, buffer: Buffer, places: Numbers, keys: Words, proofs: Proofs) -> Flags:
        """Convert blocks 0, 1, ... from stored to plain; return which match their proofs."""
        return (self.prove(buffer, places, keys) == proofs).all(axis=1)


class AesProver:
    """Makes proofs with AES-256-GCM under a key of the store's own; methods as in HashProver."""

    proof_bytes = SEAL_BYTES
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
            # The tag may overlap the next block, which is sealed after it and overwrites it.
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


Prover = HashProver | AesProver


def open_prover(block_bytes: int, store: bytes, key: bytes | None) -> Prover:
    """Return the object that makes and checks proofs: HashProver without a key, else AesProver."""
    return HashProver(block_bytes, store) if key is None else AesProver(block_bytes, store, key)


def store_key(key: bytes, store: bytes) -> bytes:
    """Derive one store's key from ``key``: no two ranks or drives share a cipher's nonces."""
    return derived_key(key, store, b"kvferry-store")


def key_check(key: bytes, store: bytes) -> bytes:
    """Return the digest by which a store detects a wrong key; it reveals nothing of the key."""
    return hashlib.blake2b(
        b"check", key=store_key(key, store), digest_size=16, person=b"kvferry-check"
    ).digest()


def _names(places: Numbers, keys: Words, store: bytes) -> list[bytes]:
    """Return for each block its key, its place and its store as one byte string."""
    key, place = keys.tobytes(), places.tobytes()
    return [
        key[32 * at : 32 * at + 32] + place[8 * at : 8 * at + 8] + store
        for at in range(len(places))
    ]
