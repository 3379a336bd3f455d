"""Who is woken when: no thread sleeps while there is work for it, in every short history.

The threads are played: one that would wait falls asleep, and only a notification of its own way
wakes it. A job in hand is ended by a step of the history; its thread then looks for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Batch, BatchId, Way
from kvferry.tiers.disk.io_queue import IoQueue, Job

THREADS_EACH = 2
LENGTH = 5
WAYS = (Way.READ, Way.WRITE)


class AsleepError(Exception):
    """A thread that waits."""


class PlayedCondition:
    """Stands in for a condition: who waits falls asleep, and some are woken."""

    def __init__(self) -> None:
        self.asleep: list[int] = []
        self.woken: list[int] = []
        self.caller = 0

    def wait_for(self, is_so: Callable[[], bool]) -> bool:
        if not is_so():
            self.asleep.append(self.caller)
            raise AsleepError
        return True

    def notify(self, count: int = 1) -> None:
        self.woken += self.asleep[:count]
        del self.asleep[:count]


class History:
    def __init__(self) -> None:
        self.queue = IoQueue(lambda result: None, blocks_per_job=1, deadline=1e9)
        self.conditions = {way: PlayedCondition() for way in WAYS}
        self.queue._work = self.conditions  # type: ignore[assignment]
        self.in_hand: dict[Way, list[tuple[int, Job]]] = {way: [] for way in WAYS}
        self.orders: list[Batch] = []
        for way in WAYS:
            for thread in range(THREADS_EACH):
                self.look(way, thread)

    def look(self, way: Way, thread: int) -> None:
        self.conditions[way].caller = thread
        try:
            job = self.queue.take(way)
        except AsleepError:
            return
        assert job is not None
        self.in_hand[way].append((thread, job))

    def submit(self, way: Way, count: int) -> None:
        order = Batch(
            BatchId(len(self.orders)),
            way,
            Keys(np.zeros((count, 4), np.uint64)),
            1e12,
            np.zeros((count, 1), np.int64),
            np.array([8]),
            np.arange(count),
        )
        self.orders.append(order)
        self.queue.submit(order, 0)

    def end(self, way: Way) -> None:
        if self.in_hand[way]:
            thread, job = self.in_hand[way].pop(0)
            self.queue.end(job, {})
            self.look(way, thread)

    def settle(self) -> None:
        while any(condition.woken for condition in self.conditions.values()):
            for way, condition in self.conditions.items():
                while condition.woken:
                    self.look(way, condition.woken.pop(0))

    def check(self) -> None:
        for way, condition in self.conditions.items():
            assert not (condition.asleep and self.queue._may_take(way)), (
                f"{way}: asleep beside work"
            )


STEPS: dict[str, Callable[[History], None]] = {
    "read": lambda history: history.submit(Way.READ, 1),
    "reads": lambda history: history.submit(Way.READ, 3),
    "writes": lambda history: history.submit(Way.WRITE, 3),
    "end read": lambda history: history.end(Way.READ),
    "end write": lambda history: history.end(Way.WRITE),
}


def test_no_thread_sleeps_beside_work() -> None:
    for steps in product(STEPS, repeat=LENGTH):
        history = History()
        for step in steps:
            STEPS[step](history)
            history.settle()
            history.check()
