"""The engine's own device blocks: reference counts, and a prefix cache over the free ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvferry.errors import InputError, IntegrityError, StateError
from kvferry.types import Key


class BlockPool:
    """Who holds which device block, and which block has which content.

    Owns block ids, their reference counts and the index from key to block; leaves the bytes to the
    device. A free block keeps its content and its key until it is handed out again, so the free
    blocks are the prefix cache, oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InputError(f"a device needs at least 1 block, got {num_blocks}")
        self._num_holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._index: dict[Key, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_allocated = 0
        """Blocks handed out so far."""

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def next_to_go(self, count: int) -> list[tuple[Key, int]]:
        """The cached ones among the first ``count`` free blocks to be handed out, soonest first."""
        keyed = ((self._keys[block], block) for block in islice(self._free, count))
        return [(key, block) for key, block in keyed if key is not None]

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def has(self, key: Key) -> bool:
        return key in self._index

    def acquire(self, keys: Iterable[Key]) -> list[int]:
        """Hold and return the blocks of these keys, all of which are here."""
        blocks = [self._index[key] for key in keys]
        self.hold(blocks)
        return blocks

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the oldest free ones; what they cached is forgotten."""
        if not self.can_allocate(count):
            raise StateError(f"{count} device blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_holders[block] = 1
        self.num_allocated += count
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each block: a request, or a transfer that reads or writes it."""
        for block in blocks:
            self._num_holders[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less. Give a request's blocks in order: its last block ages first."""
        for block in reversed(blocks):
            if self._num_holders[block] < 1:
                raise StateError(f"device block {block} was released by nobody who held it")
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                if self._keys[block] is None:  # nothing to lose: hand it out first
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: Key) -> None:
        """Make a held block findable by its content. A key already on the device stays as it is."""
        if not self._num_holders[block]:
            raise StateError(f"device block {block} is held by nobody, so its content can change")
        if key not in self._index:
            self._forget(block)
            self._index[key] = block
            self._keys[block] = key

    def check_integrity(self, *, num_held: int | None = None) -> None:
        """Prove that free + held == total and that the index and the blocks' keys agree."""
        held = sum(1 for holders in self._num_holders if holders)
        if held + len(self._free) != self.num_blocks:
            raise IntegrityError(f"{held} held + {len(self._free)} free != {self.num_blocks}")
        if any(self._num_holders[block] for block in self._free):
            raise IntegrityError("a free device block has a holder")
        if any(self._keys[block] != key for key, block in self._index.items()):
            raise IntegrityError("the index names a block that does not have that key")
        if len(self._index) != sum(key is not None for key in self._keys):
            raise IntegrityError("a block has a key the index does not know")
        if num_held is not None and held != num_held:
            raise IntegrityError(f"{held} device blocks are held, expected {num_held}")

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
