"""Rows of lanes, each lane a short tag and a slot: which key may be in which slot.

::

    key -> row (from word 0): one word of 8 bytes, and 8 slots elsewhere

    byte    0    1    2    3    4    5    6    7
          tag  tag  tag  tag  tag  tag  tag  tag, or 2 if keys of this row found no lane
            |
           (from word 1, and odd; 0 is an empty lane)

    slots   lane 0 of all rows, lane 1 of all rows, and so on

A batch fetches one word per key, and compares all tags of all rows at once: absent keys mostly end
there, without a look at any slot. Tags are apart from slots because they are what every key touches
at a random place: a processor's caches hold more of them than of whole entries. Of the slots, those
of one lane lie together, and a large table fills low lanes first: a line of memory then holds slots
of many rows, and not one slot beside empty lanes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from kvferry.keys import KEY_WORDS, KeyArray
from kvferry.types import SlotArray

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
        self._num_rows = int(num_slots * _ROWS_PER_SLOT) + 1
        # Filled here: a page that is first touched later costs a step of the scheduler.
        words = np.full(self._num_rows * 5 + 1, 0, dtype="<u8")
        tags, slots = np.split(words, [self._num_rows])
        self._bytes = tags.view(np.uint8)  # by lane; what wants whole rows views them as words
        self._slots = slots.view(np.int32)
        self._no_cell = self._num_rows * _LANES  # written where a row is full, never read
        self._num_crowded = 0
        self._hashed = (_NO_WORDS, _NOWHERE, np.empty(0, dtype=np.uint8))
        # Spread, because small tables see many keys of a batch in one row; low lanes, because of a
        # large one's slots caches hold a part only.
        self._picks = _picks(1 if self._num_rows > _MANY_ROWS else _LANES)

    def candidates(self, words: KeyArray) -> tuple[Positions, SlotArray, Positions]:
        """Which key may be in which slot: positions in ``words``, and a slot for each.

        And the positions of those keys whose row is crowded: they may also be somewhere else.
        """
        _, rows, wanted = self._hash(words)
        # Every row is in range. Of all modes "wrap" looks least at an index, so that more fetches
        # from memory are under way at once: in a large table a third of their time.
        tags = self._bytes.view("<u8").take(rows, mode="wrap").view(np.uint8)
        every_lane = wanted.astype(np.uint64) * _IN_EVERY_LANE
        fits = (tags == every_lane.view(np.uint8)).nonzero()[0]
        at = fits >> _LANE_BITS
        cells = (fits & 7) * self._num_rows + rows.take(at)
        slots = self._slots.take(cells, mode="wrap").astype(np.int64)
        if not self._num_crowded:
            return at, slots, _NOWHERE
        return at, slots, (tags[_CROWDING_LANE::8] == _CROWDED).nonzero()[0]

    def candidates_of(self, key: bytes) -> list[int]:
        """The slots in which one key may be."""
        row = int.from_bytes(key[:4], "little") * self._num_rows >> 32
        first = row << _LANE_BITS
        tags = self._bytes[first : first + _LANES].tobytes()
        tag = key[8] | 1
        slots: list[int] = []
        lane = tags.find(tag)
        while lane >= 0:
            slots.append(self._slots.item(lane * self._num_rows + row))
            lane = tags.find(tag, lane + 1)
        return slots

    def claim(self, words: KeyArray, slots: SlotArray) -> tuple[Positions, Positions]:
        """Give each key a lane; returns the places, and the positions of keys that got none.

        What stands for those in the places has no meaning.
        """
        _, rows, tags = self._hash(words)
        mine = slots.astype(np.int32)
        picks = (words[:, 1] >> np.uint64(8) & np.uint64(7)).view(np.int64)
        lanes, won = self._compete(rows, picks, mine)
        places = rows << _LANE_BITS | lanes
        if np.count_nonzero(won) == len(won):
            self._bytes[places] = tags
            return places, _NOWHERE
        pending: Positions = np.arange(len(words))
        homeless: list[Positions] = []
        while True:
            got = won.nonzero()[0]
            winners = pending.take(got)
            places[winners] = here = rows.take(winners) << _LANE_BITS | lanes.take(got)
            self._bytes[here] = tags.take(winners)
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
        empty = _empty_lanes(self._bytes.view("<u8").take(rows, mode="wrap"))
        lanes = self._picks.take(empty ^ picks)
        cells = lanes * self._num_rows + rows
        np.minimum(cells, self._no_cell, out=cells)
        # Of those that want the same cell, the one whose slot is found in it afterwards has it.
        self._slots[cells] = mine
        return lanes, (self._slots.take(cells, mode="wrap") == mine) & (lanes != _NO_LANE)

    def _claim_one(self, row: int, tag: int, slot: int) -> int | None:
        first = row << _LANE_BITS
        lane = self._bytes[first : first + _LANES].tobytes().find(0)
        if lane < 0:
            return None
        self._slots[lane * self._num_rows + row] = slot
        self._bytes[first + lane] = tag
        return first + lane

    def free(self, places: Positions) -> None:
        self._bytes[places] = 0

    def row_of(self, key: bytes) -> int:
        return int.from_bytes(key[:4], "little") * self._num_rows >> 32

    def crowd(self, row: int) -> int | None:
        """Say that keys of this full row are somewhere else for want of a lane.

        The lane that says so is taken from the key that had it: returns the slot of that key, which
        is in the table no more, or None where the row was crowded before.
        """
        at = (row << _LANE_BITS) + _CROWDING_LANE
        if self._bytes[at] == _CROWDED:
            return None
        self._num_crowded += 1
        self._bytes[at] = _CROWDED
        return self._slots.item(_CROWDING_LANE * self._num_rows + row)

    def uncrowd(self, row: int) -> None:
        """Say that no key of this row is somewhere else any more."""
        self._num_crowded -= 1
        self._bytes[(row << _LANE_BITS) + _CROWDING_LANE] = 0

    def clear(self) -> None:
        self._bytes.fill(0)
        self._num_crowded = 0

    def _hash(self, words: KeyArray) -> tuple[KeyArray, Positions, npt.NDArray[np.uint8]]:
        """The row and the tag of each key. Who looked a batch up mostly stores it next."""
        if words is not self._hashed[0]:
            # As 64 bits first: numpy 1 would multiply in 32.
            halves = words.view("<u4")[:, 0].astype(np.uint64)
            rows = (halves * np.uint64(self._num_rows) >> _HALF).view(np.int64)
            self._hashed = (words, rows, words.view(np.uint8)[:, 8] | np.uint8(1))
        return self._hashed


def _empty_lanes(tags: npt.NDArray[np.uint64]) -> Positions:
    """The empty lanes of each row, one bit each from bit 3 on; below these, bits of no meaning."""
    empty = (tags.view(np.uint8) == 0).view(np.uint64)
    return (empty * _BITS_TO_TOP >> _TOP_BYTE_AND_THREE).view(np.int64)
