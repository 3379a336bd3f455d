"""Random lives of requests in vLLM's scheduler, without vLLM: nobody waits for ever, nothing stays.

Some lives break our scheduler in the middle: then requests go on without it, what was promised is
told, and every device block is given back.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import closing
from typing import Any

import pytest
from tests.fakes.vllm_side import BLOCK_TOKENS, FakeVllm

from kvferry.cache.reach import FullAttention, Group, SlidingWindow
from kvferry.connectors.common.messages import StepOrders
from kvferry.scheduler import stores

GROUPS: list[tuple[Group, ...]] = [
    (FullAttention(BLOCK_TOKENS),),
    (FullAttention(BLOCK_TOKENS), SlidingWindow(BLOCK_TOKENS, window=40)),
    (FullAttention(2 * BLOCK_TOKENS), FullAttention(BLOCK_TOKENS)),
]
BREAKS = ("plan", "settle", "take_released")


def hashes(story: int, count: int) -> list[bytes]:
    found, last = [], b"%d" % story
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        found.append(last)
    return found


class Lives:
    """One vLLM and its requests. Owns who of them waits, loads or runs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.vllm = FakeVllm(
            *rng.choice(GROUPS), num_blocks=rng.choice([60, 200]), num_ranks=rng.choice([1, 2])
        )
        self.requests: dict[str, Any] = {}
        self.unanswered: list[StepOrders] = []
        self.num_came = 0

    def come(self) -> None:
        self.num_came += 1
        story = hashes(self.rng.randrange(3), self.rng.randrange(6))
        request = self.vllm.request(f"r{self.num_came}", story)
        request.state, request.has_run = "waiting", False
        self.requests[request.request_id] = request

    def step(self) -> None:
        scheduled, new = {}, []
        for name, request in self.requests.items():
            if request.state == "running" and self.rng.random() < 0.1:
                self._preempt(request)
            elif request.state == "running":
                left = request.num_tokens - request.num_computed_tokens
                scheduled[name] = max(1, left)
            elif request.state == "waiting" and self._admit(request):
                scheduled[name] = request.num_tokens
                new += [] if request.has_run else [name]
                request.has_run = True
        self.unanswered.append(self.vllm.orders(scheduled, new=new))
        for name, count in scheduled.items():
            request = self.requests[name]
            computed = request.num_computed_tokens + count
            request.num_computed_tokens = min(request.num_tokens, computed)
            request.num_output_tokens += computed >= request.num_tokens
            self.vllm.cache(request)

    def _admit(self, request: Any) -> bool:
        """True if it runs in this step."""
        vllm = self.vllm
        sizes = [group.block_tokens for group in vllm.groups]
        if vllm.pool.get_num_free_blocks() < sum(-(-request.num_tokens // size) for size in sizes):
            vllm.side.frees_soon()
            return False
        count, _ = vllm.side.match(request, 0)
        if count is None or self.rng.random() < 0.1:  # asked in vain: it is asked again
            return False
        count = 0 if self.rng.random() < 0.1 else count  # another connector serves it
        vllm.allocate(request, count)
        request.state, request.num_computed_tokens = "loading" if count else "running", count
        return not count

    def _preempt(self, request: Any) -> None:
        request.num_preemptions += 1
        request.num_computed_tokens, request.state = 0, "waiting"
        self.vllm.take_back(request)

    def answer(self) -> None:
        """Every rank answers for all that was sent, and tells vLLM whose loads have ended."""
        done, self.unanswered = self.unanswered, []
        self.vllm.answer(*done)
        for name in [name for orders in done for name in (*orders.loads, *orders.ended)]:
            request = self.requests.get(name)
            if request is not None and request.state == "loading":
                request.state, request.has_run = "running", True
                request.num_computed_tokens = 0

    def end_some(self) -> None:
        for name, request in list(self.requests.items()):
            if self.rng.random() < (0.4 if request.num_output_tokens else 0.08):
                del self.requests[name]
                self.vllm.free(request)

    def drain(self) -> None:
        for _ in range(4):
            self.answer()
            running = [name for name, each in self.requests.items() if each.state == "running"]
            self.unanswered.append(self.vllm.orders(dict.fromkeys(running, 1)))
        self.answer()
        stuck = [name for name, each in self.requests.items() if each.state == "loading"]
        assert not stuck, "a load is waited for that nobody brings"
        for request in self.requests.values():
            self.vllm.free(request)
        num_steps = 0
        while self.vllm.side.has_work or num_steps < 3:
            num_steps += 1
            assert num_steps < 50, "there is work for ever"
            self.vllm.answer(self.vllm.orders())
        assert self.vllm.num_held == 0


@pytest.fixture(autouse=True, params=[32, 4096], ids=["often", "late"])
def _stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STORE_TOKENS", request.param)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_waits_for_ever_and_nothing_stays(seed: int, breaks: bool) -> None:
    rng = random.Random(seed)
    lives = Lives(rng)
    with closing(lives.vllm.side):
        live_on(lives, rng, breaks=breaks)


def live_on(lives: Lives, rng: random.Random, *, breaks: bool) -> None:
    serving = lives.vllm.serving
    break_at = rng.randrange(100) if breaks else None
    for number in range(120):
        if number == break_at:
            setattr(serving.scheduler, rng.choice(BREAKS), lambda *args, **options: 1 // 0)
        if len(lives.requests) < 6 and rng.random() < 0.4:
            lives.come()
        lives.step()
        if rng.random() < 0.6:
            lives.answer()
        lives.end_some()
        if rng.random() < 0.02:
            lives.vllm.side.reset()
        lives.vllm.side.take_stats()
    lives.drain()
    if breaks:
        assert lives.vllm.serving is None, "it was not broken after all"
    else:
        assert lives.vllm.serving is serving, lives.vllm.side.guard.reason
        parts = serving.scheduler._requests
        left = [parts.live, parts.answered, parts.pinned, parts.released]
        left += [serving._requests, *vars(serving._promises).values()]
        assert not any(left)
        serving.scheduler.check_integrity()
        assert serving.scheduler.stats().hit_tokens > 0
