"""Policies that are told of requests late decide as if they had been told at once."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.fakes.crafted_keys import keys
from tests.unit.test_hearing import BLOCK, Chain, Listener
from tests.unit.test_request import NoBlocks

from kvferry.cache.policies.contract import EvictionPolicyMaker, Residents
from kvferry.cache.policies.returns import Returns
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.accounts import MOST_OWED, MOST_UNTOLD, Hearing
from kvferry.scheduler.journal import Explanation, Reason
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import SlotArray


class Timed(Listener):
    """One that writes down when, too."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self._residents = residents
        self.times: list[float] = []

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        super().asked(keys, num_tokens, slots)
        self.times.append(self._residents.now())

    def answered(self, keys: Keys, num_tokens: int) -> None:
        super().answered(keys, num_tokens)
        self.times.append(self._residents.now())


class Failing(Timed):
    """One that has no ear."""

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        raise RuntimeError("cannot hear")


class Told:
    """A pool, and who tells its policy. ``now`` is the pool's time."""

    def __init__(
        self, policy: EvictionPolicyMaker = Timed, *, num_slots: int = 64, is_late: bool = True
    ) -> None:
        self.now = 0.0
        self.pool = Pool(num_slots, policy, clock=lambda: self.now)
        matcher = Scheduler(self.pool, (FullAttention(BLOCK),), config=Config())._parts.matcher
        self.hearing = Hearing(self.pool, (), matcher, is_late=is_late)
        self.gone: list[Keys] = []
        self.pool.listeners.append(self.gone.append)

    @property
    def policy(self) -> Any:
        return self.pool._chosen_policy

    def asked(self, chain: Chain | Keys, hit: int = 0, num_asked: int | None = None) -> Any:
        """A request with this chain, of which so many blocks were had; all are asked for if not."""
        request = type("Asking", (), {"chain": chain})()
        tokens = (len(chain) if num_asked is None else num_asked) * BLOCK
        told = Explanation("r", tokens, 0, hit * BLOCK, 0, Reason.NEVER_STORED)
        self.hearing.asked(request, told)
        return request

    def store(self, blocks: Keys, parent: Any = None) -> None:
        lease = self.pool.reserve(blocks, parent=parent)
        if lease is not None:
            lease.commit()


def test_each_is_told_with_its_time_before_anything_is_stored() -> None:
    told = Told()
    told.now = 1.0
    chain = Chain(4)
    request = told.asked(chain)
    told.now = 2.0
    other = told.asked(Chain(2))
    chain.length = 6
    told.now = 5.0
    told.hearing.ended(request)
    told.now = 9.0
    assert told.policy.heard == []
    told.store(keys(range(6)))
    assert told.policy.heard == [
        ("asked", 4, 64, []),
        ("asked", 2, 32, []),
        ("answered", 6, 32, []),
    ]
    assert told.policy.times == [1.0, 2.0, 5.0]
    told.hearing.ended(other)
    assert told.pool.counts.cached == 6
    told.pool.coldest(1)
    assert told.policy.times == [1.0, 2.0, 5.0, 9.0], "nor is anything chosen before"
    assert told.pool.now() == 9.0


def test_what_a_request_found_is_what_was_there_when_it_asked() -> None:
    """Seen red without ``_catch_up`` in ``Pool.end``, and without that in ``Pool.reset``."""
    told = Told()
    lease = told.pool.reserve(keys(range(4)))
    assert lease is not None
    told.asked(keys(range(4)), hit=4)
    lease.commit()
    told.asked(keys(range(4)), hit=4)
    told.pool.reset()
    assert [len(each[3]) for each in told.policy.heard] == [0, 4]


@pytest.mark.parametrize("how", ["drop", "disown"])
def test_blocks_in_use_that_are_dropped_were_found_by_who_asked_before(how: str) -> None:
    """Seen red without ``_catch_up`` in ``PoolRoom._doom``."""
    told = Told()
    told.store(keys(range(4)))
    lease = told.pool.pin(keys(range(4)))
    assert lease is not None
    told.asked(keys(range(4)), hit=4)
    if how == "drop":
        told.pool.drop(told.pool.leading(keys(range(4))))
    else:
        lease.disown()
    assert [len(each[3]) for each in told.policy.heard] == [4]


def test_who_makes_room_below_his_ceiling_has_heard_of_all_before() -> None:
    """Seen red without ``_catch_up`` in ``PoolRoom._within_ceiling``."""
    told = Told(num_slots=16)
    told.pool.divide([None, None], [0.5, 1.0], 1)
    told.store(keys(range(8)))
    told.asked(keys(range(8)), hit=8)
    told.store(keys(range(100, 104)))
    assert told.pool.counts.cached == 8
    assert [len(each[3]) for each in told.policy._inner[0].heard] == [8]


