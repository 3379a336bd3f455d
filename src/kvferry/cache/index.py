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

from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Key, KeyArray, Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, SlotArray, slot_numbers

_ROWS_PER_SLOT = 5 / 8  # 1 key in 5000 then finds no lane, also after long use
_LANES = 8
_LANE_BITS = 3
_CROWDING_LANE = 7
_CROWDED = 2  # a byte that is neither a tag nor an empty lane
_NO_LANE = 8  # where one is picked
_MANY_ROWS = 1 << 17  # a table that no near cache holds, where two keys of a batch seldom meet

_LAST_FEW = 8  # keys from which on those without a lane are given one by one

_HALF = np.uint64(32)
_IN_EVERY_LANE = np.uint64(0x0101010101010101)
_BITS_TO_TOP = np.uint64(0x0102040810204080)
_TOP_BYTE_AND_THREE = np.uint64(53)

Positions = npt.NDArray[np.int64]

_NO_WORDS = np.empty((0, KEY_WORDS), dtype="<u8")
_NOWHERE: Positions = np.empty(0, dtype=np.int64)


@cache
def _picks(num_choices: int) -> Positions:
    """For each set of empty lanes, eight picks among the first of them; no lane where it is none.

    A batch picks by its keys' own bits, so that two keys of one row seldom want the same lane.
    """
    every = range(_LANES)
    sets = [[lane for lane in every if empty >> lane & 1] or [_NO_LANE] for empty in range(256)]
    choices = [lanes[:num_choices] for lanes in sets]
    picks = np.array([lanes[number % len(lanes)] for lanes in choices for number in range(8)])
    picks.setflags(write=False)  # all tables have the same
    return picks


