"""The serving loop: schedule, run, postprocess."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.errors import InputError
from kvferry.identity import chain
from kvferry.playground.blocks import BlockPool
from kvferry.playground.model import Span
from kvferry.playground.offload import Offloader
from kvferry.playground.request import Request, State
from kvferry.playground.runner import Runner
from kvferry.types import RequestId

IDLE_WAIT = 0.002


@dataclass(frozen=True)
class Limits:
    """How much one step and one device may take."""

    step_tokens: int = 256
    max_running: int = 8

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class Counts:
    """What the engine did, in tokens; a preempted request's tokens count each time."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_device_hit_tokens: int = 0
    num_loaded_tokens: int = 0
    num_failed_load_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """Continuous batching over one device.

    Owns the requests and the device blocks; leaves the KV bytes and the model to its runner and
    everything slower than the device to its offloader. Of two requests the one that arrived first
    always wins: only later ones are preempted for it, so the first one always gets on.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        limits: Limits | None = None,
        offloader: Offloader | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.pool = BlockPool(runner.num_blocks)
        self.counts = Counts()
        self.limits = limits or Limits()
        self.offloader = offloader
        self.clock = clock
        self._namespace = runner.namespace
        self._block_tokens = runner.block_tokens
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, request: Request) -> None:
        """Take a request; it is looked at once its arrival time has come."""
        if request.id in self._requests:
            raise InputError(f"request {request.id} is already being served")
        longest = len(request.prompt) + request.max_new_tokens
        if self._num_blocks_for(longest) > self.pool.num_blocks:
            raise InputError(
                f"request {request.id} may grow to {longest} tokens, which need "
                f"{self._num_blocks_for(longest)} device blocks; there are {self.pool.num_blocks}"
            )
        if longest > self.runner.max_tokens:
            raise InputError(
                f"request {request.id} may grow to {longest} tokens; "
                f"the model ends at {self.runner.max_tokens}"
            )
        self._requests[request.id] = request
        insort(self._waiting, request, key=_turn)

    def abort(self, request_id: RequestId) -> None:
        """Forget a request wherever it is. A transfer under way keeps its blocks until it ends."""
        request = self._requests.pop(request_id, None)
        if request is None:
            raise InputError(f"request {request_id} is not being served")
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.RUNNING:
            self._running.remove(request)
        request.state = State.ABORTED
        if self.offloader:
            self.offloader.abort(request_id)
        self._drop_blocks(request)

    def step(self) -> list[Request]:
        """Do one step's work; returns the requests that finished in it."""
        if self.offloader:
            self._settle(self.offloader)
        work = self._schedule()
        if not work:
            if self.offloader:
                self.offloader.dispatch()
            self._idle()
            return []
        pending = self.runner.submit([self._span(request, count) for request, count in work])
        for request, count in work:
            self._advance(request, count)
        if self.offloader:  # after the compute was queued: stores are ordered behind it
            self.offloader.dispatch()
        return self._postprocess(work, pending())

    def run(self) -> None:
        """Step until every request is done."""
        while self.has_work:
            self.step()

    # -- schedule

    def _schedule(self) -> list[tuple[Request, int]]:
        budget = self.limits.step_tokens
        work: list[tuple[Request, int]] = []
        num_preemptions = self.counts.num_preemptions
        for request in tuple(self._running):
            count = min(request.num_uncomputed, budget)
            if request.state is State.RUNNING and count and self._make_room(request, count):
                work.append((request, count))
                budget -= count
        while budget and num_preemptions == self.counts.num_preemptions:
            request_or_none = self._next_arrival()
            if request_or_none is None or not self._admit(request_or_none):
                break
            request = request_or_none
            if request.state is State.RUNNING:
                count = min(request.num_uncomputed, budget)
                if self._make_room(request, count):
                    work.append((request, count))
                    budget -= count
        return work

    def _next_arrival(self) -> Request | None:
        num_admitted = len(self._requests) - len(self._waiting)
        if not self._waiting or num_admitted >= self.limits.max_running:
            return None
        request = self._waiting[0]
        return request if request.arrival <= self.clock() else None

    def _admit(self, request: Request) -> bool:
        """Give a waiting request what is cached of it, or leave it waiting if it does not fit."""
        self._extend_keys(request)
        # The last token is always computed: its logits are the next token.
        usable = request.keys[: (len(request.tokens) - 1) // self._block_tokens]
        on_device = self.pool.acquire_prefix(usable)
        missing = self._num_blocks_for(len(request.tokens)) - len(on_device)
        if not self.pool.can_allocate(missing):
            self.pool.release(on_device)
            return False
        self._waiting.remove(request)
        request.blocks = on_device
        request.num_published = len(on_device)
        request.num_computed = len(on_device) * self._block_tokens
        request.num_device_hits += request.num_computed
        self.counts.num_device_hit_tokens += request.num_computed
        request.state = State.RUNNING
        num_loadable = 0
        if self.offloader:
            num_loadable = self.offloader.match(request.id, usable, len(on_device))
        if self.offloader and num_loadable:
            request.state = State.LOADING
            into = self.pool.allocate(num_loadable)
            request.blocks += into
            self.pool.hold(into)  # for the transfer; released when it is settled
            self.offloader.load(request.id, into)
        else:
            insort(self._running, request, key=_turn)
        return True

    def _make_room(self, request: Request, count: int) -> bool:
        """Get blocks for ``count`` more tokens, preempting later requests if need be."""
        missing = self._num_blocks_for(request.num_computed + count) - len(request.blocks)
        while not self.pool.can_allocate(missing):
            victim = self._running[-1]
            if victim is request:
                return False  # blocks are held by transfers or earlier requests: wait a step
            self._preempt(victim)
        request.blocks += self.pool.allocate(max(0, missing))
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        if self.offloader:
            self.offloader.preempt(request.id)
        self._drop_blocks(request)
        request.state = State.WAITING
        request.num_preemptions += 1
        self.counts.num_preemptions += 1
        insort(self._waiting, request, key=_turn)

    # -- run

    def _span(self, request: Request, count: int) -> Span:
        start = request.num_computed
        tokens = np.array(request.tokens[start : start + count], dtype=np.int64)
        return Span(tokens, start, request.block_table())

    def _advance(self, request: Request, count: int) -> None:
        """Note that compute of ``count`` tokens is queued; full blocks can be found and stored."""
        if request.is_decoding:
            self.counts.num_decode_tokens += 1
        else:
            self.counts.num_prefill_tokens += count
            request.num_prefilled += count
        request.num_computed += count
        self._extend_keys(request)
        full = slice(request.num_published, request.num_computed // self._block_tokens)
        self._publish(request, full.stop)
        if self.offloader and full.start < full.stop:
            taken = self.offloader.store(request.id, request.keys[full], request.blocks[full])
            self.pool.hold(taken)  # until settled: the copy reads them after the request is gone

    # -- postprocess

    def _postprocess(self, work: list[tuple[Request, int]], tokens: list[int]) -> list[Request]:
        self.counts.num_steps += 1
        now = self.clock()
        finished = []
        for (request, _), token in zip(work, tokens, strict=True):
            if request.num_uncomputed:
                continue  # a chunk of a longer prompt: its last row is not a sample
            request.tokens.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            if request.is_done:
                self._finish(request, now)
                finished.append(request)
        return finished

    def _finish(self, request: Request, now: float) -> None:
        self._running.remove(request)
        del self._requests[request.id]
        request.state = State.FINISHED
        request.finished_at = now
        if self.offloader:
            self.offloader.finish(request.id)
        self._drop_blocks(request)

    # -- transfers that ended

    def _settle(self, offloader: Offloader) -> None:
        settled = offloader.settle()
        for request_id, num_loaded in settled.loads:
            request = self._requests.get(request_id)
            if request is None or request.state is not State.LOADING:
                continue  # aborted meanwhile
            num_before = request.num_computed // self._block_tokens
            num_asked = len(request.blocks) - num_before
            request.num_computed += num_loaded * self._block_tokens
            request.num_loaded += num_loaded * self._block_tokens
            self.counts.num_loaded_tokens += num_loaded * self._block_tokens
            self.counts.num_failed_load_tokens += (num_asked - num_loaded) * self._block_tokens
            self._publish(request, num_before + num_loaded)
            request.state = State.RUNNING
            insort(self._running, request, key=_turn)
        self.pool.release(settled.released_blocks)

    def _idle(self) -> None:
        if self.offloader and self.offloader.has_pending:
            self.offloader.wait(IDLE_WAIT)
        elif self._waiting:
            time.sleep(max(0.0, min(IDLE_WAIT, self._waiting[0].arrival - self.clock())))

    # -- bookkeeping

    def _publish(self, request: Request, num_blocks: int) -> None:
        for at in range(request.num_published, num_blocks):
            self.pool.publish(request.blocks[at], request.keys[at])
        request.num_published = max(request.num_published, num_blocks)

    def _extend_keys(self, request: Request) -> None:
        known = len(request.keys)
        full = len(request.tokens) // self._block_tokens
        if full > known:
            tokens = request.tokens[known * self._block_tokens : full * self._block_tokens]
            parent = request.keys[known - 1] if known else None
            request.keys = request.keys + chain(self._namespace, tokens, parent)

    def _drop_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_published = 0

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


def _turn(request: Request) -> tuple[float, str]:
    return (request.arrival, request.id)
