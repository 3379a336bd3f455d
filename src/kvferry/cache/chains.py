"""Chains of blocks: the slot of each block, with the slot of the block before it.

A parent must outlive its children, or what is left of a conversation cannot be reached. So slots
leave in sets that take all their descendants along.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, SlotArray, slot_numbers

_FEW = 8  # up to so many plain Python beats arrays


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
            self._lose_child(left[left != NO_SLOT])
        elif parents[-1] != NO_SLOT:
            self.children[parents[-1]] -= 1
        self._parent[slots] = NO_SLOT
        self.children[slots] = 0

    def unlink(self, slots: SlotArray) -> None:
        """The bytes of these slots are lost. Children that stay have no parent then."""
        parents = self._parent.take(slots).astype(np.int64, copy=False)
        self._lose_child(parents[parents != NO_SLOT])
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

    def _lose_child(self, parents: SlotArray) -> None:
        if len(parents) <= _FEW:
            for parent in parents.tolist():
                self.children[parent] -= 1
            return
        # np.subtract.at counts repeats but is slow: use it only for the few that do repeat.
        once = self.last_mentions(parents)
        self.children[parents[once]] -= 1
        np.subtract.at(self.children, parents[~once], 1)


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
