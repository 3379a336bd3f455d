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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy.typing as npt
import xxhash

from kvferry.hostmem.mapping import PrivateMemory
from kvferry.settings.remote import SPARE_BYTES
from kvferry.tiers.cipher import NONCE_BYTES, TAG_BYTES, Cipher, derived_key
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


# ------------------------------------------------------------------------------------------------
# Several blocks of a chain in one object: how a write is cut, and which object has a block.
#
# ::
#
#     chain     k0 k1 k2 k3 k4 k5 k6 k7 k8 k9
#     objects   [           k4][     k7]   [k9]      an object has the name of its last block
#
# A key stands for the whole chain before it. So who knows the chain, finds an object by its name
# and
# sees how many blocks it has, knows which those are; and whoever does not know the chain is told
# wrongly of none, because each block is proven by itself when it is read. Two servers may give one
# name to objects of different length: where the server can tell, the longer stays (``s3.py``).

_MOST_IN_ONE, _MOST_BYTES = 16, 8 << 20
"""The most that is ever taken for an object of ours, and so the most that is written."""

_SMALL_BYTES, _ENOUGH_BYTES = 256 << 10, 1 << 20
_ENOUGH_IN_ONE = 8
"""Larger blocks gain nothing in packs; and larger packs little more, while who needs one block of
them reads all, and whose chain leaves theirs in their midst finds none. (``bench/remote_packs.py``,
figures in docs/fleet.md.)"""

_MOST_KNOWN = 1 << 17
"""As many as the scheduler remembers answers for: what it believes to be there, we can find."""


def most_in_one(object_bytes: int) -> int:
    """How many blocks of this size an object may have, whoever wrote it."""
    return max(1, min(_MOST_IN_ONE, _MOST_BYTES // object_bytes))


def best_in_one(block_bytes: int, object_bytes: int, told: int | None) -> int:
    """How many blocks we write into one object: as the settings say, or what is fast."""
    fast = min(_ENOUGH_IN_ONE, _ENOUGH_BYTES // block_bytes) if block_bytes <= _SMALL_BYTES else 1
    return min(told if told is not None else fast, most_in_one(object_bytes))


@dataclass(frozen=True)
class Parcel:
    """An object, and those of an order's blocks that are in it.

    ``positions`` are the order's; ``behind`` says for each how many blocks come behind it in the
    object. ``num_blocks`` are in it, as far as is known.
    """

    name: str
    positions: Sequence[int]
    behind: Sequence[int]
    num_blocks: int


def cut(names: Sequence[str], runs: npt.NDArray[Any] | None, most: int) -> list[Parcel]:
    """The objects to write these blocks as: runs in order, so many blocks each."""
    if runs is None or most == 1:
        return [Parcel(name, (at,), (0,), 1) for at, name in enumerate(names)]
    numbers, parcels, start = runs.tolist(), [], 0
    for stop in range(1, len(names) + 1):
        if stop == len(names) or numbers[stop] != numbers[start] or stop - start == most:
            positions = range(start, stop)
            behind = range(len(positions) - 1, -1, -1)
            parcels.append(Parcel(names[stop - 1], positions, behind, len(positions)))
            start = stop
    return parcels


class Whereabouts:
    """Which object a block was last known to be in. Owns that, for so many blocks.

    A block of which nothing is known is looked for under its own name.
    """

    def __init__(self, capacity: int = _MOST_KNOWN) -> None:
        self._capacity = capacity
        self._known: dict[str, tuple[str, int, int]] = {}  # the object, blocks behind it, all

    def note(self, parcel: Parcel, names: Sequence[str]) -> None:
        """Blocks of an order, whose ``names`` these are, are in this object."""
        for at, behind in zip(parcel.positions, parcel.behind, strict=True):
            self.drop(names[at])
            if parcel.num_blocks > 1:
                self._known[names[at]] = (parcel.name, behind, parcel.num_blocks)
        while len(self._known) > self._capacity:
            del self._known[next(iter(self._known))]

    def drop(self, name: str) -> None:
        """The block of this name is not where it was."""
        self._known.pop(name, None)

    def parcels(self, names: Sequence[str]) -> list[Parcel]:
        """The objects to read these blocks from."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for at, name in enumerate(names):
            where, behind, count = self._known.get(name, (name, 0, 1))
            found.setdefault(where, []).append((at, behind, count))
        return [
            Parcel(
                name,
                [at for at, _, _ in blocks],
                [behind for _, behind, _ in blocks],
                max(count for _, _, count in blocks),
            )
            for name, blocks in found.items()
        ]


class LookUp:
    """What was heard so far of one question's blocks. Owns which objects there are of theirs.

    ``is_doubted(object, block)`` says of two positions that the one's object is known not to have
    the other's block as it should be.
    """

    def __init__(
        self,
        names: Sequence[str],
        runs: npt.NDArray[Any] | None,
        is_doubted: Callable[[int, int], bool],
    ) -> None:
        self._names = names
        self._runs = runs.tolist() if runs is not None else range(len(names))
        self._is_doubted = is_doubted
        self._objects: list[list[int]] = [[] for _ in names]  # that have each block
        self._counts: dict[int, int] = {}

    def in_order(self, most: int) -> list[int]:
        """Every position: first those where an object of so many blocks would end.

        What these turn out to cover need not be asked for any more; of the others the last first,
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

    def is_told(self, at: int) -> bool:
        """Whether this block's name can tell nothing more: an object has it, and all before it.

        One that was found may go back less far than another with the name of a block in its midst.
        """
        reach = range(at, max(-1, at - _MOST_IN_ONE), -1)
        return all(self._objects[each] for each in reach if self._runs[each] == self._runs[at])

    def found(self, at: int, num_blocks: int) -> None:
        """There is an object with the name of this block, and with so many blocks."""
        self._counts[at] = num_blocks
        for block in range(at, max(-1, at - num_blocks), -1):
            if self._runs[block] != self._runs[at]:
                break
            if not self._is_doubted(at, block):
                self._objects[block].append(at)

    def parcels(self) -> list[Parcel]:
        """Each block that is there, in one object: as few objects as will do."""
        chosen: dict[int, list[int]] = {}
        last = -1
        for at in range(len(self._names) - 1, -1, -1):
            objects = self._objects[at]
            if objects and last not in objects:
                last = min(objects, key=lambda each: each - self._counts[each])
            if objects:
                chosen.setdefault(last, []).append(at)
        return [
            Parcel(self._names[of], blocks, [of - at for at in blocks], self._counts[of])
            for of, blocks in chosen.items()
        ]


# ------------------------------------------------------------------------------------------------
# A block as it lies in a shared store, and the proof that it is ours: checksums, or AES-GCM.
#
# ::
#
#     without a key   | the block's bytes | seal |          the seal says whose, under a checksum
#     with a key      | sealed bytes | tag | nonce |        whose it is was sealed with it
#
# The first can be made and checked where the bytes are. The second is another copy.


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