def test_a_policy_that_fails_when_told_fails_the_next_request_and_no_pool() -> None:
    """Seen red with the error raised where the pool catches up."""
    told = Told(Failing)
    lease = told.pool.reserve(keys(range(4)))
    assert lease is not None
    told.asked(keys(range(2)))
    told.asked(keys(range(3)))
    lease.commit()
    told.pool.check_integrity()
    assert told.pool.counts.cached == 4
    with pytest.raises(RuntimeError, match="cannot hear"):
        told.asked(keys(range(4)))
    told.asked(keys(range(4)))


def test_no_more_than_so_many_are_owed() -> None:
    told = Told()
    for _ in range(MOST_OWED - 1):
        told.asked(keys(range(2)))
    assert told.policy.heard == []
    told.asked(keys(range(2)))
    assert len(told.policy.heard) == MOST_OWED


@pytest.mark.parametrize(("num_asked", "num_told"), [(2, 2), (4, 4), (6, 4)])
def test_a_policy_hears_of_what_was_asked_for_as_the_chain_was_then(
    num_asked: int, num_told: int
) -> None:
    told, heard = Told(), []
    told.hearing.also = lambda at, keys, request, explanation: heard.append(len(keys))
    chain = Chain(4)
    told.asked(chain, num_asked=num_asked)
    chain.length = 9
    told.hearing.tell()
    assert [each[1] for each in told.policy.heard] == [num_told]
    assert heard == [num_told]


def test_where_requests_end_nothing_is_told_while_it_can_wait() -> None:
    told = Told()
    for _ in range(MOST_OWED // 2):
        told.hearing.ended(told.asked(keys(range(2))))
    assert told.policy.heard == []
    told.asked(keys(range(2)))
    assert len(told.policy.heard) == MOST_OWED + 1
    requests = [told.asked(keys(range(2))) for _ in range(MOST_OWED - 1)]
    for _ in range(MOST_UNTOLD // MOST_OWED):
        told.hearing.ended(requests.pop())
    assert len(told.policy.heard) == MOST_OWED + 1


def test_where_requests_end_no_more_than_so_many_are_owed_either() -> None:
    told = Told()
    requests = [told.asked(keys(range(2))) for _ in range(MOST_OWED)]
    requests += [told.asked(keys(range(2))) for _ in range(MOST_OWED)]
    told.policy.heard.clear()
    requests += [told.asked(keys(range(2))) for _ in range(MOST_OWED - 1)]
    for request in requests[: MOST_UNTOLD - MOST_OWED]:
        told.hearing.ended(request)
    assert told.policy.heard == []
    told.hearing.ended(requests[-1])
    assert len(told.policy.heard) == MOST_UNTOLD


def test_others_that_learn_get_the_keys_of_when_it_asked() -> None:
    told, heard = Told(), []
    told.hearing.also = lambda at, keys, request, explanation: heard.append((at, len(keys)))
    told.now = 3.0
    chain = Chain(4)
    told.asked(chain)
    chain.length, told.now = 7, 4.0
    assert not heard
    told.hearing.tell()
    assert heard == [(3.0, 4)]


@pytest.mark.parametrize("seed", range(6))
def test_late_or_at_once_the_same_blocks_go(seed: int) -> None:
    """Seen red with the time of the telling instead of its own."""
    sides = [Told(Returns, num_slots=48, is_late=is_late) for is_late in (False, True)]
    rng = Random(seed)
    chats: list[list[int]] = []
    running: list[tuple[list[int], list[Any]]] = []
    next_block = 1
    for _ in range(600):
        for side in sides:
            side.now += 0.1
        if len(running) < 4 and rng.random() < 0.6:
            chat = chats.pop(rng.randrange(len(chats))) if chats and rng.random() < 0.6 else [0]
            chat = [*chat, *range(next_block, next_block + rng.randrange(1, 5))]
            next_block = chat[-1] + 1
            hits = [side.pool.match(keys(chat)) for side in sides]
            assert hits[0] == hits[1]
            running.append((chat, [side.asked(keys(chat), hits[0]) for side in sides]))
        elif running:
            chat, requests = running.pop(rng.randrange(len(running)))
            for side, request in zip(sides, requests, strict=True):
                side.hearing.ended(request)
                hit = side.pool.match(keys(chat))
                if hit < len(chat):
                    side.store(keys(chat[hit:]), keys(chat)[hit - 1] if hit else None)
            if len(chat) < 24:
                chats.append(chat)
    for side in sides:
        side.pool.check_integrity()
    at_once, late = ([key for each in side.gone for key in each] for side in sides)
    assert len(at_once) > 100
    assert at_once == late


@pytest.mark.parametrize("is_late", [False, True])
def test_beside_an_engine_it_is_late_and_at_the_end_all_is_told(is_late: bool) -> None:
    pool = Pool(64, Timed)
    engine = NoBlocks() if is_late else None
    scheduler = Scheduler(pool, (FullAttention(BLOCK),), config=Config(), engine=engine)
    policy: Any = pool._chosen_policy
    request = scheduler.open("r", keys(range(4)))
    request.match()
    scheduler.count_answered()
    assert len(policy.heard) == (0 if is_late else 1)
    request.end()
    scheduler.close()
    assert [each[0] for each in policy.heard] == ["asked", "answered"]
