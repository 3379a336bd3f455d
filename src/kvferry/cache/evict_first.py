"""Slots whose blocks are wanted least: they make room before any policy is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.cache.chains import Chains
from kvferry.types import NO_SLOTS, SlotArray

_NOT_HERE = 0
_MOST_VAIN = 64
"""Entries of which nothing can go now, after which the policy is asked: the engine waits."""

_MOST_TIMES = 4
"""So often as many entries as there are slots are kept; most of them are stale by then."""


class EvictFirstQueue:
    """Slots that hints or priorities want evicted before all others. Owns their order.

    For policies that do not hear hints. A slot that was used or evicted is here no longer: only the
    newest entry of each counts, and others are skipped when they are met.
    """

    def __init__(self, num_slots: int) -> None:
        self._entry = np.zeros(num_slots, dtype=np.int64)
        self.queues: dict[int, deque[tuple[int, SlotArray]]] = {}
        """By priority; none where nothing is to go first."""
        self._next = _NOT_HERE + 1
        self._size = 0
        self._num_vain = 0

    def add(self, slots: SlotArray, priority: int) -> None:
        """These go before all of a higher priority, and behind those of the same."""
        if len(slots):
            self.queues.setdefault(priority, deque()).append((self._next, slots))
            self._entry[slots] = self._next
            self._next += 1
            self._size += len(slots)
            if self._size > _MOST_TIMES * len(self._entry):
                self._compact()

    def forget(self, slots: SlotArray) -> None:
        """These slots are evicted in the policy's order again."""
        self._entry[slots] = _NOT_HERE

    def clear(self) -> None:
        self._entry.fill(_NOT_HERE)
        self.queues.clear()
        self._size = 0

    def _compact(self) -> None:
        self._size = 0
        for priority in list(self.queues):
            fresh = [(n, slots[self._entry.take(slots) == n]) for n, slots in self.queues[priority]]
            self.queues[priority] = deque((n, slots) for n, slots in fresh if len(slots))
            self._size += sum(len(slots) for _, slots in self.queues[priority])
            if not self.queues[priority]:
                del self.queues[priority]

    def take(
        self,
        count: int,
        chains: Chains,
        is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]],
    ) -> SlotArray:
        """Up to ``count`` of them that can go now, each after those that follow it."""
        found: list[SlotArray] = []
        self._num_vain = 0
        for priority in sorted(self.queues):
            if count <= 0:
                break
            taken = self._take(self.queues[priority], count, chains, is_idle)
            if not self.queues[priority]:
                del self.queues[priority]
            found.append(taken)
            count -= len(taken)
        return np.concatenate((NO_SLOTS, *found))

    def _take(
        self,
        queue: deque[tuple[int, SlotArray]],
        count: int,
        chains: Chains,
        is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]],
    ) -> SlotArray:
        """From one queue. What cannot go now waits in it, behind the others."""
        found: list[SlotArray] = []
        for _ in range(len(queue)):
            if self._num_vain >= _MOST_VAIN:
                break
            entry, slots = queue.popleft()
            self._size -= len(slots)
            slots = slots[self._entry.take(slots) == entry]
            idle = slots[is_idle(slots)]
            going = chains.children_first(idle[chains.can_go(idle)])[:count] if len(idle) else idle
            rest = slots[~np.isin(slots, going)] if len(going) else slots
            self._num_vain += bool(len(rest) and not len(going))
            if len(going):
                found.append(going)
                self.forget(going)
                count -= len(going)
            self._size += len(rest)
            if count <= 0:
                if len(rest):
                    queue.appendleft((entry, rest))
                break
            if len(rest):
                queue.append((entry, rest))
        return np.concatenate((NO_SLOTS, *found))
