"""Objects in a shared store: their names, which blocks they hold, and the seal of each block.

Everything that decides a block's bytes is in its name: the format, the namespace's digest, the
rank and the number of ranks, the block's key. Servers that agree in all of it share blocks; others
cannot even ask for them, and a store in an older format is another place. The seal behind the bytes
repeats the name, under a checksum over both: whatever a store answers, a wrong block is never taken
for the one that was asked for.

Where blocks are encrypted, names are digests under the fleet's key: another key asks for other
names, and the names do not help to guess a prompt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import xxhash

from kvferry.core.keys import KEY_BYTES
from kvferry.hostmem.slots import PrivateMemory
from kvferry.settings.tiers import SPARE_BYTES
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, Cipher, derived_key

FORMAT = 2
"""Of names and seals. Another format is another place: it is never read as this one."""

SHARED = 0
"""The generation that all servers begin in. A server that forgets moves to one of its own."""

# magic, format, 0, bytes, namespace, key, rank, number of ranks
_SEAL = struct.Struct("<8sIIQ32s32sII")
_MAGIC = b"kvferry\x00"
_DIGEST_BYTES = 16
SEAL_BYTES = _SEAL.size + _DIGEST_BYTES
assert SEAL_BYTES <= SPARE_BYTES, "it lies behind a host slot"

_MOST_IN_ONE, _MOST_BYTES = 16, 8 << 20
"""The most that is ever taken for an object of ours, and so the most that is written."""

_SMALL_BYTES, _ENOUGH_BYTES, _ENOUGH_IN_ONE = 256 << 10, 1 << 20, 8
"""Larger blocks gain nothing in packs, and larger packs gain little. A request for one block reads
the whole pack, and a chain that leaves another inside a pack finds none of it
(``bench/remote_packs.py``, figures in docs/fleet.md)."""

_MOST_KNOWN = 1 << 17
"""As many answers as the scheduler remembers: what it believes to be there can be found."""


@dataclass(frozen=True)
class ObjectFormat:
    """Names and seals of the blocks of one rank of one namespace.

    ``secret`` is the key of this rank's blocks alone (:meth:`with_key`), where they are encrypted.
    """

    namespace: bytes
    block_bytes: int
    rank: int = 0
    num_ranks: int = 1
    secret: bytes | None = field(default=None, repr=False)

    def with_key(self, key: bytes | None) -> ObjectFormat:
        """The same, encrypted with a key that is derived from the fleet's."""
        if key is None:
            return self
        return replace(self, secret=derived_key(key, self.head(bytes(KEY_BYTES)), b"kvferry-fleet"))

    @property
    def object_bytes(self) -> int:
        """Bytes of a block with its seal."""
        return self.block_bytes + (SEAL_BYTES if self.secret is None else TAG_BYTES + NONCE_BYTES)

    def folder(self, generation: int = SHARED) -> str:
        """What the names of all blocks of one generation begin with."""
        namespace = self._hidden(self.namespace)
        return (
            f"kvferry-{FORMAT}/{namespace.hex()}/r{self.rank}of{self.num_ranks}/{generation:016x}"
        )

    def names(self, keys: Iterable[bytes], generation: int = SHARED) -> list[str]:
        """The names of blocks."""
        folder = self.folder(generation)
        return [f"{folder}/{self._hidden(key).hex()}" for key in keys]

    def _hidden(self, content: bytes) -> bytes:
        if self.secret is None:
            return content
        return hashlib.blake2b(
            content, key=self.secret, digest_size=32, person=b"kvferry-names"
        ).digest()

    def seal(self, block: memoryview, key: bytes) -> bytes:
        """What is stored behind these bytes."""
        head = self.head(key)
        return head + _digest(block, head)

    def is_whole(self, stored: memoryview, key: bytes) -> bool:
        """Whether these stored bytes are the block of this key, to the last bit."""
        if len(stored) != self.object_bytes:
            return False
        block, seal = stored[: self.block_bytes], bytes(stored[self.block_bytes :])
        return seal == self.seal(block, key)

    def head(self, key: bytes) -> bytes:
        """All that must agree for a block, besides its bytes."""
        assert len(key) == KEY_BYTES
        return _SEAL.pack(
            _MAGIC, FORMAT, 0, self.block_bytes, self.namespace, key, self.rank, self.num_ranks
        )


