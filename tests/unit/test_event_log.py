"""Readers pull what happened in a pool; its policy is told in order, each event with its time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.crafted_keys import key, keys

from kvferry.cache.events import EventKind, EventLog
from kvferry.cache.policies.contract import EvictionPolicyMaker, Residents
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.types import SlotArray


class Timed(Lru):
    """LRU that notes what it is told of requests, and when."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self._residents = residents
        self.heard: list[tuple[str, int, int, int, float]] = []

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        self._note("asked", keys, num_tokens, len(slots))

    def _note(self, what: str, keys: Keys, num_tokens: int, num_found: int) -> None:
        self.heard.append((what, len(keys), num_tokens, num_found, self._residents.now()))


class Failing(Timed):
    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        raise RuntimeError("cannot hear")


class Clock:
    now = 0.0


def made(policy: EvictionPolicyMaker = Timed, num_slots: int = 64) -> tuple[Pool, Any, Clock]:
    clock = Clock()
    pool = Pool(num_slots, policy, clock=lambda: clock.now)
    return pool, pool.eviction.feed.policy, clock


def store(pool: Pool, blocks: Keys) -> None:
    lease = pool.reserve(blocks)
    if lease is not None:
        lease.commit()


def test_readers_see_their_kinds_in_order_until_closed() -> None:
    now = iter(range(9))
    log = EventLog(lambda: float(next(now)))
    every, some = log.reader(), log.reader((EventKind.EVICT,))
    assert log.queues[EventKind.LOAD]
    log.append(EventKind.LOAD, request="r", tokens=3)
    log.append(EventKind.EVICT, keys=keys([2]))
    log.append(EventKind.EVICT, keys=lambda: keys([7]))
    assert [(each.at, each.kind) for each in every.take()][:2] == [
        (0.0, EventKind.LOAD),
        (1.0, EventKind.EVICT),
    ]
    assert [list(each.all_keys()) for each in some.take()] == [[key(2)], [key(7)]]
    assert not every.take()
    every.close()
    log.append(EventKind.LOAD)
    assert not len(every.events)
    assert not log.queues[EventKind.LOAD]


def test_a_policy_is_told_with_the_time_of_each_before_anything_is_stored() -> None:
    pool, policy, clock = made()
    clock.now = 1.0
    pool.asked(keys(range(4)), 64, pool.lookup(keys(range(4))))
    clock.now = 9.0
    assert not policy.heard
    store(pool, keys(range(6)))
    assert policy.heard == [("asked", 4, 64, 0, 1.0)]
    assert pool.eviction.feed.now() == 9.0


@pytest.mark.parametrize("how", ["reset", "drop", "disown"])
def test_blocks_that_go_were_found_by_those_who_asked_before(how: str) -> None:
    pool, policy, _ = made(num_slots=16)
    store(pool, keys(range(8)))
    lease = pool.lease(keys(range(8)))
    pool.asked(keys(range(8)), 128, pool.lookup(keys(range(8))))
    match how:
        case "reset":
            pool.reset()
        case "drop":
            pool.drop(pool.lookup(keys(range(8))))
        case _:
            assert lease is not None
            lease.disown()
    pool.catch_up()
    assert [each[3] for each in policy.heard] == [8]


def test_a_policy_that_raises_is_reported_once_and_breaks_no_pool() -> None:
    pool, _, _ = made(Failing)
    lease = pool.reserve(keys(range(4)))
    assert lease is not None
    for count in (2, 3):
        pool.asked(keys(range(count)), 32, pool.lookup(keys(range(count))))
    lease.commit()
    pool.check_integrity()
    assert pool.counts.cached == 4
    with pytest.raises(RuntimeError, match="cannot hear"):
        pool.raise_failure()
    pool.raise_failure()
