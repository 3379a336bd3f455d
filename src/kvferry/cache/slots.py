"""The slot table of a tier: index from keys to slots, free slots, chains, states and readers.

A parent must outlive its children, or what is left of a conversation cannot be reached. So slots
are evicted in sets that include all their descendants.

One lookup finds a whole request's keys, at a cost that hardly depends on the number of slots.
Blocks stored together mostly lie in adjacent slots, a run. So a lookup finds one key in a hash
table and compares the keys of the next slots with the request's next keys. That is one
sequential pass over memory, which a processor prefetches, instead of random accesses. Keys in
short runs are looked up in the table, all at once.
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

_LANES = 4  # cells a row, one row per slot: 1 key in 60 finds its row full, also after long use

_ABSENT = NO_SLOT  # cell of a slot whose key is not in the index
_SPILLED = -2  # cell of a slot whose key is in the dict

_FEW = 4  # keys up to which plain Python beats arrays
_FIRST_LOOK = 512  # keys compared at once where a run begins
_LOOK_GROWTH = 8  # factor by which each further comparison of a run is longer
_LONG = 1024  # keys; a shorter run costs more to follow than its keys cost in the table
_SHORT_RUNS = 4  # short runs followed before the rest of the keys is looked up in the table
_PIECE = 2048  # keys; a temporary above 128 KiB is mapped and faulted in anew at every call
_RUN = 64  # mean slots per run from which writing keys run by run beats writing them by index
_WHOLE = np.dtype((np.void, KEY_BYTES))


class SlotState(IntEnum):
    """State of a slot; see the drawing at the top of ``pool.py``."""

    FREE = 0
    WRITING = 1
    CACHED = 2
    DOOMED = 3
    UNREADY = 4


# Plain integers: numpy converts an IntEnum slowly.
FREE, WRITING, CACHED, DOOMED, UNREADY = (state.value for state in SlotState)


@dataclass(frozen=True)
class PoolCounts:
    """How the slots of a pool are used; ``free + cached + leased + unready == total``, always.

    ``unready`` slots exist, but their memory cannot be used yet. ``leased`` includes the ``pinned``
    slots. ``refused_pins`` counts blocks not pinned because of the bound on pins.
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
"""Some slots of a lease, as positions in ``Lease.slots``."""


def as_slots(slots: Integers) -> SlotArray:
    """Return a read-only int64 copy of slot numbers; InputError for negatives and non-integers."""
    array = np.array(integers(slots, "slots"))
    if array.size and int(array.min()) < 0:
        raise InputError(f"slots must not be negative, got {int(array.min())}")
    array.setflags(write=False)
    return array


ALL_WELL = as_slots(())


class Purpose(Enum):
    """Why slots are claimed."""

    WRITE = "write"  # bytes are being written: not matchable, not evictable
    READ = "read"  # bytes are being read: matchable, not evictable
    COPY = "copy"  # like READ, but no use of the blocks: their place in the eviction order stays


class Ending(Enum):
    """How a lease ends. WRITE: commit or abort. READ and COPY: release or spoil."""

    COMMIT = "commit"
    ABORT = "abort"
    RELEASE = "release"
    SPOIL = "spoil"


@dataclass(eq=False, slots=True, repr=False)
class Lease:
    """A claim on ``slots``, made by a pool and given back to it exactly once.

    ``positions[i]`` is the position of the key of ``slots[i]`` among the requested keys. The pool
    owns the slots' state; the lease owns only the right to end the claim.
    """

    purpose: Purpose
    slots: SlotArray
    positions: SlotArray
    _owner: Any  # the pool
    ended: Ending | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def commit(self, failed: Places = ALL_WELL) -> None:
        """End a write: the bytes are there, and the blocks can be matched from now on.

        The blocks at the positions in ``failed`` are aborted, and so are this lease's blocks after
        them in a chain. No lookup could reach those, and they would only take up slots.
        """
        self._owner.end(self, Ending.COMMIT, failed)

    def abort(self) -> None:
        """End a write without its bytes: the slots are free again and the keys not stored."""
        self._owner.end(self, Ending.ABORT)

    def release(self, failed: Places = ALL_WELL) -> None:
        """End a read: the slots may be evicted again.

        The blocks at the positions in ``failed`` are spoiled. Blocks after them in a chain are good
        and stay, to be reached again once their parent is stored again. But they served no request,
        so this does not count as a use of them.
        """
        self._owner.end(self, Ending.RELEASE, failed)

    def spoil(self) -> None:
        """End a read that failed: the blocks are never matched again."""
        self._owner.end(self, Ending.SPOIL)

    def disown(self) -> None:
        """Make the blocks unmatchable while the claim goes on, because their bytes are in doubt.

        A slow rank may still touch the slots, so they stay claimed until the lease ends.
        """
        self._owner.disown(self)

    def __repr__(self) -> str:
        return f"Lease({self.purpose.value}, {len(self)} slots)"


