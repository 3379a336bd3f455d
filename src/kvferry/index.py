"""Key to slot, for a whole request in one call, at a cost that the pool's size hardly moves.

Blocks that were stored together mostly lie in slots that follow each other. So a look-up asks the
table for one key only, and compares the keys of the slots behind it with those that were asked for:
one pass over memory, which a processor reads ahead, where a table is fetched from at random.

::

    one by one  where only a few are asked for
    runs        look the first key up, compare on from its slot; at the first difference again
    around      where runs get short: look every 32nd key up, compare around the slots of those
    table       whatever is left, all keys at once; and a dict for those the table had no room for

However a slot was guessed, the whole key is compared, and that the slot still has it: a slot that
was freed keeps its last key.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.errors import IntegrityError
from kvferry.keys import KEY_WORDS, KeyArray, Keys
from kvferry.tag_table import Positions, TagTable
from kvferry.types import KEY_BYTES, NO_SLOT, Key, SlotArray, slot_numbers

_ABSENT = NO_SLOT  # place of a slot whose key is not in the index
_SPILLED = -2  # and of one whose key is in the dict

_FIRST_LOOK = 512  # keys compared at once where a run begins, and how many times more after that
_LOOK_GROWTH = 8
_LONG = 1024  # a shorter run costs more to follow than its keys cost otherwise
_SCRAPS = 24  # and one of fewer keys says that all are strewn
_SHORT_RUNS = 8  # followed before another way is taken, which takes as long before its first key
_SCRAP_COUNTS = 4  # as so many of these
_STRIDE = 32
_LIE_TOGETHER = 2 * _STRIDE  # keys in the runs before, from which on others are looked for around
_MANY = 512  # keys from which on looking around pays
_FEW = 4  # keys up to which plain Python beats arrays

_PIECE = 2048
_RUN = 64  # slots that follow each other from which on their keys are better written as one
_NOBODY: dict[bytes, int] = {}
_WHOLE = np.dtype((np.void, KEY_BYTES))


class Index:
    """Which slot holds which key. Owns both directions; knows nothing of states or leases."""

    def __init__(self, num_slots: int) -> None:
        self._table = TagTable(num_slots)
        self._keys = np.full((num_slots, KEY_WORDS), 0, dtype="<u8")
        self._place = slot_numbers(num_slots)
        self._overflow: dict[int, dict[bytes, int]] = {}  # by row of the table
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def key_of(self, slot: int) -> Key:
        """The key last inserted for ``slot``; only meaningful while it is in the index."""
        return Key(self._keys[slot].tobytes())

    def keys_of(self, slots: SlotArray) -> Keys:
        """The keys last inserted for ``slots``; only meaningful while they are in the index."""
        return Keys(self._keys.take(slots, axis=0))

    def first_words_of(self, slots: SlotArray) -> npt.NDArray[np.uint64]:
        """The first words of those keys."""
        # Not a column's take: numpy would copy the whole column first.
        return self._keys.reshape(-1).take(slots * KEY_WORDS)

    # -- looking up -----------------------------------------------------------------------------

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``."""
        words = keys.array
        count = len(words)
        if count <= _FEW:
            each = (words[at].tobytes() for at in range(count))
            return np.fromiter((self.find_one(key) for key in each), np.int64, count)
        found = np.empty(count, dtype=np.int64)
        found.fill(NO_SLOT)
        at = short = 0
        while at < count and short < _SHORT_RUNS:  # run by run, up to the first absent key
            slot = self.find_one(words[at].tobytes())
            if slot == NO_SLOT:
                break
            length = self._run_length(slot, words[at:] if at else words)
            found[at : at + length] = np.arange(slot, slot + length)
            at += length
            if length < _LONG:
                short += _SCRAP_COUNTS if length < _SCRAPS else 1
        if at < count:
            rest = keys[at:] if at else keys  # the very same: their rows are remembered
            self._find_strewn(rest, found[at:], at >= _LIE_TOGETHER)
        return found

    def find_leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys that are here, up to the first that is not."""
        words = keys.array
        slot = self.find_one(words[0].tobytes()) if len(words) else NO_SLOT
        if slot == NO_SLOT:
            return np.empty(0, dtype=np.int64)
        length = self._run_length(slot, words)
        run = np.arange(slot, slot + length)
        if length == len(words):
            return run
        rest = self.find(keys[length:])
        return np.concatenate((run, rest[: num_leading(rest != NO_SLOT)]))

    def _find_strewn(self, keys: Keys, found: SlotArray, lie_together: bool) -> None:
        """Note in ``found`` the slots of keys that do not follow each other for long."""
        if lie_together and len(keys) >= _MANY and self._look_around(keys, found):
            missing = np.flatnonzero(found == NO_SLOT)
            found[missing] = self._ask_table(keys.take(missing))
        else:
            found[:] = self._ask_table(keys)

    def find_one(self, key: bytes) -> int:
        """The slot of one key, or ``NO_SLOT``."""
        for slot in self._table.candidates_of(key):
            if self._keys[slot].tobytes() == key:
                return slot
        if not self._overflow:
            return NO_SLOT
        return self._overflow.get(self._table.row_of(key), _NOBODY).get(key, NO_SLOT)

    def _run_length(self, slot: int, words: KeyArray) -> int:
        """How many of these keys, the first of which is at ``slot``, lie in the slots from it."""
        length, look = 1, _FIRST_LOOK
        longest = min(len(words), len(self._keys) - slot)
        while length < longest:
            start, ahead = slot + length, min(look, longest - length)
            same = (self._keys[start : start + ahead] == words[length : length + ahead]).reshape(-1)
            # A slot keeps its last key: only its place says whether that is still in the index.
            here = self._place[start : start + ahead] != _ABSENT
            num_same = min(num_leading(same) // KEY_WORDS, num_leading(here))
            length += num_same
            if num_same < ahead:
                break
            look *= _LOOK_GROWTH
        return length

    def _look_around(self, keys: Keys, found: SlotArray) -> bool:
        """Note in ``found`` what lies in the slots around those of a few keys, which are looked up.

        False where this is not worth it: too few of the keys are where their neighbours say.
        """
        every = np.arange(len(keys))
        asked = np.minimum(every[::_STRIDE] + _STRIDE // 2, len(keys) - 1)
        shift = self._ask_table(keys.take(asked)) - asked
        if np.count_nonzero(shift[1:] == shift[:-1]) < len(shift) // 4:
            return False
        guess = (np.repeat(shift, _STRIDE)[: len(keys)] + every).clip(0, len(self._keys) - 1)
        right = self._holds(guess, keys.array, every) & (self._place.take(guess) != _ABSENT)
        np.copyto(found, guess, where=right)
        return True

    def _ask_table(self, keys: Keys) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``, with no guess where it could be."""
        words = keys.array
        found = np.empty(len(words), dtype=np.int64)
        found.fill(NO_SLOT)
        at, slots, crowded = self._table.candidates(words)
        if len(at):
            right = self._holds(slots, words, at).nonzero()[0]
            found[at.take(right)] = slots.take(right)
        for position in crowded.tolist():
            key = keys[position]
            found[position] = self._overflow[self._table.row_of(key)].get(key, found[position])
        return found

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

    # -- changing -------------------------------------------------------------------------------

    def insert(self, keys: Keys, slots: SlotArray) -> None:
        """Map each key to its slot. The keys must be distinct and none of them present."""
        words = keys.array
        self._note_keys(words, slots)
        places, homeless = self._table.claim(words, slots)
        if len(homeless):
            places[homeless] = _SPILLED
        self._place[slots] = places
        self._size += len(words)
        for position in homeless.tolist():
            self._spill(self._table.row_of(keys[position]), int(slots[position]))

    def _spill(self, row: int, slot: int) -> None:
        """Put the key of a slot into the dict, and the one that has to make way for its row."""
        crowd = self._overflow.setdefault(row, {})
        crowd[self.key_of(slot)] = slot
        displaced = self._table.crowd(row)
        if displaced is not None:
            crowd[self.key_of(displaced)] = displaced
            self._place[displaced] = _SPILLED

    def _note_keys(self, words: KeyArray, slots: SlotArray) -> None:
        starts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
        if len(starts) * _RUN >= len(slots):
            self._keys.view(_WHOLE)[slots, 0] = words.view(_WHOLE)[:, 0]
            return
        cuts = [0, *starts.tolist(), len(slots)]
        for start, end in pairwise(cuts):
            slot = slots.item(start)
            self._keys[slot : slot + end - start] = words[start:end]

    def remove(self, slots: SlotArray) -> None:
        """Take the keys of these slots out; every one of them must be present."""
        places = self._place.take(slots)
        if len(places) and np.minimum.reduce(places) < 0:
            self._remove_spilled(slots[places < 0])
            places = places[places >= 0]
        self._table.free(places.astype(np.int64, copy=False))
        self._place[slots] = _ABSENT
        self._size -= len(slots)

    def _remove_spilled(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            if self._place[slot] == _ABSENT:
                raise IntegrityError(f"slot {slot} should be indexed and is not")
            key = self.key_of(slot)
            row = self._table.row_of(key)
            del self._overflow[row][key]
            if not self._overflow[row]:
                del self._overflow[row]
                self._table.uncrowd(row)

    def clear(self) -> None:
        self._table.clear()
        self._place.fill(_ABSENT)
        self._overflow.clear()
        self._size = 0

    def slots(self) -> SlotArray:
        """Every slot in the index, ascending. Walks all of them: for checks only."""
        return (self._place != _ABSENT).nonzero()[0]


def num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
