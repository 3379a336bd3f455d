"""Learns when conversations return, and keeps those that are most likely to before they cost much.

Every request is looked up in a tree of recent ones (``returns_tree.py``). From what was asked for
again, when, and what was not, it learns the chance to return at each age (``returns_model.py``).
The value of a block is that chance over the time it would be kept. To make room, a few nodes of the
tree are sampled, and the one of least value loses its end; where that would be the newcomer, it is
not stored. What LRU would have hit is counted beside it: where that is clearly more, blocks go by
age for a while.

Deterministic: the same calls at the same times make the same choices.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import islice
from math import inf, log2, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Evidence, Residents
from kvferry.cache.policies.returns_model import (
    FIRST_SECONDS,
    NO_HINT,
    NO_RECORD,
    Records,
    Trust,
    ValueTable,
    bins,
    hint_bin,
)
from kvferry.cache.policies.returns_tree import WORD, Node, RequestTree
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

_LEARN_EVERY, _LEARN_LATER, _FIRST = 16, 64, 1024  # requests
_MOST_RECORDS = 2  # of one request: its end, and what it shares
_MEAN_OF = 4  # gaps
_SHARED_BY = 3  # that went on behind a node: fewer are edited questions
_SAMPLES = 64
_VICTIMS = 4  # at least, of one look; then others are looked at
_PART = 8  # of those looked at, one in so many may go
_LOOK_EVERY = 4  # requests, where those that were looked at last have not gone meanwhile
_MOST_DUE = 1 << 14  # hints that wait to be judged
_MOST_AHEAD = 64  # nodes in use that are passed over to find the oldest


class Senders:
    """How often the hints of each sender came true. Owns the counts, of the latest ``_MOST``."""

    _MOST, _FEW, _FULL, _WRONG = 4096, 4.0, 32.0, 0.5

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def judge(self, sender: str, *, right: bool) -> None:
        """One hint came true, or did not."""
        num, wrong = self._counts.pop(sender, (0.0, 0.0))
        if num >= self._FULL:
            num, wrong = num / 2, wrong / 2
        self._counts[sender] = (num + 1, wrong + (not right))
        if len(self._counts) > self._MOST:
            self._counts.popitem(last=False)

    def trust(self, sender: str) -> Trust:
        """How far the next hint of this sender should be believed."""
        num, wrong = self._counts.get(sender, (0.0, 0.0))
        if num < self._FEW:
            return Trust.UNKNOWN
        return Trust.LOW if wrong > self._WRONG * num else Trust.HIGH


class Told(NamedTuple):
    """A hint that was given for a node, and until when it can come true."""

    sender: str
    ended: bool
    due: float


class Duel:
    """Counts what was hit and what LRU would have hit, and says which of the two should choose.

    LRU takes over where it hit clearly more of late than by chance; after some requests the other
    is tried again, each time later. Owns the sums, which fade.
    """

    _KEEP, _SURE, _LEAST = 0.998, 2.5, 0.02
    _TRIAL, _MOST_TRIAL = 512, 8192

    def __init__(self) -> None:
        self.is_lru = False
        self._trial = self._TRIAL
        self._left = 0  # requests until it is looked at again
        self._lost = self._spread = self._lru = 0.0

    def count(self, hits: int, lru_hits: int) -> None:
        """A request found so many blocks, and would have found so many."""
        lost = lru_hits - hits
        self._lost = self._lost * self._KEEP + lost
        self._spread = self._spread * self._KEEP + lost * lost
        self._lru = self._lru * self._KEEP + lru_hits
        self._left -= 1
        if self._left > 0:
            return
        if self.is_lru:
            self.is_lru = False
            self._lost = self._spread = 0.0
            self._left = self._TRIAL // 2
        elif self._lost > max(self._SURE * sqrt(self._spread), self._LEAST * self._lru):
            self.is_lru = True
            self._left = self._trial
            self._trial = min(self._MOST_TRIAL, 2 * self._trial)
        elif self._lost < 0:
            self._trial = self._TRIAL


class Returns:
    """The policy ``returns``. Owns the tree, the records, the model, and who is believed."""

    wants_chains = False

    def __init__(self, residents: Residents, seed: int = 0) -> None:
        self.table = ValueTable()
        self._residents = residents
        self._tree = RequestTree(residents)
        self._records = Records()
        self._senders = Senders()
        self._duel = Duel()
        self._due: list[tuple[float, int, Node, Told]] = []
        self._queue: dict[Node, float] = {}  # nodes that go next, and their values
        self._chance = np.random.default_rng(seed)
        self._now = self._taught = 0.0
        self._num_asked = self._num_told = self._look_again = 0
        self._asked_by: Arriving | None = None
        self._bids: list[tuple[float, int]] = []
        self._lacking = 0

    @property
    def learned(self) -> tuple[npt.NDArray[np.float64], ...]:
        """All that it knows of returns; see ``learned.py``."""
        table = self.table
        table.version += 1  # they may be filled
        return table.base, table.base_seen, table.weight, table.weight_seen

    # -- the slots ------------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        if len(slots):
            self.discard(slots)
            self._tree.attach(slots)

    def use(self, slots: SlotArray) -> None:
        if len(slots):
            away = slots[~self._tree.held.take(slots)]
            if len(away):
                self.insert(away)
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
        held = slots[self._tree.held.take(slots)]
        if len(held):
            self._tree.leave(held)

    def clear(self) -> None:
        self._tree.clear()
        self._queue.clear()
        self._due.clear()

    def _tick(self) -> float:
        """The time, which never goes back."""
        self._now = max(self._now, self._residents.now())
        return self._now

    # -- requests and hints ---------------------------------------------------------------------

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        if not len(keys.array):
            return
        now = self._tick()
        self._num_asked += 1
        self._asked_by = None
        every = _LEARN_EVERY if self._num_asked < _FIRST else _LEARN_LATER
        if self._num_asked % every == 0:
            self._learn(now)
        words = keys.array[:, 0].tobytes()
        path, num_known, num_last = self._tree.match(words)
        self._duel.count(len(slots), min(num_known, self._tree.lru_hits(path)))
        num_new = num_tokens * (len(words) // WORD - num_known) // (len(words) // WORD)
        self._follow(path, words[num_known * WORD :], num_last, now)
        first = len(path) - _MOST_RECORDS
        for number, node in enumerate(path):
            self._pass(node, now, num_new, is_recorded=number >= first)
        path[-1].is_end = True
        self._tree.touch(path)

    def _learn(self, now: float) -> None:
        self.table.fade(max(0.0, now - self._taught))
        self._taught = now
        self._records.teach(self.table, now)
        self._tree.forget()
        while self._due and self._due[0][0] <= now:
            _, _, node, told = heappop(self._due)
            if node.told is told:  # it has not returned
                self._senders.judge(told.sender, right=told.ended)
                node.told = None

    def _follow(self, path: list[Node], rest: bytes, num_last: int, now: float) -> None:
        """Amend the tree, so that ``path`` is that of a request which goes on with the rest."""
        tree = self._tree
        node = path[-1] if path else tree.root
        goes_on = node.is_end  # with a conversation: it may branch off where others ended
        if path and num_last * WORD < len(node.words):
            goes_on = not node.children and 2 * num_last * WORD >= len(node.words)
            left, node = node, tree.split(node, num_last)
            path[-1] = node
            if goes_on:  # what was said of it was said of all of it
                node.told, left.told = left.told, None
            if not left.children:
                left.is_left = True
                self._describe(left)
        if rest:
            last, node = node, tree.begin(node, rest)
            if node is not last:
                path.append(node)
                if goes_on:
                    node.turn = last.turn
                    node.gap = _mean_gap(last, now - tree.time.item(last.id))

    def _pass(self, node: Node, now: float, num_new: int, *, is_recorded: bool) -> None:
        """A request has a node's blocks."""
        if node.passes:
            if node.record != NO_RECORD:
                self._records.close(node.record, now)
            node.gap = _mean_gap(node, now - self._tree.time.item(node.id))
            if node.passes == 1 and node.parent is not None:
                node.parent.kin_returned += 1
            told = node.told
            if isinstance(told, Told):
                self._senders.judge(told.sender, right=not told.ended and now <= told.due)
                node.told = None
            node.hint = NO_HINT
            node.is_left = False
        node.passes += 1
        node.turn += 1
        node.new_tokens = num_new
        node.record = NO_RECORD
        self._tree.time[node.id] = now
        row = self._describe(node)
        if is_recorded:
            node.record = self._records.add(now, row)

    def _describe(self, node: Node) -> int:
        """The row of a node's features, as they are now."""
        ways = int(node.kin) if node.children and node.kin >= _SHARED_BY else 0
        parent = node.parent
        kin = (parent.kin, parent.kin_returned) if parent is not None else (0.0, 0.0)
        features = bins(
            node.turn, ways, node.gap, kin, node.new_tokens, node.hint, is_left=node.is_left
        )
        row = self._tree.row[node.id] = self.table.row(features)
        if node.record != NO_RECORD:
            self._records.change(node.record, row)
        return row

    def hint(self, keys: Keys, evidence: Evidence) -> None:
        path, num_known, _ = self._tree.match(keys.array[:, 0].tobytes())
        if not path or num_known < len(keys.array) or not (evidence.ended or evidence.continues):
            return
        node, (ended, _, within, sender) = path[-1], evidence
        node.hint = hint_bin(ended, within, self._senders.trust(sender))
        seconds = 300.0 if ended else 1800.0 if within is None else 2 * within + 5.0
        node.told = told = Told(sender, ended, self._tick() + seconds)
        self._num_told += 1
        heappush(self._due, (told.due, self._num_told, node, told))
        if len(self._due) > _MOST_DUE:
            heappop(self._due)
        self._asked_by = None
        self._describe(node)

    # -- victims --------------------------------------------------------------------------------

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is self._asked_by:  # what is lacking still, where the pool looks wider
            count = min(count, max(self._lacking, 1))
        else:
            self._asked_by, self._bids = arriving, self._offered(arriving)
        if count <= 0:
            return NO_SLOTS
        found = self._oldest(count) if self._goes_by_age else self._least(count)
        taken = np.concatenate((NO_SLOTS, *found))
        self._lacking = count - len(taken)
        return taken

    @property
    def _goes_by_age(self) -> bool:
        """Whether to choose as LRU does. Above other tiers, too: the last of them chooses."""
        return self._duel.is_lru or self._residents.feeds_below()

    def _oldest(self, count: int) -> list[SlotArray]:
        found: list[SlotArray] = []
        for node in list(islice(self._tree.holding, count + _MOST_AHEAD)):
            if count <= 0:
                break
            if self._residents.can_go(self._tree.last_slot.item(node.id)):
                found.append(self._tree.pop(node, count))
                count -= len(found[-1])
        return found

    def _least(self, count: int) -> list[SlotArray]:
        """Let go of the ends of nodes whose value is not above what is offered for their room."""
        found: list[SlotArray] = []
        bids = list(self._bids)
        if self._num_asked >= self._look_again:
            self._queue.clear()
        while count > 0:
            node, value = self._next()
            if node is None:
                self._look()
                node, value = self._next()
            if node is None:
                break
            while bids and value > bids[-1][0]:  # these newcomers are refused
                count -= bids.pop()[1]
            if not bids or count <= 0:
                break
            found.append(self._tree.pop(node, count))
            count -= len(found[-1])
        return found

    def _offered(self, arriving: Arriving) -> list[tuple[float, int]]:
        """The value of what arrives and of how many blocks, node by node; it never rises."""
        missing = arriving.slots == NO_SLOT
        if arriving.must_stay or not arriving.chained or self._goes_by_age:
            return [(inf, len(missing))]
        words = arriving.keys.array[:, 0].tobytes()
        node: Node | None
        node, before = self._tree.cursor(arriving.parent)
        bids: list[tuple[float, int]] = []
        at = 0
        while node is not None and at < len(missing):
            end = at + len(node.words) // WORD - before
            if end > at:
                value = self.table.first(self._tree.row.item(node.id))
                bids.append((value, int(np.count_nonzero(missing[at:end]))))
            at, before = end, 0
            key = words[at * WORD : (at + 1) * WORD]
            node = node.children.get(key) if node.children else None
        if not bids:
            return [(inf, len(missing))]
        for last in range(len(bids) - 2, -1, -1):
            bids[last] = (max(bids[last][0], bids[last + 1][0]), bids[last][1])
        return bids

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
        tree = self._tree
        every = picks = tree.ids[: tree.count]
        if tree.count > _SAMPLES:
            picks = every.take((self._chance.random(_SAMPLES) * tree.count).astype(np.int64))
        picks = picks[tree.can_lose(picks)]
        if not len(picks) and tree.count > _SAMPLES:
            picks = every[tree.can_lose(every)]
        values = self.table.values(tree.row.take(picks), self._tick() - tree.time.take(picks))
        order, num = values.argsort(kind="stable"), len(picks)
        for at in order[: max(num // _PART, min(_VICTIMS, num // 4), 1)].tolist():
            node = tree.nodes[picks.item(at)]
            assert node is not None
            self._queue.setdefault(node, values.item(at))
        self._look_again = self._num_asked + _LOOK_EVERY

    def peek(self, count: int) -> SlotArray:
        found = [NO_SLOTS]
        first = [] if self._goes_by_age else [node for node in self._queue if len(node.slots)]
        for node in dict.fromkeys([*first, *islice(self._tree.holding, count)]):
            found.append(node.slots[::-1][: max(0, count)])
            count -= len(found[-1])
        return np.concatenate(found)


def _mean_gap(node: Node, age: float) -> float:
    """The mean gap of a node that is asked for again at this age; a logarithm to base two."""
    gap = log2(max(age, FIRST_SECONDS))
    num = min(node.turn, _MEAN_OF)
    return gap if node.gap is None or num < 1 else node.gap + (gap - node.gap) / num
