"""The tree of recent requests, cached or not: what each shares with others, and whose slots.

::

    root --- system prompt --- chat A, asked for three times
                          +--- chat B

A node is a run of blocks that the same requests had. It ends where requests go different ways.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Evidence, Residents
from kvferry.cache.policies.returns_model import NO_HINT, NO_RECORD
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

WORD = 8
_NODE_BLOCKS = 16  # a node takes as much memory as the words of so many blocks
_LEAST_BLOCKS = 1 << 16
_TIMES_SLOTS = 6
_FORGET_AT_ONCE = 256


@dataclass(eq=False, slots=True)
class Node:
    """A run of blocks; ``words`` has eight bytes of the key of each, from position ``start`` on."""

    id: int
    words: bytes
    start: int
    parent: Node | None  # None for the root, and for what was forgotten
    children: dict[bytes, Node] = field(default_factory=dict)
    slots: SlotArray = field(default_factory=lambda: NO_SLOTS)  # held ones, in chain order
    turn: int = 0
    new_tokens: int = 0
    gap: float | None = None
    ways: int = 0  # how often a node began behind this one
    record: int = NO_RECORD
    hint: int = NO_HINT
    told: Evidence | None = None  # and was not judged yet

    @property
    def end(self) -> int:
        return self.start + len(self.words) // WORD


def _num_same(some: bytes, others: bytes) -> int:
    """How many blocks are the same at the beginning of both."""
    size = min(len(some), len(others))
    if some[:size] == others[:size]:
        return size // WORD
    one, other = (np.frombuffer(words, np.int64, size // WORD) for words in (some, others))
    return int((one != other).argmax())


class RequestTree:
    """Owns the nodes, which slots each holds, and the order in which they were asked for.

    ``time``, ``row`` and ``last_slot`` are by the number of a node. Bounded: what was longest not
    asked for and holds nothing is forgotten.
    """

    def __init__(self, residents: Residents) -> None:
        num_slots = residents.num_slots
        self.held = np.zeros(num_slots, dtype=bool)
        self._residents = residents
        self._most_blocks = max(_LEAST_BLOCKS, _TIMES_SLOTS * num_slots)
        self._of = np.zeros(num_slots, dtype=np.int32)
        self._position = np.zeros(num_slots, dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Let go of every slot, and of all requests."""
        self.held.fill(False)
        self._of.fill(0)
        self.root = Node(0, b"", 0, None)
        self.nodes = [self.root]
        self._free: list[int] = []
        self.time = np.zeros(64)
        self.row = np.zeros(64, dtype=np.int64)
        self.last_slot = np.full(64, NO_SLOT, dtype=np.int64)
        self.holding: OrderedDict[Node, None] = OrderedDict()
        """Nodes that hold slots, the one longest not used first."""
        self._others: OrderedDict[Node, None] = OrderedDict()
        self._num_blocks = 0

    # -- nodes ----------------------------------------------------------------------------------

    def _new(self, words: bytes, start: int, parent: Node) -> Node:
        number = self._free.pop() if self._free else len(self.nodes)
        node = parent.children[words[:WORD]] = Node(number, words, start, parent)
        if number == len(self.nodes):
            self.nodes.append(node)
            if number == len(self.time):
                for name in ("time", "row", "last_slot"):
                    setattr(self, name, np.tile(getattr(self, name), 2))
        self.nodes[number] = node
        self.time[number], self.row[number] = self._residents.now(), self.row[parent.id]
        self._num_blocks += len(words) // WORD + _NODE_BLOCKS
        self._others[node] = None
        return node

    def split(self, node: Node, count: int) -> Node:
        """The first blocks of a node, if not all, become one of their own; returns that."""
        size = count * WORD
        if size == len(node.words) or node.parent is None:
            return node
        upper = self._new(node.words[:size], node.start, node.parent)
        self._num_blocks -= count
        upper.children[node.words[size : size + WORD]] = node
        upper.turn, upper.gap, upper.new_tokens = node.turn, node.gap, node.new_tokens
        upper.ways = 1
        if 3 * (len(node.words) - size) <= size:  # most of it has returned
            upper.record, node.record = node.record, NO_RECORD
        self.time[upper.id], self.row[upper.id] = self.time[node.id], self.row[node.id]
        node.words, node.start, node.parent = node.words[size:], node.start + count, upper
        slots = node.slots
        own = int(self._position.take(slots).searchsorted(node.start))
        self._of[slots[:own]] = upper.id
        self._hold(upper, slots[:own])
        self._hold(node, slots[own:])
        return upper

    def extend(self, node: Node, words: bytes) -> Node:
        """A chain goes on with these behind a node's end; returns the node that has them.

        That is the node itself, longer, where nothing followed it yet.
        """
        if node.parent is not None and not node.children:
            node.words += words
            self._num_blocks += len(words) // WORD
            return node
        node.ways += 1
        return self._new(words, node.end, node)

    def forget(self) -> None:
        """Let go of what was longest not asked for, as far as there is too much."""
        for node in list(islice(self._others, _FORGET_AT_ONCE)):
            if self._num_blocks <= self._most_blocks or node.parent is None:
                break
            if node.children:
                self.touch(node)
                continue
            del self._others[node], node.parent.children[node.words[:WORD]]
            node.parent = None
            self._num_blocks -= len(node.words) // WORD + _NODE_BLOCKS
            self._free.append(node.id)

    def match(self, words: bytes) -> tuple[list[Node], int]:
        """The nodes that a request passes, the last maybe in part; how many blocks are known."""
        path: list[Node] = []
        node, at = self.root, 0
        while at < len(words) and (child := node.children.get(words[at : at + WORD])):
            path.append(child)
            end = at + len(child.words)
            if words[at:end] != child.words:
                return path, at // WORD + _num_same(child.words, words[at:])
            node, at = child, end
        return path, at // WORD

    def touch(self, node: Node) -> None:
        """This is newer than all others."""
        (self.holding if len(node.slots) else self._others).move_to_end(node)

    # -- slots ----------------------------------------------------------------------------------

    def nodes_of(self, slots: SlotArray) -> list[Node]:
        """The nodes of slots that are held, in their order."""
        return [self.nodes[number] for number in dict.fromkeys(self._of.take(slots).tolist())]

    def cursor(self, slot: int) -> tuple[Node, int]:
        """Where the blocks behind a slot belong: a node, and how many blocks of it come before."""
        if slot != NO_SLOT:
            node, position = self.nodes[self._of.item(slot)], self._position.item(slot) + 1
            if node.parent is not None and node.start < position <= node.end:
                return node, position - node.start
        return self.root, 0

    def use(self, slot: int) -> None:
        """A request was served with this slot, which is held, and those before it."""
        node = self.nodes[self._of.item(slot)]
        while node.parent is not None:
            self.touch(node)
            if node.record == NO_RECORD:
                self.time[node.id] = self._residents.now()
            node = node.parent

    def attach(self, slots: SlotArray) -> None:
        """These slots, none of which is held, are held from now on; runs of chains."""
        parents = self._residents.parents_of(slots)
        words = self._residents.keys_of(slots).array[:, 0].tobytes()
        edges = (parents[1:] != slots[:-1]).nonzero()[0] + 1
        is_loose = len(edges) == len(slots) - 1 > 0 and bool((parents == NO_SLOT).all())
        if is_loose and words[:WORD] not in self.root.children:
            edges = edges[:0]  # blocks that stand alone: one node for all
        start = 0
        for end in (*edges.tolist(), len(slots)):
            node, before = self.cursor(parents.item(start))
            self._attach_run(slots[start:end], words[start * WORD : end * WORD], node, before)
            start = end

    def _attach_run(self, slots: SlotArray, words: bytes, node: Node, before: int) -> None:
        """These slots have the words that follow behind the first blocks of a node."""
        while True:
            same = _num_same(node.words[before * WORD :], words)
            if same:
                self._put(node, slots[:same], node.start + before)
                slots, words, before = slots[same:], words[same * WORD :], before + same
            if not len(slots):
                return
            above = self.split(node, before)
            node = above.children.get(words[:WORD]) or self.extend(above, words)
            before = before if node is above else 0

    def _put(self, node: Node, slots: SlotArray, position: int) -> None:
        self._of[slots] = node.id
        self._position[slots] = np.arange(position, position + len(slots))
        self.held[slots] = True
        slots = np.concatenate((node.slots, slots))
        if len(node.slots) and self._position.item(node.slots[-1]) >= position:
            slots = slots[self._position.take(slots).argsort(kind="stable")]
        self._hold(node, slots)

    def _hold(self, node: Node, slots: SlotArray) -> None:
        """A node holds these slots and no others."""
        had, node.slots = len(node.slots), slots
        if len(slots):
            self.last_slot[node.id] = slots[-1]
        if len(slots) and not had:
            self.holding[node] = None
            del self._others[node]
        elif had and not len(slots):
            self._others[node] = None
            del self.holding[node]

    def pop(self, node: Node, count: int) -> SlotArray:
        """Let go of up to ``count`` slots of a node, its end first."""
        kept = max(0, len(node.slots) - count)
        popped = node.slots[kept:][::-1]
        self.held[popped] = False
        self._hold(node, node.slots[:kept])
        return popped

    def leave(self, slots: SlotArray) -> None:
        """These slots, all held, are held no longer."""
        self.held[slots] = False
        for node in self.nodes_of(slots):
            self._hold(node, node.slots[self.held.take(node.slots)])

    def losing(self, slots: SlotArray) -> npt.NDArray[np.int32]:
        """The numbers of the nodes with these slots, as far as their last slot can go."""
        ids = self._of.take(slots[self.held.take(slots)])
        last, residents = self.last_slot.take(ids), self._residents
        return ids[residents.is_idle(last) & (residents.num_followers_of(last) == 0)]
