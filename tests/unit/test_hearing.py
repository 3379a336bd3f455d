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
    """LRU that writes down what it is told: keys, tokens, and how many were found."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self.heard: list[tuple[int, int, int]] = []

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        self.heard.append((len(keys), num_tokens, len(slots)))


def serve(scheduler: Scheduler, num_blocks: int) -> None:
    request = scheduler.open("r", keys(range(num_blocks)))
    table = list(range(num_blocks))
    if request.match().num_tokens:
        request.load([table])
    settle(scheduler)
    request.run()
    request.store([table], num_blocks * BLOCK)
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


@pytest.mark.parametrize("num_tiers", [0, 1])
def test_each_request_is_told_once_and_to_every_pool(num_tiers: int) -> None:
    scheduler, listeners = made(num_tiers)
    serve(scheduler, 4)
    serve(scheduler, 8)
    assert listeners[0].heard == [(4, 64, 0), (8, 128, 4)]
    assert [len(each.heard) for each in listeners] == [2] * (1 + num_tiers)


def test_asking_again_is_no_other_request() -> None:
    scheduler, (listener,) = made()
    request = scheduler.open("r", keys(range(4)))
    for _ in range(3):
        request.match()
        settle(scheduler)
    request.preempt()
    request.match()
    settle(scheduler)
    request.leave(0)
    settle(scheduler)
    assert listener.heard == [(4, 64, 0)]