def _digest(block: memoryview, head: bytes) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(block)
    digest.update(head)
    return digest.digest()


class ChecksumSealer:
    """xxh3-128 behind the bytes: detects every fault of a store, but no forgery.

    Works where the bytes are: ``| the block's bytes | seal |``.
    """

    def __init__(self, objects: ObjectFormat) -> None:
        self._objects = objects

    def plain(self, room: memoryview) -> memoryview:
        """Where the bytes of a block belong before it is sealed into this room."""
        return room[: self._objects.block_bytes]

    def seal(self, room: memoryview, key: bytes) -> None:
        """Make the object of the block with this key; its bytes are in :meth:`plain`."""
        room[self._objects.block_bytes :] = self._objects.seal(self.plain(room), key)

    def unseal(self, stored: memoryview, key: bytes) -> memoryview | None:
        """The bytes of the block with this key, valid until the next call; None: it is foreign."""
        return self.plain(stored) if self._objects.is_whole(stored, key) else None


class AesSealer:
    """AES-256-GCM: without the key blocks can neither be read nor forged.

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
"""Makes objects of blocks, and blocks of objects. One thread; one block at a time."""


def open_sealer(objects: ObjectFormat) -> Sealer:
    """The sealer of a format: AES where it has a secret, else checksums."""
    return ChecksumSealer(objects) if objects.secret is None else AesSealer(objects)


# -- several blocks of a chain in one object ------------------------------------------------------
#
#     chain     k0 k1 k2 k3 k4 k5 k6 k7 k8 k9
#     objects   [           k4][     k7]   [k9]      an object has the name of its last block
#
# A key stands for the whole chain before it. A lookup that knows the chain finds an object by its
# name and sees how many blocks it has: that tells which those are. A lookup that does not know the
# chain is never told wrongly of one, because each block is verified by itself when it is read. Two
# servers may give one name to objects of different length: where the store can compare, the longer
# one stays.


def most_in_one(object_bytes: int) -> int:
    """How many blocks of this size an object may have, whichever server wrote it."""
    return max(1, min(_MOST_IN_ONE, _MOST_BYTES // object_bytes))


def best_in_one(block_bytes: int, object_bytes: int, told: int | None) -> int:
    """How many blocks are written into one object: as the settings say, or what is fast."""
    fast = min(_ENOUGH_IN_ONE, _ENOUGH_BYTES // block_bytes) if block_bytes <= _SMALL_BYTES else 1
    return min(told if told is not None else fast, most_in_one(object_bytes))


@dataclass(frozen=True)
class StoreObject:
    """An object, and the blocks of a batch that are in it.

    ``positions`` are the batch's; ``behind`` is for each how many blocks come behind it in the
    object. ``num_blocks`` are in it, as far as is known.
    """

    name: str
    positions: Sequence[int]
    behind: Sequence[int]
    num_blocks: int


def pack_objects(
    names: Sequence[str], runs: npt.NDArray[Any] | None, most: int
) -> list[StoreObject]:
    """The objects to write these blocks as: the runs in order, at most so many blocks in each."""
    if runs is None or most == 1:
        return [StoreObject(name, (at,), (0,), 1) for at, name in enumerate(names)]
    numbers, objects, start = runs.tolist(), [], 0
    for stop in range(1, len(names) + 1):
        if stop == len(names) or numbers[stop] != numbers[start] or stop - start == most:
            count = stop - start
            behind = range(count - 1, -1, -1)
            objects.append(StoreObject(names[stop - 1], range(start, stop), behind, count))
            start = stop
    return objects


class ObjectIndex:
    """Which object a block was last known to be in. Owns that, for at most ``capacity`` blocks.

    A block of which nothing is known is looked up under its own name.
    """

    def __init__(self, capacity: int = _MOST_KNOWN) -> None:
        self._capacity = capacity
        self._known: dict[str, tuple[str, int, int]] = {}  # object, blocks behind, blocks in all

    def note(self, found: StoreObject, names: Sequence[str]) -> None:
        """Blocks of a batch with these ``names`` are in this object."""
        for at, behind in zip(found.positions, found.behind, strict=True):
            self.drop(names[at])
            if found.num_blocks > 1:
                self._known[names[at]] = (found.name, behind, found.num_blocks)
        while len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]

    def drop(self, name: str) -> None:
        """The block of this name is not where it was."""
        self._known.pop(name, None)

    def objects_of(self, names: Sequence[str]) -> list[StoreObject]:
        """The objects to read these blocks from."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for at, name in enumerate(names):
            where, behind, count = self._known.get(name, (name, 0, 1))
            found.setdefault(where, []).append((at, behind, count))
        objects = []
        for name, blocks in found.items():
            positions, behinds, counts = zip(*blocks, strict=True)
            objects.append(StoreObject(name, positions, behinds, max(counts)))
        return objects