Positions = npt.NDArray[np.int64]


class Index:
    """Maps keys to slots and slots to keys. Owns both maps; knows nothing of states or leases.

    A key belongs to one row of the hash table. It is in one of the row's lanes, or in a dict where
    other keys fill the row. A *cell* is one lane of one row, numbered over the whole table.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_rows = num_slots
        # Filled here, because the first touch of a page would delay a scheduler step later.
        self._cells = np.full(self._num_rows * _LANES, NO_SLOT, dtype=np.int32)
        self._lanes = self._cells.reshape(-1, _LANES)  # the same memory, by row
        self._num_spilled = np.full(self._num_rows, 0, dtype=np.int32)  # keys in the dict, by row
        self._spilled: dict[bytes, int] = {}
        self._keys = np.full((num_slots, KEY_WORDS), 0, dtype="<u8")
        self._cell = slot_numbers(num_slots)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def key_of(self, slot: int) -> Key:
        """Return the key last inserted for ``slot``; only valid while it is in the index."""
        return Key(self._keys[slot].tobytes())

    def keys_of(self, slots: SlotArray) -> Keys:
        """Return the keys last inserted for ``slots``; only valid while they are in the index."""
        return Keys(self._keys.take(slots, axis=0))

    # -- looking up -----------------------------------------------------------------------------

    def find(self, keys: Keys) -> SlotArray:
        """Return the slot of each key, or ``NO_SLOT``."""
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
        """Return the slots of the leading keys in the index, up to the first that is missing."""
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
        """Return the slot of each of a few keys, given as concatenated bytes, or ``NO_SLOT``."""
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
        """Return how many leading keys lie in adjacent slots from ``slot`` on, the first's slot."""
        length, look = 1, _FIRST_LOOK
        longest = min(len(words), len(self._keys) - slot)
        while length < longest:
            start, ahead = slot + length, min(look, longest - length)
            differs = self._keys[start : start + ahead] != words[length : length + ahead]
            # A slot keeps its last key; only its cell says whether the key is still in the index.
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
        """Return the slot of each key, or ``NO_SLOT``, from the hash table and not from runs."""
        found = np.full(len(words), NO_SLOT, dtype=np.int64)
        rows = self._rows_of(words)
        lanes = self._lanes.take(rows, axis=0).ravel()
        used = (lanes != NO_SLOT).nonzero()[0]
        for start in range(0, len(used), _PIECE):
            piece = used[start : start + _PIECE]
            at, slots = piece // _LANES, lanes.take(piece)
            differs = self._keys.take(slots, axis=0) ^ words.take(at, axis=0)
            # Column by column: numpy reduces an axis of four elements very slowly.
            same = (differs[:, 0] | differs[:, 1] | differs[:, 2] | differs[:, 3]) == 0
            found[at[same]] = slots[same]
        if self._spilled:
            elsewhere = (found == NO_SLOT) & (self._num_spilled.take(rows) > 0)
            for position in elsewhere.nonzero()[0].tolist():
                found[position] = self._spilled.get(words[position].tobytes(), NO_SLOT)
        return found

    def _rows_of(self, words: KeyArray) -> Positions:
        # Converted to 64 bits first: numpy 1 would multiply in 32 bits.
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
            # Several slots may have chosen one cell: the last one written has it, the others retry.
            self._cells[cells] = slots
            self._cell[slots] = cells
            lost = (self._cells.take(cells) != slots).nonzero()[0]
            slots, rows = slots.take(lost), rows.take(lost)

    def _spill(self, slots: SlotArray, rows: Positions) -> None:
        """Put the keys of these slots into the dict, because their rows are full."""
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
        """Remove the keys of these slots; IntegrityError if one is not in the index."""
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
        """Return every slot in the index, ascending. Scans all slots: for checks only."""
        return (self._cell != _ABSENT).nonzero()[0]


