"""What a policy hears of requests through the scheduler: each once, with its answer and keys."""

from __future__ import annotations

import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import SlotTier
from kvferry.types import FIRST_RANK, Outcome, Receipt, SlotArray, TierName

BLOCK = 16


class Listener(Lru):
    """LRU that writes down what it is told."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self.heard: list[tuple[str, int, int, list[int]]] = []

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        self.heard.append(("asked", len(keys), num_tokens, slots.tolist()))

    def answered(self, keys: Keys, num_tokens: int) -> None:
        self.heard.append(("answered", len(keys), num_tokens, []))


class Chain:
    """A chain that grows by its answer."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> bytes:
        return self.keys()[item]

    def keys(self) -> Keys:
        return keys(range(self.length))


def serve(scheduler: Scheduler, length: int, answer: int) -> None:
    chain = Chain(length)
    request = scheduler.open("r", chain)  # type: ignore[arg-type]
    match = request.match()
    table = list(range(length + answer))
    if match.num_tokens:
        request.load([table])
    settle(scheduler)
    request.run()
    chain.length += answer
    request.store([table], chain.length * BLOCK)
    settle(scheduler)
    request.end()
    request.end()
    settle(scheduler)


def settle(scheduler: Scheduler) -> None:
    transfers = scheduler.plan().transfers
    scheduler.settle(Receipt(each.id, FIRST_RANK, Outcome.OK) for each in transfers)
    for pool in scheduler._pools:
        pool.catch_up()


def made(num_tiers: int = 0) -> tuple[Scheduler, list[Listener]]:
    listeners: list[Listener] = []

    def make(residents: Residents) -> Listener:
        listeners.append(Listener(residents))
        return listeners[-1]

    pool = Pool(64, make)
    tiers = [SlotTier(TierName(f"l{at}"), Pool(64, make)) for at in range(num_tiers)]
    config = Config(load_policy="always")
    return Scheduler(pool, (FullAttention(BLOCK),), config=config, tiers=tiers), listeners


def test_each_request_is_told_once_with_its_answer() -> None:
    scheduler, (listener,) = made()
    serve(scheduler, 4, 2)
    assert [each[:3] for each in listener.heard] == [("asked", 4, 64), ("answered", 6, 32)]
    assert listener.heard[0][3] == []
    serve(scheduler, 8, 0)
    assert [each[:3] for each in listener.heard[2:]] == [("asked", 8, 128), ("answered", 8, 0)]
    assert len(listener.heard[2][3]) == 6, "what was here of it"


def test_asking_again_is_no_other_request() -> None:
    scheduler, (listener,) = made()
    request = scheduler.open("r", keys(range(4)))
    for _ in range(3):
        request.match()
        settle(scheduler)
    request.preempt()
    request.match()
    settle(scheduler)
    assert [each[0] for each in listener.heard] == ["asked"]
    request.leave(0)
    settle(scheduler)
    assert [each[0] for each in listener.heard] == ["asked", "answered"]


def test_policies_of_tiers_hear_too() -> None:
    scheduler, listeners = made(1)
    serve(scheduler, 4, 0)
    assert [len(each.heard) for each in listeners] == [2, 2]


@pytest.mark.parametrize("policy", ["lru", "returns"])
def test_only_who_wants_it_is_told(policy: str) -> None:
    from kvferry.cache.policies import policy_named

    pool = Pool(64, policy_named(policy))
    assert (pool.eviction.feed.hearer is not None) == (policy == "returns")
    scheduler = Scheduler(pool, (FullAttention(BLOCK),), config=Config(load_policy="always"))
    for length in (3, 5, 9, 9):
        serve(scheduler, length, 1)
    assert pool.match(keys(range(10))) == 10
    scheduler.pool.check_integrity()
