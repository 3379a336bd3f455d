"""Learns when conversations return, and keeps those that are most likely to before they cost much.

Every request is looked up in a tree of recent ones (``returns_tree.py``). From what was asked for
again, when, and what was not, it learns the chance to return at each age (``returns_model.py``).
The value of a block is that chance over the time it would be kept. To make room, a few nodes of the
tree are sampled, and the one of least value loses its end; where that would be the newcomer, it is
not stored. Above other tiers it evicts by age and refuses nothing: the last of them chooses.

Deterministic: the same calls at the same times make the same choices.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import islice
from math import inf, log2

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Evidence, Residents
from kvferry.cache.policies.returns_model import (
    FIRST_SECONDS,
    NO_HINT,
    NO_RECORD,
    ReturnModel,
    hint_bin,
    row_of,
)
from kvferry.cache.policies.returns_tree import WORD, Node, RequestTree
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS, SlotArray

_LEARN_EVERY, _LEARN_LATER, _FIRST = 16, 64, 1024  # requests
_MOST_RECORDS = 2  # of one request: its end, and what it shares
_MEAN_OF = 4  # gaps
_SHARED_BY = 3  # that went on behind a node: fewer are edited questions
_SAMPLES = 512
_VICTIMS = 8  # of those looked at; a quarter at most
_INSTANT = 1e-6  # seconds between two readings of the clock, if it stands still
_LOOK_EVERY = 4  # requests, where those that were looked at last have not gone meanwhile
_MOST_DUE = 1 << 14  # hints that wait to be judged


class Senders:
    """How far to trust the hints of each sender. Owns a number for each of the latest ``_MOST``.

    It is the mean of 1 for each hint that came true and -1 for each that did not, the latest most.
    """

    _MOST, _STEP, _LEAST = 4096, 1 / 16, -0.2

    def __init__(self) -> None:
        self._trust: OrderedDict[str, float] = OrderedDict()

    def judge(self, sender: str, *, right: bool) -> None:
        """One hint came true, or did not."""
        trust = self._trust.pop(sender, 0.0)
        self._trust[sender] = trust + self._STEP * ((1 if right else -1) - trust)
        if len(self._trust) > self._MOST:
            self._trust.popitem(last=False)

    def believes(self, sender: str) -> bool:
        """Whether the next hint of this sender should be believed."""
        return self._trust.get(sender, 0.0) > self._LEAST


class Returns:
    """The policy ``returns``. Owns the tree, the model, and which sender to believe."""

    def __init__(self, residents: Residents, seed: int = 0) -> None:
        self.model = ReturnModel()
        self._residents = residents
        self._tree = RequestTree(residents)
        self._senders = Senders()
        self._due: list[tuple[float, int, Node, Evidence]] = []
        self._queue: dict[Node, float] = {}  # nodes that go next, and their values
        self._chance = np.random.default_rng(seed)
        self._now = 0.0
        self._num_asked = self._num_told = self._look_again = 0
        self._arriving: Arriving | None = None
        self._bid = inf  # the value of what arrives
        self._lacking = 0  # blocks it still needs room for

    @property
    def learned(self) -> tuple[npt.NDArray[np.float64], ...]:
        """All that it knows of returns; see ``learned.py``."""
        return self.model.learned

    # -- the slots ------------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        if len(slots):
            self.discard(slots)
            self._tree.attach(slots)

    def use(self, slots: SlotArray) -> None:
        if len(slots):
            self.insert(slots[~self.holds(slots)])
            self._tree.use(slots.item(-1))

    def keep(self, slots: SlotArray) -> None:
        self.insert(np.ascontiguousarray(slots[::-1]))

    def put_back(self, slots: SlotArray) -> None:
        self.keep(slots)
        nodes = self._tree.nodes_of(slots)
        for node in reversed(nodes):
            self._tree.holding.move_to_end(node, last=False)
        self._queue = dict.fromkeys(nodes, -inf) | self._queue

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._tree.held.take(slots)

    def discard(self, slots: SlotArray) -> None:
        held = slots[self.holds(slots)]
        if len(held):
            self._tree.leave(held)

    def clear(self) -> None:
        self._tree.clear()
        self._queue.clear()
        self._due.clear()

    def _tick(self) -> float:
        """Return a time later than all before, so that no two requests have the same age."""
        self._now = max(self._now + _INSTANT, self._residents.now())
        return self._now

    # -- requests and hints ---------------------------------------------------------------------

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        num_blocks = len(keys.array)
        if not num_blocks:
            return
        now, tree = self._tick(), self._tree
        self._num_asked += 1
        self._arriving = None
        if self._num_asked % (_LEARN_EVERY if self._num_asked < _FIRST else _LEARN_LATER) == 0:
            self._learn(now)
        words = keys.array[:, 0].tobytes()
        path, num_known = tree.match(words)
        if path:
            path[-1] = tree.split(path[-1], num_known - path[-1].start)
        if num_known < num_blocks:
            last = path[-1] if path else tree.root
            node = tree.extend(last, words[num_known * WORD :])
            if node is not last:
                path.append(node)
        num_new = num_tokens * (num_blocks - num_known) // num_blocks
        for node in reversed(path):
            tree.touch(node)
        for number, node in enumerate(path, _MOST_RECORDS - len(path)):
            self._pass(node, now, num_new, is_recorded=number >= 0)

    def _learn(self, now: float) -> None:
        self.model.learn(now)
        self._tree.forget()
        while self._due and self._due[0][0] <= now:
            _, _, node, told = heappop(self._due)
            if node.told is told:  # it has not returned
                self._senders.judge(told.sender, right=told.ended)
                node.told = None

    def _pass(self, node: Node, now: float, num_new: int, *, is_recorded: bool) -> None:
        """A request has a node's blocks."""
        if node.turn:
            if node.record != NO_RECORD:
                self.model.close(node.record, now)
            gap = log2(max(now - self._tree.time.item(node.id), FIRST_SECONDS))
            mean = gap if node.gap is None else node.gap
            node.gap = mean + (gap - mean) / min(node.turn, _MEAN_OF)
            if node.told is not None:
                self._senders.judge(node.told.sender, right=not node.told.ended)
            node.told, node.hint = None, NO_HINT
        node.turn += 1
        node.new_tokens = num_new
        node.record = NO_RECORD
        self._tree.time[node.id] = now
        row = self._describe(node)
        if is_recorded:
            node.record = self.model.add(now, row)

    def _describe(self, node: Node) -> int:
        """The row of a node's features, as they are now."""
        ways = node.ways if node.children and node.ways >= _SHARED_BY else 0
        row = row_of(node.turn, ways, node.gap, node.new_tokens, node.hint)
        self._tree.row[node.id] = row
        if node.record != NO_RECORD:
            self.model.change(node.record, row)
        return row

    def hint(self, keys: Keys, evidence: Evidence) -> None:
        path, num_known = self._tree.match(keys.array[:, 0].tobytes())
        if not path or num_known < len(keys.array) or not (evidence.ended or evidence.continues):
            return
        node, (ended, _, within, sender) = path[-1], evidence
        node.hint = hint_bin(ended, within) if self._senders.believes(sender) else NO_HINT
        node.told = evidence
        self._num_told += 1
        seconds = 300.0 if ended else 1800.0 if within is None else 2 * within + 5.0
        heappush(self._due, (self._tick() + seconds, self._num_told, node, evidence))
        if len(self._due) > _MOST_DUE:
            heappop(self._due)
        self._arriving = None
        self._describe(node)

    # -- victims --------------------------------------------------------------------------------

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        """Let go of the ends of nodes whose value is not above what is offered for their room."""
        if arriving is not self._arriving:
            self._arriving, self._bid, self._lacking = arriving, self._offered(arriving), count
        if self._num_asked >= self._look_again or self._residents.feeds_below():
            self._queue.clear()
        # Where the pool asks again, what is lacking still.
        count = min(count, max(self._lacking, 1))
        found = [NO_SLOTS]
        while count > 0:
            node, value = self._next()
            if node is None:
                self._look()
                node, value = self._next()
            if node is None or value > self._bid:
                break
            found.append(self._tree.pop(node, count))
            count -= len(found[-1])
            self._lacking -= len(found[-1])
        return np.concatenate(found)

    def _offered(self, arriving: Arriving) -> float:
        """The value of what arrives: that of the best of its nodes."""
        if arriving.must_stay or not arriving.chained or self._residents.feeds_below():
            return inf
        words = arriving.keys.array[:, 0].tobytes()
        node, before = self._tree.cursor(arriving.parent)
        rows, at = [], 0
        while True:
            if before * WORD < len(node.words):
                rows.append(self._tree.row.item(node.id))
            at, before = at + len(node.words) - before * WORD, 0
            child = node.children.get(words[at : at + WORD])
            if child is None:
                break
            node = child
        if not rows:
            return inf
        return self.model.values(np.array(rows), np.zeros(len(rows))).max().item()

    def _next(self) -> tuple[Node | None, float]:
        """The node that loses its end next, and its value when it was looked at."""
        while self._queue:
            node, value = next(iter(self._queue.items()))
            if len(node.slots) and self._residents.can_go(self._tree.last_slot.item(node.id)):
                return node, value
            del self._queue[node]
        return None, inf

    def _look(self) -> None:
        """Sample some nodes whose end can go, and queue those of least value."""
        tree, num_slots, by_age = self._tree, len(self._tree.held), self._residents.feeds_below()
        slots = self._chance.integers(num_slots, size=_SAMPLES)
        if by_age:
            slots = np.array([node.slots[-1] for node in islice(tree.holding, _SAMPLES)], np.int64)
        picks = tree.losing(slots)
        if not len(picks):  # hardly any node ends here
            picks = tree.losing(self._chance.integers(num_slots, size=8 * _SAMPLES))
        if not len(picks):
            picks = tree.losing(np.arange(num_slots))
        ages = self._tick() - tree.time.take(picks)
        values = -ages if by_age else self.model.values(tree.row.take(picks), ages)
        order, num = np.lexsort((-ages, values)), len(picks)  # of equal value the oldest first
        for at in order[: max(1, min(_VICTIMS, num // 4))].tolist():
            self._queue.setdefault(tree.nodes[picks.item(at)], values.item(at))
        self._look_again = self._num_asked + _LOOK_EVERY

    def peek(self, count: int) -> SlotArray:
        found = [NO_SLOTS]
        first = (node for node in self._queue if len(node.slots))
        for node in dict.fromkeys([*first, *islice(self._tree.holding, count)]):
            found.append(node.slots[::-1][: max(0, count)])
            count -= len(found[-1])
        return np.concatenate(found)
