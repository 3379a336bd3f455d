"""The tree of recent requests, cached or not: what each shares with others, and whose slots.

::

    root --- system prompt --- chat A, asked for three times
                          +--- chat B

A node is a run of blocks that the same requests had. It ends where requests go different ways.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.returns_model import NO_HINT, NO_RECORD
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

WORD = 8
_NODE_BLOCKS = 16  # a node takes as much memory as the words of so many blocks
_LEAST_BLOCKS = 1 << 16
_TIMES_SLOTS = 6
_MOST_SKIPPED = 64
_MOST_KIN = 32.0


class Node:
    """A run of blocks; ``words`` has eight bytes of the key of each, from position ``start`` on."""

    __slots__ = (
        "children",
        "gap",
        "hint",
        "id",
        "is_end",
        "is_left",
        "kin",
        "kin_returned",
        "new_tokens",
        "parent",
        "passes",
        "record",
        "slots",
        "start",
        "told",
        "turn",
        "words",
        "would_have",
    )

    def __init__(self, number: int, words: bytes, start: int, parent: Node | None) -> None:
        self.id, self.words, self.start, self.parent = number, words, start, parent
        self.children: dict[bytes, Node] | None = None
        self.slots: SlotArray = NO_SLOTS  # those that are held, in chain order
        self.would_have = 0  # blocks that LRU would hold
        self.passes = self.turn = self.new_tokens = 0
        self.gap: float | None = None
        self.kin = self.kin_returned = 0.0  # nodes that began behind this one; that returned
        self.record = NO_RECORD
        self.is_end = self.is_left = False
        self.hint = NO_HINT
        self.told: object = None

    @property
    def end(self) -> int:
        return self.start + len(self.words) // WORD


def _num_same(some: bytes, others: bytes) -> int:
    """How many blocks are the same at the beginning of both."""
    size = min(len(some), len(others))
    if some[:size] == others[:size]:
        return size // WORD
    differ = np.frombuffer(some, np.int64, size // WORD) != np.frombuffer(
        others, np.int64, size // WORD
    )
    return int(differ.argmax())


class RequestTree:
    """Owns the nodes, which slots each holds, and the order in which they were asked for.

    ``time``, ``row`` and ``last_slot`` are by the number of a node; ``ids[:count]`` are the nodes
    that hold slots. What LRU would hold is followed beside it: the newest blocks, as many as there
    are slots. Bounded: what was longest not asked for and holds nothing is forgotten.
    """

    def __init__(self, residents: Residents) -> None:
        num_slots = residents.num_slots
        self.held = np.zeros(num_slots, dtype=bool)
        self._residents = residents
        self._num_slots = num_slots
        self._most_blocks = max(_LEAST_BLOCKS, _TIMES_SLOTS * num_slots)
        self._of = np.zeros(num_slots, dtype=np.int32)
        self._position = np.zeros(num_slots, dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Let go of every slot, and of all requests."""
        self.held.fill(False)
        self._of.fill(0)
        self.nodes: list[Node | None] = []
        self._free: list[int] = []
        self.time = np.zeros(64)
        self.row = np.zeros(64, dtype=np.int64)
        self.last_slot = np.full(64, NO_SLOT, dtype=np.int64)
        self.ids = np.zeros(64, dtype=np.int32)
        self._place = np.zeros(64, dtype=np.int32)  # in ids
        self.count = 0
        self.holding: OrderedDict[Node, None] = OrderedDict()
        """Nodes that hold slots, the one longest not used first."""
        self._lru: OrderedDict[Node, None] = OrderedDict()
        self._others: OrderedDict[Node, None] = OrderedDict()
        self._num_lru = self._num_blocks = 0
        self.root = self._new(b"", 0, None)

    # -- nodes ----------------------------------------------------------------------------------

    def _new(self, words: bytes, start: int, parent: Node | None) -> Node:
        number = self._free.pop() if self._free else len(self.nodes)
        node = Node(number, words, start, parent)
        if number < len(self.nodes):
            self.nodes[number] = node
        else:
            self.nodes.append(node)
            if number == len(self.time):
                for name in ("time", "row", "last_slot", "ids", "_place"):
                    setattr(self, name, np.tile(getattr(self, name), 2))
        self.time[number] = self._residents.now()
        self.row[number] = 0
        self._num_blocks += len(words) // WORD + _NODE_BLOCKS
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[words[:WORD]] = node
        return node

    def _grow(self, node: Node, words: bytes) -> None:
        """A node is longer than was known."""
        node.words += words
        self._num_blocks += len(words) // WORD

    def split(self, node: Node, count: int) -> Node:
        """The first blocks of a node, if not all, become one of their own; returns that."""
        size = count * WORD
        if size == len(node.words):
            return node
        upper = self._new(node.words[:size], node.start, node.parent)
        self._num_blocks -= count
        upper.children = {node.words[size : size + WORD]: node}
        upper.turn, upper.passes, upper.gap = node.turn, node.passes, node.gap
        upper.kin, upper.kin_returned = 1.0, float(node.passes > 1)
        upper.new_tokens = node.new_tokens
        self.time[upper.id], self.row[upper.id] = self.time[node.id], self.row[node.id]
        node.words, node.start, node.parent = node.words[size:], node.start + count, upper
        upper.would_have = min(count, node.would_have)
        node.would_have -= upper.would_have
        (self._lru if upper.would_have else self._others)[upper] = None
        if upper.would_have and not node.would_have:
            del self._lru[node]
            self._others[node] = None
        if len(node.slots):
            own = int(self._position.take(node.slots).searchsorted(node.start))
            slots = node.slots
            self._of[slots[:own]] = upper.id
            self._hold(upper, slots[:own])
            self._hold(node, slots[own:])
        return upper

    def forget(self) -> None:
        """Let go of what was longest not asked for, as far as there is too much."""
        skipped = 0
        while self._num_blocks > self._most_blocks and self._others and skipped < _MOST_SKIPPED:
            node, _ = self._others.popitem(last=False)
            parent = node.parent
            if node.children or len(node.slots) or parent is None or parent.children is None:
                self._others[node] = None
                skipped += 1
                continue
            del parent.children[node.words[:WORD]]
            self._num_blocks -= len(node.words) // WORD + _NODE_BLOCKS
            self.nodes[node.id] = None
            self._free.append(node.id)

    # -- requests -------------------------------------------------------------------------------

    def match(self, words: bytes) -> tuple[list[Node], int, int]:
        """The nodes that a request passes, the last of them maybe in part.

        Returns:
            ``(path, num_blocks, num_last)``: so many of its blocks are known, so many of them in
            the last node.
        """
        path: list[Node] = []
        node, at, size, same = self.root, 0, len(words), 0
        while at < size:
            child = node.children.get(words[at : at + WORD]) if node.children else None
            if child is None:
                break
            end = at + len(child.words)
            path.append(child)
            if words[at:end] != child.words:
                same = _num_same(child.words, words[at:])
                return path, at // WORD + same, same
            node, at, same = child, end, len(child.words) // WORD
        return path, at // WORD, same

    def begin(self, node: Node, words: bytes) -> Node:
        """A request goes on with these behind a node; returns the node that has them."""
        if node is not self.root and not node.children:
            self._grow(node, words)
            return node
        node.kin += 1
        if node.kin > _MOST_KIN:
            node.kin, node.kin_returned = node.kin / 2, node.kin_returned / 2
        return self._new(words, node.end, node)

    def lru_hits(self, path: list[Node]) -> int:
        """How many blocks of a request LRU would have."""
        hits = 0
        for node in path:
            hits += node.would_have
            if node.would_have * WORD < len(node.words):
                break
        return hits

    def touch(self, path: list[Node]) -> None:
        """These are the newest, the first of them the newest of all."""
        lru = self._lru
        for node in reversed(path):
            if len(node.slots):
                self.holding.move_to_end(node)
            if not node.would_have:
                self._others.pop(node, None)
            count = len(node.words) // WORD
            self._num_lru += count - node.would_have
            node.would_have = count
            lru[node] = None
            lru.move_to_end(node)
        while self._num_lru > self._num_slots:
            node = next(iter(lru))
            going = min(node.would_have, self._num_lru - self._num_slots)
            node.would_have -= going
            self._num_lru -= going
            if not node.would_have:
                del lru[node]
                self._others[node] = None

    # -- slots ----------------------------------------------------------------------------------

    def node_of(self, slot: int) -> Node | None:
        """The node of a slot that is held, or was last in."""
        return self.nodes[self._of.item(slot)]

    def nodes_of(self, slots: SlotArray) -> list[Node]:
        """The nodes of slots that are held, in their order."""
        found = (self.nodes[number] for number in dict.fromkeys(self._of.take(slots).tolist()))
        return [node for node in found if node is not None]

    def cursor(self, slot: int) -> tuple[Node, int]:
        """Where the blocks behind a slot belong: a node, and how many blocks of it come before."""
        if slot != NO_SLOT:
            node, position = self.node_of(slot), self._position.item(slot) + 1
            if node is not None and node.start < position <= node.end:
                return node, position - node.start
        return self.root, 0

    def use(self, slot: int) -> None:
        """A request was served with this slot and those before it."""
        node = self.node_of(slot)
        while node is not None and node is not self.root:
            if len(node.slots):
                self.holding.move_to_end(node)
            if node.record == NO_RECORD:
                self.time[node.id] = self._residents.now()
            node = node.parent

    def attach(self, slots: SlotArray) -> None:
        """These slots, none of which is held, are held from now on; runs of chains."""
        parents = self._residents.parents_of(slots)
        words = self._residents.keys_of(slots).array[:, 0].tobytes()
        edges = (parents[1:] != slots[:-1]).nonzero()[0] + 1
        is_loose = len(edges) == len(slots) - 1 > 0 and bool((parents == NO_SLOT).all())
        if is_loose and words[:WORD] not in (self.root.children or {}):
            edges = edges[:0]  # blocks that stand alone: one node for all
        start = 0
        for end in (*edges.tolist(), len(slots)):
            run = words[start * WORD : end * WORD]
            self._attach_run(slots[start:end], parents.item(start), run)
            start = end

    def _attach_run(self, slots: SlotArray, parent: int, words: bytes) -> None:
        node, before = self.cursor(parent)
        while True:
            same = _num_same(node.words[before * WORD :], words)
            if same:
                self._put(node, slots[:same], node.start + before)
                slots, words, before = slots[same:], words[same * WORD :], before + same
            if not len(slots):
                return
            node = self.split(node, before)
            child = node.children.get(words[:WORD]) if node.children else None
            if child is not None:
                node, before = child, 0
            elif len(node.slots) and node.slots.item(-1) == parent and not node.children:
                self._grow(node, words)  # the end of a conversation: its answer
            else:
                before = 0
                row = self.row.item(node.id)
                node = self._new(words, node.end, node)
                self.row[node.id] = row
                self._others[node] = None
            parent = NO_SLOT

    def _put(self, node: Node, slots: SlotArray, position: int) -> None:
        self._of[slots] = node.id
        self._position[slots] = np.arange(position, position + len(slots))
        self.held[slots] = True
        had = node.slots
        if len(had):
            slots = np.concatenate((had, slots))
            if self._position.item(had[-1]) >= position:
                slots = slots[self._position.take(slots).argsort(kind="stable")]
        self._hold(node, slots)

    def _hold(self, node: Node, slots: SlotArray) -> None:
        """A node holds these slots and no others."""
        had, node.slots = len(node.slots), slots
        if len(slots):
            self.last_slot[node.id] = slots[-1]
            if not had:
                self.ids[self.count] = node.id
                self._place[node.id] = self.count
                self.count += 1
                self.holding[node] = None
        elif had:
            node.slots = NO_SLOTS
            self.count -= 1
            moved, place = self.ids.item(self.count), self._place.item(node.id)
            self.ids[place] = moved
            self._place[moved] = place
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

    def can_lose(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """For each node, by its number, whether its last slot can go."""
        last = self.last_slot.take(ids)
        residents = self._residents
        return residents.is_idle(last) & (residents.num_followers_of(last) == 0)