def num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """Return how many flags are true before the first false one."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first


class FreeSlots:
    """A stack of free slots. Owns their order; leaves their states to :class:`SlotTable`."""

    __slots__ = ("_stack", "count")

    def __init__(self, num_slots: int) -> None:
        self._stack = np.empty(num_slots, dtype=np.int32)
        self.count = 0

    @property
    def slots(self) -> SlotArray:
        """All free slots; the last one is taken next."""
        return self._stack[: self.count].astype(np.int64)

    def push(self, ascending: SlotArray) -> None:
        """Add free slots, the lowest of which is taken first.

        Blocks stored together then lie in as few runs as the slots allow, which the index looks up
        faster.
        """
        end = self.count + len(ascending)
        self._stack[self.count : end] = ascending[::-1]
        self.count = end

    def take(self, count: int) -> SlotArray:
        """Remove and return ``count`` slots; the caller makes sure that so many are free."""
        self.count -= count
        return self._stack[self.count : self.count + count][::-1].astype(np.int64)

    def give_out_next(self, slots: SlotArray) -> None:
        """Make :meth:`take` return these slots next, in this order; InputError if one is in use."""
        free = np.zeros(len(self._stack), dtype=bool)
        free[self._stack[: self.count]] = True
        if not free.take(slots).all():
            raise InputError(f"{len(slots)} slots cannot be given out next: some are not free")
        free[slots] = False
        others = np.flatnonzero(free)
        self._stack[: len(others)] = others[::-1]
        self._stack[len(others) : self.count] = slots[::-1]


class Chains:
    """Each slot's parent and number of children. Owns only these, no keys, states or leases."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._parent = slot_numbers(num_slots)
        self.children = np.zeros(num_slots, dtype=np.int32)
        """For each slot, how many slots have it as parent."""
        self._place = slot_numbers(num_slots)  # scratch, NO_SLOT between calls

    def parents_of(self, slots: SlotArray) -> SlotArray:
        """Return each slot's parent, ``NO_SLOT`` where there is none."""
        return self._parent.take(slots).astype(np.int64, copy=False)

    def own_end(self, slots: SlotArray) -> SlotArray:
        """Return the end of a chain: its slots after the last one that other chains share."""
        children = self.children.take(slots)
        after = np.append(self._parent.take(slots[1:]) == slots[:-1], False)
        shared = np.flatnonzero(children > after)
        return slots[int(shared[-1]) + 1 :] if len(shared) else slots

    def begin(self, slots: SlotArray, above: int) -> None:
        """Link new slots into a chain; the parent of the first is ``above`` unless ``NO_SLOT``."""
        if not len(slots):
            return
        before, after = slots[:-1], slots[1:]
        self._parent[after] = before
        self.children[before] = 1
        if above != NO_SLOT:
            self._parent[slots[0]] = above
            self.children[above] += 1

    def link(self, slots: SlotArray, before: SlotArray) -> None:
        """Set ``before[i]`` as the parent of ``slots[i]`` if it has none, as after a lost parent.

        Skips pairs in which either side is ``NO_SLOT``.
        """
        known = (slots != NO_SLOT) & (before != NO_SLOT)
        slots, before = slots[known], before[known]
        lone = self._parent.take(slots) == NO_SLOT
        slots, before = slots[lone], before[lone]
        self._parent[slots] = before
        self.children[before] += 1  # no duplicates: each has one next block here

    def leave(self, slots: SlotArray) -> None:
        """Unlink slots that are evicted with all their descendants (see :meth:`can_go`)."""
        parents = self._parent.take(slots).astype(np.int64, copy=False)
        # Most chains are evicted from their end on; then each parent stands right after its child.
        apart = (parents[:-1] != slots[1:]).nonzero()[0]
        if len(apart):
            left = np.concatenate((parents.take(apart), parents[-1:]))
            np.subtract.at(self.children, left[left != NO_SLOT], 1)
        elif parents[-1] != NO_SLOT:
            self.children[parents[-1]] -= 1
        self._parent[slots] = NO_SLOT
        self.children[slots] = 0

    def unlink(self, slots: SlotArray) -> None:
        """Unlink slots whose bytes are lost. Children that stay are left without a parent."""
        parents = self._parent.take(slots).astype(np.int64, copy=False)
        np.subtract.at(self.children, parents[parents != NO_SLOT], 1)
        self._parent[slots] = NO_SLOT
        bereft = slots[self.children.take(slots) > 0]
        if len(bereft):  # scanning every slot is acceptable: lost bytes are rare
            self._parent[np.isin(self._parent, bereft)] = NO_SLOT
            self.children[bereft] = 0

    def clear(self) -> None:
        self._parent.fill(NO_SLOT)
        self.children.fill(0)

    def can_go(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return which of these slots can be evicted together: no descendant of theirs stays."""
        children = self.children.take(slots)
        # Chains listed from their end on: as many slots stand right before their parent as all
        # slots have children, so no child is outside.
        beside = np.count_nonzero(self._parent.take(slots[:-1]) == slots[1:])
        if np.add.reduce(children) == beside:
            return slots != NO_SLOT  # all of them
        above = self._parents_among(slots)
        going = np.bincount(above[above != NO_SLOT], minlength=len(slots))
        stays = going != children
        # A slot that stays keeps all its ancestors. Doubling the distance reaches all of them in a
        # few rounds; one level a round would take as many rounds as the chain is long.
        for _ in range(len(slots).bit_length()):
            linked = np.flatnonzero(above != NO_SLOT)
            if not len(linked) or not stays.any():
                break
            stays[above[linked[stays[linked]]]] = True
            above[linked] = above.take(above[linked])
        return ~stays

    def follow(self, slots: SlotArray, lost: SlotArray) -> npt.NDArray[np.bool_]:
        """Return which of these slots have any of the ``lost`` slots as an ancestor.

        Walks up from each slot, which is slow: for the rare case that bytes were lost.
        """
        after = {NO_SLOT: False, **dict.fromkeys(lost.tolist(), True)}
        found = []
        for slot in self._parent.take(slots).tolist():
            path = []
            while slot not in after:
                after[slot] = False  # until known; also ends the walk if the parents form a ring
                path.append(slot)
                slot = self._parent.item(slot)
            after.update(dict.fromkeys(path, after[slot]))
            found.append(after[slot])
        return np.array(found, dtype=bool)

    def children_first(self, slots: SlotArray) -> SlotArray:
        """Return these slots ordered so that each comes after its descendants among them."""
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
        # Most chains lie in one run, in rising or falling order.
        rises = int(np.count_nonzero(slots[1:] > slots[:-1]))
        if rises >= len(slots) - 1:
            return True
        falls = rises or int(np.count_nonzero(slots[1:] < slots[:-1]))
        return (not rises and falls >= len(slots) - 1) or bool(self.last_mentions(slots).all())

    def last_mentions(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return, for each position, whether no later position in ``slots`` names the same slot."""
        at = np.arange(len(slots))
        self._place[slots] = at
        last = self._place.take(slots) == at
        self._place[slots] = NO_SLOT
        return np.asarray(last)

    def check(self, living: npt.NDArray[np.bool_]) -> None:
        """Raise IntegrityError unless parents and children agree and are ``living`` slots."""
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
        """Return, for each slot, the position of its parent in ``slots``, or ``NO_SLOT``."""
        self._place[slots] = np.arange(len(slots))
        parents = self._parent.take(slots)
        above = np.where(parents == NO_SLOT, NO_SLOT, self._place.take(parents, mode="wrap"))
        self._place[slots] = NO_SLOT
        return above.astype(np.int64, copy=False)


class SlotTable:
    """Owns state, readers, key and chain of every slot of a tier; leaves decisions to the pool."""

    def __init__(self, num_slots: int, log: EventLog) -> None:
        self.num_slots = num_slots
        self.log = log
        self.index = Index(num_slots)
        self.chains = Chains(num_slots)
        # One entry more than slots: NO_SLOT indexes the last entry, which is never cached.
        self.state = np.full(num_slots + 1, UNREADY, dtype=np.int8)
        self.readers = np.zeros(num_slots, dtype=np.int32)
        self.free = FreeSlots(num_slots)
        self.num_idle = 0
        """Cached slots under no lease and no pin."""
        self.num_doomed = 0
        self.num_evicted = 0

    def is_idle(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return, for each slot, whether its block is cached, under no lease and no pin."""
        return (self.readers.take(slots) == 0) & (self.state.take(slots) == CACHED)

    def can_go(self, slot: int) -> bool:
        """Whether a slot is idle and has no children, so that it can be evicted."""
        is_idle = self.state.item(slot) == CACHED and not self.readers.item(slot)
        return is_idle and not self.chains.children.item(slot)

    def claim(self, slots: SlotArray) -> None:
        """Add one reader to each of these distinct slots."""
        readers = self.readers.take(slots)
        self.num_idle -= len(slots) - int(np.count_nonzero(readers))
        self.readers[slots] = readers + 1

    def add_free(self, ascending: SlotArray) -> None:
        """Make these slots free, in ascending order."""
        self.state[ascending] = FREE
        self.free.push(ascending)

    def evict(self, going: SlotArray, untold: SlotArray) -> None:
        """Free these idle slots, each after its followers; the policy still holds ``untold``."""
        self.num_idle -= len(going)
        self.log.append(EventKind.EVICT, untold, self.index.keys_of(going))
        self.index.remove(going)
        self.chains.leave(going)
        ascending = going.copy()
        ascending.sort(kind="stable")  # a stable sort is quick on runs
        self.add_free(ascending)

    def doom(self, slots: SlotArray) -> None:
        """Make these claimed slots unmatchable; they become free when their claims end."""
        cached = slots[self.state.take(slots) == CACHED]
        self.log.append(EventKind.EVICT, slots, self.index.keys_of(cached))
        self.index.remove(slots)
        self.chains.unlink(slots)
        self.state[slots] = DOOMED
        self.num_doomed += len(slots)

    def doom_all(self) -> SlotArray:
        """Forget every block: free idle slots now, claimed ones when their claims end.

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
