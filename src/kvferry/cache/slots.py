"""The slots of a tier: which are free, which key each holds, which follows which, which are leased.

A parent must outlive its children, or what is left of a conversation cannot be reached. So slots
leave in sets that take all their descendants along.

Keys are looked up for a whole request in one call, at a cost that the number of slots hardly moves.
Blocks that were stored together mostly lie in slots that follow each other. So a lookup finds one
key in a table and compares the keys of the slots behind it with those that were asked for: one
pass over memory, which a processor reads ahead, where a table is fetched from at random. What lies
in short runs is found in the table, all keys at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import EventKind, EventLog
from kvferry.core.keys import KEY_BYTES, KEY_WORDS, Key, KeyArray, Keys
from kvferry.core.quantities import Integers, integers
from kvferry.errors import InputError, IntegrityError
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray, slot_numbers

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


class SlotState(IntEnum):
    """What a slot is; see the drawing at the top of ``pool.py``."""

    FREE = 0
    WRITING = 1
    CACHED = 2
    DOOMED = 3
    UNREADY = 4


# As plain numbers: numpy takes an IntEnum the long way.
FREE, WRITING, CACHED, DOOMED, UNREADY = (state.value for state in SlotState)


@dataclass(frozen=True)
class PoolCounts:
    """How the slots of a pool are used; ``free + cached + leased + unready == total``, always.

    ``unready`` slots exist, but their memory cannot be used yet. ``pinned`` ones are among the
    leased. ``refused_pins`` counts blocks that the bound left no room to pin.
    """

    free: int
    cached: int
    leased: int
    total: int
    evicted: int
    unready: int = 0
    pinned: int = 0
    refused_pins: int = 0


Places = Sequence[int] | npt.NDArray[np.integer]
"""Which slots of a lease, by their place in ``Lease.slots``."""


def as_slots(slots: Integers) -> SlotArray:
    """Slot numbers as a read-only int64 vector of their own; refuses negatives and non-integers."""
    array = np.array(integers(slots, "slots"))
    if array.size and int(array.min()) < 0:
        raise InputError(f"slots must not be negative, got {int(array.min())}")
    array.setflags(write=False)
    return array


ALL_WELL = as_slots(())


class Purpose(Enum):
    """Why slots are claimed."""

    WRITE = "write"  # bytes are arriving: not matchable, not evictable
    READ = "read"  # bytes are leaving: matchable, not evictable
    COPY = "copy"  # as READ, but no sign of use: the slots keep their place in the eviction order


class Ending(Enum):
    """How a lease ends. WRITE: commit or abort. READ and COPY: release or spoil."""

    COMMIT = "commit"
    ABORT = "abort"
    RELEASE = "release"
    SPOIL = "spoil"


@dataclass(eq=False, slots=True, repr=False)
class Lease:
    """A claim on ``slots``, made by a pool and given back to it exactly once.

    ``positions[i]`` says which of the keys that were asked for got ``slots[i]``. The pool owns the
    slots' state; the lease owns only the right to end the claim.
    """

    purpose: Purpose
    slots: SlotArray
    positions: SlotArray
    _owner: Any  # the pool
    ended: Ending | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def commit(self, failed: Places = ALL_WELL) -> None:
        """The bytes are there: the blocks may be matched from now on.

        Except at the places in ``failed``: those blocks are aborted, and with them the blocks of
        this lease that follow one of them in a chain. They could not be reached, and would take
        room from what can be.
        """
        self._owner.end(self, Ending.COMMIT, failed)

    def abort(self) -> None:
        """The bytes did not come: the slots go back as if never asked for."""
        self._owner.end(self, Ending.ABORT)

    def release(self, failed: Places = ALL_WELL) -> None:
        """The bytes were read: the slots may be evicted again.

        Except at the places in ``failed``: those blocks are spoiled. What follows one of them in a
        chain is good and stays, to be reached again once its parent is back; but it served no
        request, so this is no use of it.
        """
        self._owner.end(self, Ending.RELEASE, failed)

    def spoil(self) -> None:
        """The bytes could not be read: the blocks must never be matched again."""
        self._owner.end(self, Ending.SPOIL)

    def disown(self) -> None:
        """The bytes are in doubt while the claim goes on: its blocks must not be matched.

        A slow rank may still touch the slots, so they stay claimed until the lease ends.
        """
        self._owner.disown(self)

    def __repr__(self) -> str:
        return f"Lease({self.purpose.value}, {len(self)} slots)"


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


class FreeSlots:
    """A stack of free slots. Owns their order; what else is true of a slot the pool knows."""

    __slots__ = ("_stack", "count")

    def __init__(self, num_slots: int) -> None:
        self._stack = np.empty(num_slots, dtype=np.int32)
        self.count = 0

    @property
    def slots(self) -> SlotArray:
        """All of them; the last is given out next."""
        return self._stack[: self.count].astype(np.int64)

    def push(self, ascending: SlotArray) -> None:
        """The lowest is given out first.

        What is stored together then lies in as few runs as the slots allow, which the index looks
        up faster.
        """
        end = self.count + len(ascending)
        self._stack[self.count : end] = ascending[::-1]
        self.count = end

    def take(self, count: int) -> SlotArray:
        """As many slots, of which there are enough."""
        self.count -= count
        return self._stack[self.count : self.count + count][::-1].astype(np.int64)

    def give_out_next(self, slots: SlotArray) -> None:
        """The next ones taken are these, in this order."""
        free = np.zeros(len(self._stack), dtype=bool)
        free[self._stack[: self.count]] = True
        if not free.take(slots).all():
            raise InputError(f"{len(slots)} slots cannot be given out next: some are not free")
        free[slots] = False
        others = np.flatnonzero(free)
        self._stack[: len(others)] = others[::-1]
        self._stack[len(others) : self.count] = slots[::-1]


class Chains:
    """Parents and how many children each has. Owns only these; knows no keys, states or claims."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._parent = slot_numbers(num_slots)
        self.children = np.zeros(num_slots, dtype=np.int32)
        """How many slots follow right after each."""
        self._place = slot_numbers(num_slots)  # scratch, NO_SLOT between calls

    def parents_of(self, slots: SlotArray) -> SlotArray:
        """The slot before each, ``NO_SLOT`` where there is none."""
        return self._parent.take(slots).astype(np.int64, copy=False)

    def own_end(self, slots: SlotArray) -> SlotArray:
        """The last of a chain's slots: those that no other chain goes on from."""
        children = self.children.take(slots)
        after = np.append(self._parent.take(slots[1:]) == slots[:-1], False)
        shared = np.flatnonzero(children > after)
        return slots[int(shared[-1]) + 1 :] if len(shared) else slots

    def begin(self, slots: SlotArray, above: int) -> None:
        """Slots that no chain knows yet follow each other, the first of them ``above`` if any."""
        if not len(slots):
            return
        before, after = slots[:-1], slots[1:]
        self._parent[after] = before
        self.children[before] = 1
        if above != NO_SLOT:
            self._parent[slots[0]] = above
            self.children[above] += 1

    def link(self, slots: SlotArray, before: SlotArray) -> None:
        """Give each slot the one before it as parent, also where a lost parent is back.

        ``NO_SLOT`` on either side means: nothing to link here.
        """
        known = (slots != NO_SLOT) & (before != NO_SLOT)
        slots, before = slots[known], before[known]
        lone = self._parent.take(slots) == NO_SLOT
        slots, before = slots[lone], before[lone]
        self._parent[slots] = before
        self.children[before] += 1  # distinct: each has one next block here

    def leave(self, slots: SlotArray) -> None:
        """These slots leave, and all their descendants with them (see :meth:`can_go`)."""
        parents = self._parent.take(slots).astype(np.int64, copy=False)
        # Most chains leave from their end on. A parent right behind its child leaves, too.
        apart = (parents[:-1] != slots[1:]).nonzero()[0]
        if len(apart):
            left = np.concatenate((parents.take(apart), parents[-1:]))
            np.subtract.at(self.children, left[left != NO_SLOT], 1)
        elif parents[-1] != NO_SLOT:
            self.children[parents[-1]] -= 1
        self._parent[slots] = NO_SLOT
        self.children[slots] = 0

    def unlink(self, slots: SlotArray) -> None:
        """The bytes of these slots are lost. Children that stay have no parent then."""
        parents = self._parent.take(slots).astype(np.int64, copy=False)
        np.subtract.at(self.children, parents[parents != NO_SLOT], 1)
        self._parent[slots] = NO_SLOT
        bereft = slots[self.children.take(slots) > 0]
        if len(bereft):  # a look at every slot is fair where bytes were lost
            self._parent[np.isin(self._parent, bereft)] = NO_SLOT
            self.children[bereft] = 0

    def clear(self) -> None:
        self._parent.fill(NO_SLOT)
        self.children.fill(0)

    def can_go(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Which of these slots can leave together: no descendant of theirs stays behind."""
        children = self.children.take(slots)
        # A chain that lies here from its end on: as many have their parent behind them as all of
        # these have children, so no child is anywhere else.
        beside = np.count_nonzero(self._parent.take(slots[:-1]) == slots[1:])
        if np.add.reduce(children) == beside:
            return slots != NO_SLOT  # all of them
        above = self._parents_among(slots)
        going = np.bincount(above[above != NO_SLOT], minlength=len(slots))
        stays = going != children
        # A slot that stays keeps all its ancestors. Doubling the step reaches those of any depth
        # in a few rounds; one level a round would take as many rounds as the chain is long.
        for _ in range(len(slots).bit_length()):
            linked = np.flatnonzero(above != NO_SLOT)
            if not len(linked) or not stays.any():
                break
            stays[above[linked[stays[linked]]]] = True
            above[linked] = above.take(above[linked])
        return ~stays

    def follow(self, slots: SlotArray, lost: SlotArray) -> npt.NDArray[np.bool_]:
        """Which of these slots come after any of the ``lost`` in their chains.

        Walks up from each: for the rare case that bytes were lost.
        """
        after = {NO_SLOT: False, **dict.fromkeys(lost.tolist(), True)}
        found = []
        for slot in self._parent.take(slots).tolist():
            path = []
            while slot not in after:
                after[slot] = False  # until known; ends the walk of a ring, too
                path.append(slot)
                slot = self._parent.item(slot)
            after.update(dict.fromkeys(path, after[slot]))
            found.append(after[slot])
        return np.array(found, dtype=bool)

    def children_first(self, slots: SlotArray) -> SlotArray:
        """These slots, each after those of its descendants that are among them."""
        above = self._parents_among(slots)
        depth = (above != NO_SLOT).astype(np.int64, copy=False)
        for _ in range(len(slots).bit_length()):
            linked = np.flatnonzero(above != NO_SLOT)
            if not len(linked):
                break
            depth[linked] += depth.take(above[linked])
            above[linked] = above.take(above[linked])
        return slots[np.argsort(-depth, kind="stable")]

    def all_distinct(self, slots: SlotArray) -> bool:
        """Whether no slot is named twice."""
        # Most chains lie in one run, in order, or from their end on.
        rises = int(np.count_nonzero(slots[1:] > slots[:-1]))
        if rises >= len(slots) - 1:
            return True
        falls = rises or int(np.count_nonzero(slots[1:] < slots[:-1]))
        return (not rises and falls >= len(slots) - 1) or bool(self.last_mentions(slots).all())

    def last_mentions(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """True where no later place in ``slots`` names the same slot."""
        at = np.arange(len(slots))
        self._place[slots] = at
        last = self._place.take(slots) == at
        self._place[slots] = NO_SLOT
        return np.asarray(last)

    def check(self, living: npt.NDArray[np.bool_]) -> None:
        """Prove that parents and children agree and that only ``living`` slots have any."""
        linked = (self._parent != NO_SLOT).nonzero()[0]
        parents = self._parent[linked]
        if np.count_nonzero(living[linked]) < len(linked):
            raise IntegrityError("pool: a dead slot has a parent")
        if np.count_nonzero(living[parents]) < len(linked):
            raise IntegrityError("pool: a parent died before its child")
        counted = np.bincount(parents, minlength=len(self._parent))
        if np.count_nonzero(counted != self.children):
            raise IntegrityError("pool: children are miscounted")

    def _parents_among(self, slots: SlotArray) -> SlotArray:
        """For each slot the place of its parent in ``slots``, or ``NO_SLOT``."""
        self._place[slots] = np.arange(len(slots))
        parents = self._parent.take(slots)
        above = np.where(parents == NO_SLOT, NO_SLOT, self._place.take(parents, mode="wrap"))
        self._place[slots] = NO_SLOT
        return above.astype(np.int64, copy=False)


class SlotTable:
    """State, readers, key and chain of every slot of a tier. Decides nothing: pools do."""

    def __init__(self, num_slots: int, log: EventLog) -> None:
        self.num_slots = num_slots
        self.log = log
        self.index = Index(num_slots)
        self.chains = Chains(num_slots)
        # One more than there are slots: what NO_SLOT names is never cached.
        self.state = np.full(num_slots + 1, UNREADY, dtype=np.int8)
        self.readers = np.zeros(num_slots, dtype=np.int32)
        self.free = FreeSlots(num_slots)
        self.num_idle = 0
        """Cached slots that no lease and no pin claims."""
        self.num_doomed = 0
        self.num_evicted = 0

    def is_idle(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether its block is cached and no lease and no pin claims it."""
        return (self.readers.take(slots) == 0) & (self.state.take(slots) == CACHED)

    def can_go(self, slot: int) -> bool:
        """Whether one slot is idle, and no block follows its block."""
        is_idle = self.state.item(slot) == CACHED and not self.readers.item(slot)
        return is_idle and not self.chains.children.item(slot)

    def claim(self, slots: SlotArray) -> None:
        """These distinct slots have one reader more."""
        readers = self.readers.take(slots)
        self.num_idle -= len(slots) - int(np.count_nonzero(readers))
        self.readers[slots] = readers + 1

    def add_free(self, ascending: SlotArray) -> None:
        """These slots can be given out from now on."""
        self.state[ascending] = FREE
        self.free.push(ascending)

    def evict(self, going: SlotArray, untold: SlotArray) -> None:
        """Free these idle slots, each after its followers. ``untold``: those the policy holds."""
        self.num_idle -= len(going)
        self.log.append(EventKind.EVICT, untold, self.index.keys_of(going))
        self.index.remove(going)
        self.chains.leave(going)
        ascending = going.copy()
        ascending.sort(kind="stable")  # quick where there are runs
        self.add_free(ascending)

    def doom(self, slots: SlotArray) -> None:
        """Nothing matches these claimed slots any more; they are freed when their claims end."""
        cached = slots[self.state.take(slots) == CACHED]
        self.log.append(EventKind.EVICT, slots, self.index.keys_of(cached))
        self.index.remove(slots)
        self.chains.unlink(slots)
        self.state[slots] = DOOMED
        self.num_doomed += len(slots)

    def doom_all(self) -> SlotArray:
        """Forget every block: idle slots are free, claimed ones when their claims end.

        Returns the slots that were idle.
        """
        state = self.state[:-1]
        cached = state == CACHED
        idle = cached & (self.readers == 0)
        in_use = (state != FREE) & (state != UNREADY)
        if np.count_nonzero(cached):
            keys = self.index.keys_of(np.flatnonzero(cached))
            self.log.append(EventKind.EVICT, NO_SLOTS, keys)
        self.index.clear()
        self.chains.clear()
        state[in_use] = DOOMED
        freed = np.flatnonzero(idle)
        self.add_free(freed)
        self.num_idle = 0
        self.num_doomed = int(np.count_nonzero(state == DOOMED))
        return freed
