"""Key to slot, for a whole request in one call, at a cost that the pool's size hardly moves.

Blocks that were stored together mostly lie in slots that follow each other. So a lookup finds one
key in the table and compares the keys of the slots behind it with those that were asked for: one
pass over memory, which a processor reads ahead, where a table is fetched from at random. What lies
in short runs is found in the table, all keys at once.

However a slot was guessed, the whole key is compared, and that the slot still has it: a slot that
was freed keeps its last key.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Key, KeyArray, Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, SlotArray, slot_numbers

_LANES = 4  # and a row for each slot: 1 key in 60 then finds no free one, also after long use

_ABSENT = NO_SLOT  # cell of a slot whose key is not in the index
_SPILLED = -2  # and of one whose key is in the dict

_FEW = 4  # keys up to which plain Python beats arrays
_FIRST_LOOK = 512  # keys compared at once where a run begins, and how many times more after that
_LOOK_GROWTH = 8
_LONG = 1024  # a shorter run costs more to follow than its keys cost in the table
_SHORT_RUNS = 4  # that are followed before the table is asked for the rest
_PIECE = 2048  # keys; a temporary above 128 KiB is mapped and faulted in anew at every call
_RUN = 64  # slots that follow each other from which on their keys are better written as one
_WHOLE = np.dtype((np.void, KEY_BYTES))

Positions = npt.NDArray[np.int64]


class Index:
    """Which slot holds which key. Owns both directions; knows nothing of states or leases.

    A key belongs to one row of the table, and is in one of its lanes, or in a dict where other keys
    have these. A *cell* is a lane of the whole table.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_rows = num_slots
        # Filled here: a page that is first touched later costs a step of the scheduler.
        self._cells = np.full(self._num_rows * _LANES, NO_SLOT, dtype=np.int32)
        self._lanes = self._cells.reshape(-1, _LANES)  # the same, by row
        self._num_spilled = np.full(self._num_rows, 0, dtype=np.int32)  # keys of a row in the dict
        self._spilled: dict[bytes, int] = {}
        self._keys = np.full((num_slots, KEY_WORDS), 0, dtype="<u8")
        self._cell = slot_numbers(num_slots)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def key_of(self, slot: int) -> Key:
        """The key last inserted for ``slot``; only meaningful while it is in the index."""
        return Key(self._keys[slot].tobytes())

    def keys_of(self, slots: SlotArray) -> Keys:
        """The keys last inserted for ``slots``; only meaningful while they are in the index."""
        return Keys(self._keys.take(slots, axis=0))

    # -- looking up -----------------------------------------------------------------------------

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``."""
        words = keys.array
        count = len(words)
        if count <= _FEW:
            return np.array(self.find_few(words.tobytes()), dtype=np.int64)
        found = np.empty(count, dtype=np.int64)
        at = num_short = 0
        while at < count and num_short < _SHORT_RUNS:
            slot = self.find_few(words[at].tobytes())[0]
            if slot == NO_SLOT:
                break
            length = self._run_length(slot, words[at:])
            found[at : at + length] = np.arange(slot, slot + length)
            at += length
            num_short += length < _LONG
        if at < count:
            found[at:] = self._find_in_table(words[at:])
        return found

    def find_leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys that are here, up to the first that is not."""
        words = keys.array
        slot = self.find_few(words[0].tobytes())[0] if len(words) else NO_SLOT
        if slot == NO_SLOT:
            return np.empty(0, dtype=np.int64)
        length = self._run_length(slot, words)
        run = np.arange(slot, slot + length)
        if length == len(words):
            return run
        rest = self.find(keys[length:])
        return np.concatenate((run, rest[: num_leading(rest != NO_SLOT)]))

    def find_one(self, key: bytes) -> int:
        """The slot of one key, or ``NO_SLOT``."""
        return self.find_few(key)[0]

    def find_few(self, keys: bytes) -> list[int]:
        """The slot of each of a few keys, which follow each other as bytes, or ``NO_SLOT``."""
        found = []
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            first = _LANES * (int.from_bytes(key[:4], "little") * self._num_rows >> 32)
            for slot in self._cells[first : first + _LANES].tolist():
                if slot != NO_SLOT and self._keys[slot].tobytes() == key:
                    break
            else:
                slot = self._spilled.get(key, NO_SLOT)
            found.append(slot)
        return found

    def _run_length(self, slot: int, words: KeyArray) -> int:
        """How many of these keys, the first of which is at ``slot``, lie in the slots from it."""
        length, look = 1, _FIRST_LOOK
        longest = min(len(words), len(self._keys) - slot)
        while length < longest:
            start, ahead = slot + length, min(look, longest - length)
            differs = self._keys[start : start + ahead] != words[length : length + ahead]
            # A slot keeps its last key: only its cell says whether that is still in the index.
            gone = self._cell[start : start + ahead] == _ABSENT
            num_same = ahead
            if np.count_nonzero(differs) or np.count_nonzero(gone):
                num_same = int((differs.any(axis=1) | gone).argmax())
            length += num_same
            if num_same < ahead:
                break
            look *= _LOOK_GROWTH
        return length

    def _find_in_table(self, words: KeyArray) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``, with no guess where it could be."""
        found = np.full(len(words), NO_SLOT, dtype=np.int64)
        rows = self._rows_of(words)
        lanes = self._lanes.take(rows, axis=0).ravel()
        used = (lanes != NO_SLOT).nonzero()[0]
        for start in range(0, len(used), _PIECE):
            piece = used[start : start + _PIECE]
            at, slots = piece // _LANES, lanes.take(piece)
            differs = self._keys.take(slots, axis=0) ^ words.take(at, axis=0)
            # By columns: numpy reduces an axis of four very slowly.
            same = (differs[:, 0] | differs[:, 1] | differs[:, 2] | differs[:, 3]) == 0
            found[at[same]] = slots[same]
        if self._spilled:
            elsewhere = (found == NO_SLOT) & (self._num_spilled.take(rows) > 0)
            for position in elsewhere.nonzero()[0].tolist():
                found[position] = self._spilled.get(words[position].tobytes(), NO_SLOT)
        return found

    def _rows_of(self, words: KeyArray) -> Positions:
        # As 64 bits first: numpy 1 would multiply in 32.
        halves = words.view("<u4")[:, 0].astype(np.uint64)
        return (halves * np.uint64(self._num_rows) >> np.uint64(32)).view(np.int64)

    # -- changing -------------------------------------------------------------------------------

    def insert(self, keys: Keys, slots: SlotArray) -> None:
        """Map each key to its slot. The keys must be distinct and none of them present."""
        words = keys.array
        self._note_keys(words, slots)
        self._size += len(slots)
        rows = self._rows_of(words)
        while len(slots):
            cells = rows * _LANES + (self._lanes.take(rows, axis=0) == NO_SLOT).argmax(axis=1)
            is_full = self._cells.take(cells) != NO_SLOT
            if np.count_nonzero(is_full):
                self._spill(slots[is_full], rows[is_full])
                slots, rows, cells = slots[~is_full], rows[~is_full], cells[~is_full]
            # Of those that want the same cell, the one whose slot is found in it afterwards has it.
            self._cells[cells] = slots
            self._cell[slots] = cells
            lost = (self._cells.take(cells) != slots).nonzero()[0]
            slots, rows = slots.take(lost), rows.take(lost)

    def _spill(self, slots: SlotArray, rows: Positions) -> None:
        """Put the keys of these slots, whose rows are full, into the dict."""
        self._cell[slots] = _SPILLED
        np.add.at(self._num_spilled, rows, 1)
        self._spilled.update((self.key_of(slot), slot) for slot in slots.tolist())

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
        cells = self._cell.take(slots)
        if len(cells) and np.minimum.reduce(cells) < 0:
            spilled = slots[cells < 0]
            absent = spilled[self._cell.take(spilled) == _ABSENT]
            if len(absent):
                raise IntegrityError(f"slot {absent[0]} should be indexed and is not")
            words = self._keys.take(spilled, axis=0)
            for key in words:
                del self._spilled[key.tobytes()]
            np.subtract.at(self._num_spilled, self._rows_of(words), 1)
            cells = cells[cells >= 0]
        self._cells[cells] = NO_SLOT
        self._cell[slots] = _ABSENT
        self._size -= len(slots)

    def clear(self) -> None:
        self._cells.fill(NO_SLOT)
        self._cell.fill(_ABSENT)
        self._num_spilled.fill(0)
        self._spilled.clear()
        self._size = 0

    def slots(self) -> SlotArray:
        """Every slot in the index, ascending. Walks all of them: for checks only."""
        return (self._cell != _ABSENT).nonzero()[0]


def num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
