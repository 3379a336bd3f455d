"""The slots of a tier: which are free, what each holds, and which follows which, which are leased.

A parent must outlive its children, or what is left of a conversation cannot be reached. So slots
leave in sets that take all their descendants along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import EventKind, EventLog
from kvferry.cache.index import Index
from kvferry.core.quantities import Integers, integers
from kvferry.errors import InputError, IntegrityError
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray, slot_numbers


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


class LeaseOwner(Protocol):
    """The pool that made a lease."""

    def end(self, lease: Lease, ending: Ending, failed: Places = ...) -> None:
        """Take the slots back. ``failed`` are places; those blocks are lost."""

    def disown(self, lease: Lease) -> None:
        """Stop believing in the bytes; the slots stay claimed until the lease ends."""


@dataclass(eq=False, slots=True, repr=False)
class Lease:
    """A claim on ``slots``, made by a pool and given back to it exactly once.

    ``positions[i]`` says which of the keys that were asked for got ``slots[i]``. The pool owns the
    slots' state; the lease owns only the right to end the claim.
    """

    purpose: Purpose
    slots: SlotArray
    positions: SlotArray
    _owner: LeaseOwner
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

    def parent_of(self, slot: int) -> int:
        """The slot before this one, or ``NO_SLOT``."""
        return int(self._parent[slot])

    def parents_of(self, slots: SlotArray) -> SlotArray:
        """The slot before each, ``NO_SLOT`` where there is none."""
        return self._parent.take(slots).astype(np.int64, copy=False)

    def own_end(self, slots: SlotArray) -> SlotArray:
        """The last of a chain's slots: those that no other chain goes on from."""
        children = self.children.take(slots)
        after = np.append(self._parent.take(slots[1:]) == slots[:-1], False)
        shared = np.flatnonzero(children > after)
        return slots[int(shared[-1]) + 1 :] if len(shared) else slots

    def num_children(self, slots: SlotArray) -> npt.NDArray[np.int32]:
        """How many slots follow right after each of these."""
        return self.children.take(slots)

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


class Conversations:
    """Position and conversation of each slot's block, from when it is given out. Owns these two.

    A number is never used for two conversations. What is said of a free slot has no meaning.
    """

    def __init__(self, num_slots: int) -> None:
        # Not touched where no policy wants them, so they take no memory then.
        self._position = np.zeros(num_slots, dtype=np.int64)
        self._conversation = np.zeros(num_slots, dtype=np.int64)
        self._next = 0

    def positions_of(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return self._position.take(slots)

    def conversations_of(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return self._conversation.take(slots)

    def arrive(
        self,
        slots: SlotArray,
        positions: SlotArray,
        found: SlotArray,
        above: int,
        chains: Chains | None,
    ) -> None:
        """Note where in which conversation new blocks are, before ``chains`` links them.

        They are at ``positions`` of a call whose blocks are where ``found`` says, and which follow
        slot ``above``. Without ``chains`` they stand alone.
        """
        if chains is None:
            self._position[slots] = 0
            self._conversation[slots] = np.arange(self._next, self._next + len(slots))
            self._next += len(slots)
            return
        first = positions.item(0)
        before = found.item(first - 1) if first else above
        start = self._position.item(before) + 1 if before != NO_SLOT else 0
        self._position[slots] = positions + (start - first)
        if before != NO_SLOT and not chains.children.item(before):
            self._conversation[slots] = self._conversation.item(before)
        else:
            self._conversation[slots] = self._next
            self._next += 1


class SlotTable:
    """State, readers, key and chain of every slot of a tier. Decides nothing: pools do."""

    def __init__(self, num_slots: int, log: EventLog) -> None:
        self.num_slots = num_slots
        self.log = log
        self.index = Index(num_slots)
        self.chains = Chains(num_slots)
        self.conversations = Conversations(num_slots)
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
