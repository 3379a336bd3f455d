"""Key to slot, for a whole request in one call, at a cost that hardly depends on the pool.

A Python dict looks keys up one cache miss after the other: at a million entries that is several
times the cost at ten thousand. Here numpy gathers for the whole batch at once, which keeps many
misses in flight; ``bench/index_cost.py`` measures both.

::

    key -> bucket (low bits of word 0) -> 4 ways, each an entry of 64 bits
    entry = tag (high half of word 1) << 32 | slot + 1          0 is empty
    an entry whose tag fits is checked against the whole key, which is kept per slot

A batch goes through the ways one after the other; most keys are settled by the first. A key that
finds all ways of its bucket taken goes to a small dict, and its bucket says so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.errors import IntegrityError
from kvferry.keys import KEY_WORDS, KeyArray, Keys
from kvferry.types import Key, SlotArray

NO_SLOT = -1
"""In arrays of slots: this key has none."""

_WAYS = 4
_BUCKETS_PER_SLOT = 2  # 1 key in 5 then needs a second way, 1 in 600 the dict
_TAG_SHIFT = np.uint64(32)
_SLOT_MASK = np.uint64(0xFFFFFFFF)

_PIECE = 2048

Positions = npt.NDArray[np.int64]


class Index:
    """Which slot holds which key. Owns both directions; knows nothing of states or leases."""

    def __init__(self, num_slots: int) -> None:
        num_buckets = 1 << (num_slots * _BUCKETS_PER_SLOT - 1).bit_length()
        self._bucket_mask = np.uint64(num_buckets - 1)
        self._entries = np.zeros(num_buckets * _WAYS, dtype=np.uint64)
        self._spilled = np.zeros(num_buckets, dtype=np.uint16)  # keys of the bucket in the dict
        self._overflow: dict[Key, int] = {}
        self._keys = np.zeros((num_slots, KEY_WORDS), dtype="<u8")
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def key_of(self, slot: int) -> Key:
        """The key last inserted for ``slot``; only meaningful while it is in the index."""
        return Key(self._keys[slot].tobytes())

    def keys_of(self, slots: SlotArray) -> Keys:
        """The keys last inserted for ``slots``; only meaningful while they are in the index."""
        return Keys(self._keys.take(slots, axis=0))

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``."""
        words = keys.array
        if len(words) == 1:
            return np.array([self.find_one(keys[0])])
        tags = words[:, 1] >> _TAG_SHIFT
        first = self._first_way(words)
        found = np.full(len(words), NO_SLOT, dtype=np.int64)
        pending: Positions = np.arange(len(words))
        for way in range(_WAYS):
            entry = self._entries.take(first[pending] + way)
            fits = np.flatnonzero((entry >> _TAG_SHIFT == tags[pending]) & (entry != 0))
            at = pending[fits]
            slots = (entry[fits] & _SLOT_MASK).astype(np.int64) - 1
            right = self._holds(slots, words, at)
            found[at[right]] = slots[right]
            pending = np.flatnonzero(found == NO_SLOT)
            if not len(pending):
                return found
        if self._overflow:
            for at in pending[self._spilled[first[pending] // _WAYS] > 0]:
                found[at] = self._overflow.get(keys[int(at)], NO_SLOT)
        return found

    def find_one(self, key: Key) -> int:
        """The slot of one key, or ``NO_SLOT``: for one, plain Python beats arrays ten to one."""
        bucket = int.from_bytes(key[:8], "little") & int(self._bucket_mask)
        tag = int.from_bytes(key[12:16], "little")
        for entry in self._entries[bucket * _WAYS : (bucket + 1) * _WAYS].tolist():
            if entry and entry >> 32 == tag:
                slot: int = (entry & 0xFFFFFFFF) - 1
                if self.key_of(slot) == key:
                    return slot
        return self._overflow.get(key, NO_SLOT)

    def insert(self, keys: Keys, slots: SlotArray) -> None:
        """Map each key to its slot. The keys must be distinct and none of them present."""
        words = keys.array
        self._keys[slots] = words
        self._size += len(words)
        first = self._first_way(words)
        entry = (words[:, 1] >> _TAG_SHIFT << _TAG_SHIFT) | (slots + 1).astype(np.uint64)
        pending: Positions = np.arange(len(words))
        for way in range(_WAYS):
            at = first[pending] + way
            empty = np.flatnonzero(self._entries.take(at) == 0)
            # Two keys of one batch may want the same place: both write, one is found there after.
            self._entries[at[empty]] = entry[pending[empty]]
            pending = pending[self._entries.take(at) != entry[pending]]
            if not len(pending):
                return
        for position in pending:
            self._overflow[keys[int(position)]] = int(slots[position])
            self._spilled[first[position] // _WAYS] += 1

    def remove(self, slots: SlotArray) -> None:
        """Take the keys of these slots out; every one of them must be present."""
        first = self._first_way(self._keys.take(slots, axis=0))
        low = (slots + 1).astype(np.uint64)
        pending: Positions = np.arange(len(slots))
        for way in range(_WAYS):
            at = first[pending] + way
            here = self._entries.take(at) & _SLOT_MASK == low[pending]
            self._entries[at[here]] = 0
            pending = pending[~here]
            if not len(pending):
                break
        for position in pending:
            if self._overflow.pop(self.key_of(int(slots[position])), None) is None:
                raise IntegrityError(f"slot {int(slots[position])} should be indexed and is not")
            self._spilled[first[position] // _WAYS] -= 1
        self._size -= len(slots)

    def clear(self) -> None:
        self._entries.fill(0)
        self._spilled.fill(0)
        self._overflow.clear()
        self._size = 0

    def slots(self) -> SlotArray:
        """Every slot in the index, in no order. Walks the whole table: for checks only."""
        entries = self._entries[self._entries != 0]
        spilled = np.fromiter(self._overflow.values(), dtype=np.int64, count=len(self._overflow))
        return np.concatenate(((entries & _SLOT_MASK).astype(np.int64) - 1, spilled))

    def _holds(self, slots: SlotArray, words: KeyArray, at: Positions) -> npt.NDArray[np.bool_]:
        """Whether slot ``slots[i]`` has exactly the key ``words[at[i]]``."""
        same = np.empty(len(slots), dtype=bool)
        # In pieces: a temporary above 128 KiB is mapped and faulted in anew at every call.
        for start in range(0, len(slots), _PIECE):
            piece = slice(start, start + _PIECE)
            differs = self._keys.take(slots[piece], axis=0)
            differs ^= words.take(at[piece], axis=0)
            # By columns: numpy reduces an axis of four very slowly.
            folded = differs[:, 0] | differs[:, 1]
            folded |= differs[:, 2]
            folded |= differs[:, 3]
            same[piece] = folded == 0
        return same

    def _first_way(self, words: KeyArray) -> Positions:
        return (words[:, 0] & self._bucket_mask).astype(np.int64) * _WAYS
