"""Which blocks an LRU pool evicts, decided one slot at a time: the order that must not change.

Written from the pool as it was when a policy knew only one call, "touch", for blocks that came,
were used, or stay because others follow them. Plain dicts and lists, no arrays, no shortcuts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvferry.cache.slots import Ending, Lease, Purpose, as_slots
from kvferry.core.keys import Key, Keys


class TouchOrder:
    """Slots, the longest untouched first."""

    def __init__(self) -> None:
        self.slots: OrderedDict[int, None] = OrderedDict()

    def touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.slots[slot] = None
            self.slots.move_to_end(slot)

    def discard(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)

    def take_oldest(self, count: int) -> list[int]:
        return [self.slots.popitem(last=False)[0] for _ in range(min(count, len(self.slots)))]

    def put_back(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self.slots[slot] = None
            self.slots.move_to_end(slot, last=False)


class PoolBefore:
    """A pool by the old calls. Owns its slots, keys, parents and claims, each in a dict."""

    def __init__(self, num_slots: int, num_ready: int) -> None:
        self.order = TouchOrder()
        self.slot_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.parent: dict[int, int] = {}
        self.written: set[int] = set()
        self.doomed: set[int] = set()
        self.readers = [0] * num_slots
        self.free = list(range(num_ready))[::-1]
        self.num_ready = num_ready
        self.evicted: list[Key] = []

    def grow(self, num_ready: int) -> None:
        if num_ready > self.num_ready:
            self._push_free(range(self.num_ready, num_ready))
            self.num_ready = num_ready

    def pin(self, keys: Keys, purpose: Purpose) -> Lease | None:
        slots: list[int] = []
        for key in keys:
            slot = self.slot_of.get(key)
            if slot is None or slot not in self.written:
                break
            slots.append(slot)
        for slot in slots:
            self.readers[slot] += 1
        return self._lease(purpose, slots, list(range(len(slots))))

    def reserve(self, keys: Keys, parent: Key | None, chained: bool) -> Lease | None:
        found = [self.slot_of.get(key) for key in keys]
        above = self.slot_of.get(parent) if chained and parent is not None else None
        missing = [at for at, slot in enumerate(found) if slot is None]
        own = [slot for slot in (above, *found) if slot is not None]
        for slot in own:
            self.readers[slot] += 1
        self._make_room(len(missing))
        for slot in own:
            self.readers[slot] -= 1
        self.order.touch([slot for slot in own if slot in self.written][::-1])
        positions = missing[: len(self.free)]
        slots = [self.free.pop() for _ in positions]
        names = list(keys)
        for at, slot in zip(positions, slots, strict=True):
            found[at] = slot
            self.slot_of[names[at]] = slot
            self.key_of[slot] = names[at]
        if chained:
            for before, after in zip((above, *found), found, strict=False):
                if after is not None and before is not None:
                    self.parent.setdefault(after, before)
        return self._lease(Purpose.WRITE, slots, positions)

    def touch(self, keys: Keys) -> None:
        found = [slot for key in keys if (slot := self.slot_of.get(key)) in self.written]
        last = [slot for at, slot in enumerate(found) if slot not in found[at + 1 :]]
        self.order.touch([slot for slot in last if slot is not None][::-1])

    def disown(self, lease: Lease) -> None:
        self._disown(lease.slots.tolist())

    def reset(self) -> None:
        every = list(self.slot_of.values())
        idle = [s for s in every if s in self.written and not self.readers[s]]
        self._disown(every)
        self._push_free(idle)
        self.doomed -= set(idle)

    def end(self, lease: Lease, ending: Ending, failed: object = ()) -> None:
        lease.ended = ending
        slots = lease.slots.tolist()
        if lease.purpose is not Purpose.WRITE:
            for slot in slots:
                self.readers[slot] -= 1
            if ending is Ending.SPOIL:
                self._disown(slots)
            slots = [slot for slot in slots if not self.readers[slot]]
        elif ending is Ending.ABORT:
            self._disown(slots)
        gone = [slot for slot in slots if slot in self.doomed]
        self._push_free(gone)
        self.doomed -= set(gone)
        slots = [slot for slot in slots if slot not in gone]
        if ending is Ending.COMMIT:
            self.written |= set(slots)
        if lease.purpose is Purpose.COPY:
            self.order.put_back([slot for slot in slots if slot not in self.order.slots])
        else:
            self.order.touch(slots[::-1])

    def _lease(self, purpose: Purpose, slots: list[int], positions: list[int]) -> Lease | None:
        owner: Any = self
        return Lease(purpose, as_slots(slots), as_slots(positions), owner) if slots else None

    def _disown(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self.doomed:
                self._unindex(slot)
                self.order.discard([slot])
                self.doomed.add(slot)

    def _unindex(self, slot: int) -> None:
        del self.slot_of[self.key_of.pop(slot)]
        self.written.discard(slot)
        self.parent.pop(slot, None)
        for child in [child for child, parent in self.parent.items() if parent == slot]:
            del self.parent[child]

    def _push_free(self, slots: Iterable[int]) -> None:
        self.free += sorted(slots, reverse=True)

    # -- making room ----------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        wanted = count - len(self.free)
        if wanted > 0:
            going = self._take_coldest(wanted)
            self.evicted += [self.key_of[slot] for slot in going]
            for slot in going:
                self._unindex(slot)
            self._push_free(going)

    def _take_coldest(self, wanted: int) -> list[int]:
        looked: list[int] = []
        can_go: list[bool] = []
        while sum(can_go) < wanted:
            oldest = self.order.take_oldest(max(wanted, len(looked)))
            if not oldest:
                break
            looked += [slot for slot in oldest if not self.readers[slot]]
            can_go = [self._descendants(slot) <= set(looked) for slot in looked]
        going = [slot for slot, goes in zip(looked, can_go, strict=True) if goes]
        if len(going) == len(looked) == wanted:
            return going
        going = self._children_first(going)
        going, spare = going[:wanted], going[wanted:]
        gone = [at for at, slot in enumerate(looked) if slot in going]
        end = gone[-1] + 1 if gone else len(looked)
        stays = [slot for slot, goes in zip(looked, can_go, strict=True) if not goes]
        self.order.put_back(spare + [slot for slot in looked[end:] if slot in stays])
        self.order.touch(self._children_first([s for s in looked[:end] if s in stays]))
        return going

    def _descendants(self, slot: int) -> set[int]:
        children = {child for child, parent in self.parent.items() if parent == slot}
        return children.union(*map(self._descendants, children))

    def _children_first(self, slots: list[int]) -> list[int]:
        """Deepest first among these, else as they come."""

        def depth(slot: int) -> int:
            above = self.parent.get(slot)
            return 1 + depth(above) if above in slots and above is not None else 0

        return [slots[at] for at in np.argsort([-depth(slot) for slot in slots], kind="stable")]
