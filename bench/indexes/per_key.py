"""Two indexes that work key after key, in plain Python: what the pool is compared with.

- ``LeanIndex``: the leanest Python we can write: one ordered dict, a two-item list per block, loops
  in line.
- ``PerKeyIndex``: as we understand published Python offload indexes to be built: a call per key
  through a policy object, a ctypes record per block. Written from general knowledge of them, not
  checked against any.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from enum import Enum

from kvferry.core.keys import Key


class BlockStatus(ctypes.Structure):
    """What such an index keeps per block: small, but a Python object each."""

    _fields_ = (("refs", ctypes.c_int32), ("slot", ctypes.c_int64))

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.refs = -1  # being written
        self.slot = slot

    @property
    def is_ready(self) -> bool:
        return bool(self.refs >= 0)


class Answer(Enum):
    """What a look-up of one key says."""

    MISS = "miss"
    HIT = "hit"


class PerKeyLru:
    """The eviction policy of the per-key index: an ordered dict, oldest first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[Key, BlockStatus] = OrderedDict()

    def get(self, key: Key) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: Key, block: BlockStatus) -> None:
        self.blocks[key] = block

    def touch(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(self, count: int, protected: set[Key]) -> list[BlockStatus]:
        chosen = []
        for key, block in self.blocks.items():
            if block.refs == 0 and key not in protected:
                chosen.append(key)
                if len(chosen) == count:
                    break
        return [self.blocks.pop(key) for key in chosen]


class PerKeyIndex:
    """An offload index that does its work one key at a time."""

    def __init__(self, num_slots: int) -> None:
        self.policy = PerKeyLru()
        self.free = list(range(num_slots))

    def lookup(self, key: Key) -> Answer:
        block = self.policy.get(key)
        return Answer.HIT if block is not None and block.is_ready else Answer.MISS

    def match(self, keys: list[Key]) -> int:
        count = 0
        for key in keys:
            if self.lookup(key) is not Answer.HIT:
                break
            count += 1
        return count

    def prepare_store(self, keys: list[Key]) -> list[Key]:
        missing = [key for key in keys if self.policy.get(key) is None]
        lacking = len(missing) - len(self.free)
        if lacking > 0:
            for block in self.policy.evict(lacking, set(keys)):
                self.free.append(block.slot)
        for key in missing:
            self.policy.insert(key, BlockStatus(self.free.pop()))
        return missing

    def complete_store(self, keys: list[Key]) -> None:
        for key in keys:
            block = self.policy.get(key)
            if block is not None and not block.is_ready:
                block.refs = 0
        self.policy.touch(keys)

    def prepare_load(self, keys: list[Key]) -> list[int]:
        slots = []
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.is_ready
            block.refs += 1
            slots.append(block.slot)
        return slots

    def complete_load(self, keys: list[Key]) -> None:
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.refs > 0
            block.refs -= 1
        self.policy.touch(keys)


class LeanIndex:
    """The same work, one key at a time, with nothing between the loop and the dict."""

    def __init__(self, num_slots: int) -> None:
        self.blocks: OrderedDict[Key, list[int]] = OrderedDict()  # references (-1: writing), slot
        self.free = list(range(num_slots))

    def match(self, keys: list[Key]) -> int:
        get = self.blocks.get
        count = 0
        for key in keys:
            block = get(key)
            if block is None or block[0] < 0:
                break
            count += 1
        return count

    def prepare_store(self, keys: list[Key]) -> list[Key]:
        blocks, free = self.blocks, self.free
        missing = [key for key in keys if key not in blocks]
        lacking = len(missing) - len(free)
        if lacking > 0:
            protected = set(keys)
            chosen = []
            for key, block in blocks.items():
                if block[0] == 0 and key not in protected:
                    chosen.append(key)
                    if len(chosen) == lacking:
                        break
            free.extend(blocks.pop(key)[1] for key in chosen)
        for key in missing:
            blocks[key] = [-1, free.pop()]
        return missing

    def complete_store(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.blocks[key][0] = 0
            self.blocks.move_to_end(key)

    def prepare_load(self, keys: list[Key]) -> list[int]:
        slots = []
        for key in keys:
            block = self.blocks[key]
            block[0] += 1
            slots.append(block[1])
        return slots

    def complete_load(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.blocks[key][0] -= 1
            self.blocks.move_to_end(key)