class PackLookup:
    """One question's answers so far. Owns which objects were found to have its blocks.

    ``is_suspect(object, block)`` takes two positions: whether the object of the first is known to
    have a foreign block in the place of the second.
    """

    def __init__(
        self,
        names: Sequence[str],
        runs: npt.NDArray[Any] | None,
        is_suspect: Callable[[int, int], bool],
    ) -> None:
        self._names = names
        self._runs = runs.tolist() if runs is not None else range(len(names))
        self._is_suspect = is_suspect
        self._objects: list[list[int]] = [[] for _ in names]  # that have each block
        self._counts: dict[int, int] = {}

    def order(self, most: int) -> list[int]:
        """Every position: first those where an object of so many blocks would end.

        What those objects cover need not be asked for any more. Of the others the last come first,
        because an object goes back from its name.
        """
        coarse: list[int] = []
        fine: list[int] = []
        start = 0
        for at, run in enumerate(self._runs):
            if run != self._runs[start]:
                start = at
            is_last = at + 1 == len(self._names) or self._runs[at + 1] != run
            (coarse if is_last or (at - start + 1) % most == 0 else fine).append(at)
        return coarse + fine[::-1]

    def is_answered(self, at: int) -> bool:
        """Whether this block's name can add nothing: it was found, and all blocks before it.

        A found object may go back less far than another with the name of a block inside it.
        """
        reach = range(at, max(-1, at - _MOST_IN_ONE), -1)
        return all(self._objects[each] for each in reach if self._runs[each] == self._runs[at])

    def found(self, at: int, num_blocks: int) -> None:
        """There is an object with the name of this block, and with so many blocks."""
        self._counts[at] = num_blocks
        for block in range(at, max(-1, at - num_blocks), -1):
            if self._runs[block] != self._runs[at]:
                break
            if not self._is_suspect(at, block):
                self._objects[block].append(at)

    def objects(self) -> list[StoreObject]:
        """Each block that was found, in one object: in as few objects as possible."""
        chosen: dict[int, list[int]] = {}
        last = -1
        for at in range(len(self._names) - 1, -1, -1):
            objects = self._objects[at]
            if objects and last not in objects:
                last = min(objects, key=lambda each: each - self._counts[each])
            if objects:
                chosen.setdefault(last, []).append(at)
        return [
            StoreObject(self._names[of], blocks, [of - at for at in blocks], self._counts[of])
            for of, blocks in chosen.items()
        ]
