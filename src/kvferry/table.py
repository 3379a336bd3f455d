"""Rows of lanes, each lane a short tag and a slot: which key may be in which slot.

::

    key -> row (from word 0): one word of 8 bytes, and 7 slots elsewhere

    byte    0    1    2    3    4    5    6    7
          tag  tag  tag  tag  tag  tag  tag    1 if keys of this row found no lane
            |
           (from word 1; 0 is an empty lane)

A batch fetches one word per key, and compares all tags of all rows at once: absent keys mostly end
there, without a look at any slot. Tags are apart from slots because they are what every key touches
at a random place: a processor's caches hold more of them than of whole entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.keys import KeyArray
from kvferry.types import Key, SlotArray

_ROWS_PER_SLOT = 5 / 8  # 1 key in 5000 then finds no lane
_LANES = 7
_LANE_BITS = 3
_CROWDED = 7  # the byte of a row that is no lane
_ALL_USED = 0x7F
_TURNS = 1 << 15

_BYTE = np.uint64(0xFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_IN_EVERY_LANE = np.uint64(0x0001010101010101)
_NOT_CROWDED = np.uint64(0xFF << 56)  # in the last byte of what is looked for: no row has it
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_BITS_TO_TOP = np.uint64(0x0102040810204080)

Positions = npt.NDArray[np.int64]


def _picks() -> Positions:
    """For each set of used lanes, eight picks among the others; any lane where all are used."""
    every = range(_LANES)
    empty = [[lane for lane in every if not used >> lane & 1] or [0] for used in range(128)]
    return np.array([lanes[number % len(lanes)] for lanes in empty for number in range(8)])


_PICKS = _picks()


class Table:
    """Tags and slots by row and lane. Owns these two; what a fitting tag is worth it leaves open.

    A *place* is a lane of the whole table: ``row * 8 + lane``.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_rows = int(num_slots * _ROWS_PER_SLOT) + 1
        # In one piece, because numpy asks for huge pages only where an array is large; and filled
        # here, because a page that is first touched later costs a step of the scheduler.
        words = np.full(self._num_rows * 5, 0, dtype="<u8")
        self._tags, slots = np.split(words, [self._num_rows])
        self._bytes = self._tags.view(np.uint8)
        self._slots = slots.view(np.int32)
        self._turns = np.zeros(_TURNS, dtype=np.int64)  # scratch

    def candidates(self, words: KeyArray) -> tuple[Positions, SlotArray, Positions]:
        """Which key may be in which slot: positions in ``words``, and a slot for each.

        And the positions of those keys whose row is crowded: they may also be somewhere else.
        """
        rows = self._rows(words)
        tags = self._tags.take(rows)
        wanted = _tags(words) * _IN_EVERY_LANE | _NOT_CROWDED
        fits = np.flatnonzero(tags.view(np.uint8) == wanted.view(np.uint8))
        at = fits >> _LANE_BITS
        places = rows.take(at) << _LANE_BITS | fits & 7
        crowded = np.flatnonzero(tags.view(np.uint8)[_CROWDED::8])
        return at, self._slots.take(places).astype(np.int64), crowded

    def candidates_of(self, key: Key) -> list[int]:
        """The slots in which one key may be."""
        first = self.row_of(key) << _LANE_BITS
        tags = self._bytes[first : first + _LANES].tobytes()
        tag = key[8] or 1
        if tag not in tags:
            return []
        slots = self._slots[first : first + _LANES].tolist()
        return [slot for slot, lane in zip(slots, tags, strict=True) if lane == tag]

    def claim(self, words: KeyArray, slots: SlotArray) -> tuple[Positions, Positions]:
        """Give each key a lane; returns the places, and the positions of keys that got none."""
        places = np.empty(len(words), dtype=np.int64)
        tags = _tags(words).astype(np.uint8)
        rows = self._rows(words)
        # By the key's own bits: two keys of a batch seldom want the same lane.
        picks = (words[:, 1] >> np.uint64(8) & np.uint64(7)).view(np.int64)
        pending: Positions = np.arange(len(words))
        homeless: list[Positions] = []
        while len(pending):
            used = _used_lanes(self._tags.take(rows))
            wanted = rows << _LANE_BITS | _PICKS.take(used << 3 | picks)
            # Of those that want the same lane, the last to write its number here gets it.
            turn = wanted & (_TURNS - 1)
            self._turns[turn] = pending
            full = used == _ALL_USED
            won = (self._turns.take(turn) == pending) & ~full
            got = np.flatnonzero(won)
            lucky, wanted = pending.take(got), wanted.take(got)
            self._bytes[wanted] = tags.take(lucky)
            self._slots[wanted] = slots.take(lucky).astype(np.int32)
            places[lucky] = wanted
            homeless.append(pending[full])
            lost = np.flatnonzero(~(won | full))
            pending, rows, picks = pending.take(lost), rows.take(lost), picks.take(lost)
        return places, np.concatenate([np.empty(0, dtype=np.int64), *homeless])

    def free(self, places: Positions) -> None:
        self._bytes[places] = 0

    def row_of(self, key: Key) -> int:
        return int.from_bytes(key[:4], "little") * self._num_rows >> 32

    def set_crowded(self, row: int, crowded: bool) -> None:
        """Say whether keys of this row are somewhere else for want of a lane."""
        self._bytes[(row << _LANE_BITS) + _CROWDED] = crowded

    def clear(self) -> None:
        self._tags.fill(0)

    def _rows(self, words: KeyArray) -> Positions:
        return ((words[:, 0] & _LOW_HALF) * np.uint64(self._num_rows) >> _HALF).view(np.int64)


def _tags(words: KeyArray) -> npt.NDArray[np.uint64]:
    return np.maximum(words[:, 1] & _BYTE, np.uint64(1))


def _used_lanes(tags: npt.NDArray[np.uint64]) -> Positions:
    """The lanes that are not empty, one bit each."""
    used = ((tags & _LOW_BITS) + _LOW_BITS | tags) >> np.uint64(7) & _IN_EVERY_LANE
    return (used * _BITS_TO_TOP >> np.uint64(56)).view(np.int64)