class TagTable:
    """Tags and slots by row and lane. Owns these two; what a fitting tag is worth it leaves open.

    A *place* is a lane of the whole table: ``row * 8 + lane``.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_rows = int(num_slots * _ROWS_PER_SLOT) + 1
        # Filled here: a page that is first touched later costs a step of the scheduler.
        words = np.full(self.num_rows * 5 + 1, 0, dtype="<u8")
        tags, slots = np.split(words, [self.num_rows])
        self.bytes = tags.view(np.uint8)  # by lane; what wants whole rows views them as words
        self.slots = slots.view(np.int32)
        self._no_cell = self.num_rows * _LANES  # written where a row is full, never read
        self._num_crowded = 0
        self._hashed = (_NO_WORDS, _NOWHERE, np.empty(0, dtype=np.uint8))
        # Spread, because small tables see many keys of a batch in one row; low lanes, because of a
        # large one's slots caches hold a part only.
        self._picks = _picks(1 if self.num_rows > _MANY_ROWS else _LANES)

    def candidates(self, words: KeyArray) -> tuple[Positions, SlotArray, Positions]:
        """Which key may be in which slot: positions in ``words``, and a slot for each.

        And the positions of those keys whose row is crowded: they may also be somewhere else.
        """
        _, rows, wanted = self._hash(words)
        # Every row is in range. Of all modes "wrap" looks least at an index, so that more fetches
        # from memory are under way at once: in a large table a third of their time.
        tags = self.bytes.view("<u8").take(rows, mode="wrap").view(np.uint8)
        every_lane = wanted.astype(np.uint64) * _IN_EVERY_LANE
        fits = (tags == every_lane.view(np.uint8)).nonzero()[0]
        at = fits >> _LANE_BITS
        cells = (fits & 7) * self.num_rows + rows.take(at)
        slots = self.slots.take(cells, mode="wrap").astype(np.int64)
        if not self._num_crowded:
            return at, slots, _NOWHERE
        return at, slots, (tags[_CROWDING_LANE::8] == _CROWDED).nonzero()[0]

    def claim(self, words: KeyArray, slots: SlotArray) -> tuple[Positions, Positions]:
        """Give each key a lane; returns the places, and the positions of keys that got none.

        What stands for those in the places has no meaning.
        """
        is_hashed = words is self._hashed[0]  # a batch that is looked up is mostly stored next
        _, rows, tags = self._hashed if is_hashed else self._hash(words)
        mine = slots.astype(np.int32)
        picks = (words[:, 1] >> np.uint64(8) & np.uint64(7)).view(np.int64)
        lanes, won = self._compete(rows, picks, mine)
        places = rows << _LANE_BITS | lanes
        if np.count_nonzero(won) == len(won):
            self.bytes[places] = tags
            return places, _NOWHERE
        pending: Positions = np.arange(len(words))
        homeless: list[Positions] = []
        while True:
            got = won.nonzero()[0]
            winners = pending.take(got)
            places[winners] = here = rows.take(winners) << _LANE_BITS | lanes.take(got)
            self.bytes[here] = tags.take(winners)
            full = lanes == _NO_LANE
            homeless.append(pending[full])
            pending = pending[~(won | full)]
            if len(pending) <= _LAST_FEW:
                break
            lanes, won = self._compete(rows.take(pending), picks.take(pending), mine.take(pending))
        for at in pending.tolist():
            place = self._claim_one(rows.item(at), tags.item(at), mine.item(at))
            if place is None:
                homeless.append(np.array([at]))
            else:
                places[at] = place
        return places, np.concatenate(homeless)

    def _compete(
        self, rows: Positions, picks: Positions, mine: npt.NDArray[np.int32]
    ) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """A lane for each key, and whether it has it; no lane in rows that are full."""
        tags = self.bytes.view("<u8").take(rows, mode="wrap")
        is_empty = (tags.view(np.uint8) == 0).view(np.uint64)
        # The empty lanes of each row, one bit each from bit 3 on; below these, bits of no meaning.
        empty = (is_empty * _BITS_TO_TOP >> _TOP_BYTE_AND_THREE).view(np.int64)
        lanes = self._picks.take(empty ^ picks)
        cells = lanes * self.num_rows + rows
        np.minimum(cells, self._no_cell, out=cells)
        # Of those that want the same cell, the one whose slot is found in it afterwards has it.
        self.slots[cells] = mine
        return lanes, (self.slots.take(cells, mode="wrap") == mine) & (lanes != _NO_LANE)

    def _claim_one(self, row: int, tag: int, slot: int) -> int | None:
        first = row << _LANE_BITS
        lane = self.bytes[first : first + _LANES].tobytes().find(0)
        if lane < 0:
            return None
        self.slots[lane * self.num_rows + row] = slot
        self.bytes[first + lane] = tag
        return first + lane

    def row_of(self, key: bytes) -> int:
        return int.from_bytes(key[:4], "little") * self.num_rows >> 32

    def crowd(self, row: int) -> int | None:
        """Say that keys of this full row are somewhere else for want of a lane.

        The lane that says so is taken from the key that had it: returns the slot of that key, which
        is in the table no more, or None where the row was crowded before.
        """
        at = (row << _LANE_BITS) + _CROWDING_LANE
        if self.bytes[at] == _CROWDED:
            return None
        self._num_crowded += 1
        self.bytes[at] = _CROWDED
        return self.slots.item(_CROWDING_LANE * self.num_rows + row)

    def uncrowd(self, row: int) -> None:
        """Say that no key of this row is somewhere else any more."""
        self._num_crowded -= 1
        self.bytes[(row << _LANE_BITS) + _CROWDING_LANE] = 0

    def clear(self) -> None:
        self.bytes.fill(0)
        self._num_crowded = 0

    def _hash(self, words: KeyArray) -> tuple[KeyArray, Positions, npt.NDArray[np.uint8]]:
        """The row and the tag of each key."""
        if words is not self._hashed[0]:
            # As 64 bits first: numpy 1 would multiply in 32.
            halves = words.view("<u4")[:, 0].astype(np.uint64)
            rows = (halves * np.uint64(self.num_rows) >> _HALF).view(np.int64)
            self._hashed = (words, rows, words.view(np.uint8)[:, 8] | np.uint8(1))
        return self._hashed


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
_EMPTY: dict[bytes, int] = {}
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

    # -- looking up -----------------------------------------------------------------------------

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key, or ``NO_SLOT``."""
        words = keys.array
        count = len(words)
        if count <= _FEW:
            return np.array(self.find_few(words.tobytes()), dtype=np.int64)
        found = np.empty(count, dtype=np.int64)
        found.fill(NO_SLOT)
        at = short = 0
        while at < count and short < _SHORT_RUNS:  # run by run, up to the first absent key
            slot = self.find_few(words[at].tobytes())[0]
            if slot == NO_SLOT:
                break
            length = self._run_length(slot, words[at:] if at else words)
            found[at : at + length] = np.arange(slot, slot + length)
            at += length
            if length < _LONG:
                short += _SCRAP_COUNTS if length < _SCRAPS else 1
        if at < count:
            rest = keys[at:] if at else keys  # the very same: their rows are remembered
            around = at >= _LIE_TOGETHER and len(rest.array) >= _MANY
            if around and self._look_around(rest, found[at:]):
                missing = at + np.flatnonzero(found[at:] == NO_SLOT)
                found[missing] = self._ask_table(keys.take(missing))
            else:
                found[at:] = self._ask_table(rest)
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
        table, found = self._table, []
        for at in range(0, len(keys), KEY_BYTES):
            key, slot = keys[at : at + KEY_BYTES], NO_SLOT
            row = int.from_bytes(key[:4], "little") * table.num_rows >> 32
            tags = table.bytes[row << _LANE_BITS : (row + 1) << _LANE_BITS].tobytes()
            lane = tags.find(key[8] | 1)
            while lane >= 0:
                slot = table.slots.item(lane * table.num_rows + row)
                if self._keys[slot].tobytes() == key:
                    break
                slot, lane = NO_SLOT, tags.find(key[8] | 1, lane + 1)
            if slot == NO_SLOT and self._overflow:
                slot = self._overflow.get(row, _EMPTY).get(key, NO_SLOT)
            found.append(slot)
        return found

    def _run_length(self, slot: int, words: KeyArray) -> int:
        """How many of these keys, the first of which is at ``slot``, lie in the slots from it."""
        length, look = 1, _FIRST_LOOK
        longest = min(len(words), len(self._keys) - slot)
        while length < longest:
            start, ahead = slot + length, min(look, longest - length)
            differs = self._keys[start : start + ahead] != words[length : length + ahead]
            # A slot keeps its last key: only its place says whether that is still in the index.
            gone = self._place[start : start + ahead] == _ABSENT
            num_same = ahead
            if np.count_nonzero(differs) or np.count_nonzero(gone):
                num_same = int((differs.any(axis=1) | gone).argmax())
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
        self._table.bytes[places] = 0
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
