"""The serving loop: schedule, run, postprocess. The ``Offloader`` alone talks to kvferry."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.cache.policies import policy_named
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.core.identity import Namespace, chain
from kvferry.core.lifecycle import Closing
from kvferry.errors import InputError
from kvferry.rank import Contents, open_on_cpu
from kvferry.scheduler.scheduler import Scheduler, Settled
from kvferry.scheduler.tier import WriteMode, lower_tier
from kvferry.scheduler.transfers import Ordered
from kvferry.telemetry.source import Mailbox, Source
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tools.demo.blocks import DeviceMemory, ServedRequest, ServedState
from kvferry.tools.demo.model import BLOCK_TOKENS, Decoder, Floats, Span
from kvferry.tools.demo.workload import Chat, Dialogue
from kvferry.transfer.engine.cpu import Stream
from kvferry.transfer.layout import describe
from kvferry.types import DEVICE, FIRST_RANK, HOST, MatchState, RequestId
from kvferry.worker import Worker


class Runner(Closing):
    """Owns one device's KV tensors and its compute stream. The engine owns the block tables."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        shape = decoder.shape.kv_shape(num_blocks, block_tokens)
        self.kv: list[Floats] = [np.zeros(shape, np.float32) for _ in decoder.layers]
        self.groups = decoder.shape.groups(block_tokens)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.max_tokens = decoder.shape.max_tokens
        self.compute = Stream("compute")
        self._decoder = decoder

    @property
    def namespace(self) -> Namespace:
        """All that decides the bytes of these blocks, except the tokens."""
        shape = self._decoder.shape
        return Namespace(
            model="kvferry-playground",
            revision=str(shape.seed),
            dtype="float32",
            layout="block,kv,token,head,dim",
            geometry={name: getattr(shape, name) for name in shape.__dataclass_fields__},
            block_tokens=self.block_tokens,
        )

    def group_tensors(self) -> list[list[Floats]]:
        """The KV tensors of each group, in layer order."""
        by_group: list[list[Floats]] = [[] for _ in self.groups]
        for group, tensor in zip(self._decoder.shape.layer_groups, self.kv, strict=True):
            by_group[group].append(tensor)
        return by_group

    def submit(self, spans: Sequence[Span]) -> Callable[[], list[int]]:
        """Queue one forward pass. The returned function waits for each span's next token."""
        tokens: list[int] = []
        self.compute.run(lambda: tokens.extend(self._decoder.forward(spans, self.kv)))

        def result() -> list[int]:
            self.compute.synchronize()
            return tokens

        return result

    def close(self) -> None:
        """Finish what was queued and end the compute stream. Safe to call twice."""
        self.compute.close()


class Offloader(Closing):
    """Owns kvferry's scheduler half and worker half, the copy engine and the host memory.

    The engine holds every device block that ``load`` and ``store`` return until ``settle`` releases
    it.
    """

    def __init__(self, runner: Runner, *, host_bytes: int, config: Config | None = None) -> None:
        """Open host memory of this size and the tiers that ``config`` names below it."""
        host: Any = f"{host_bytes}B"
        config = replace(config if config is not None else Config(), host=host)
        layouts = [describe(tensors, block_axis=0) for tensors in runner.group_tensors()]
        slot_bytes = max(layout.block_bytes for layout in layouts)
        if host_bytes < slot_bytes:
            raise InputError(
                f"a block has {slot_bytes} bytes, host memory of {host_bytes} bytes holds none"
            )
        contents = Contents(runner.namespace)
        self.rank = open_on_cpu(layouts, config, compute=runner.compute, contents=contents)
        tier_policy = policy_named(config.tier_policy)
        num_slots, num_ready = self.rank.host.num_slots, self.rank.ready_slots
        self.scheduler = Scheduler(
            Pool(num_slots, policy_named(config.policy), num_ready=num_ready),
            runner.groups,
            config=config,
            num_device_blocks=runner.num_blocks,
            block_bytes=[layout.block_bytes for layout in layouts],
            tiers=[
                lower_tier(
                    name,
                    each.num_places,
                    WriteMode(config.tier_write),
                    tier_policy,
                    recovered=[each.recovered()],
                )
                for name, each in self.rank.tiers.items()
            ],
        )
        self.scheduler.watch_requests()
        self.mailbox = Mailbox()
        self.mailbox.before_answers = self.scheduler.book.drain
        copies = self.rank.engine
        routes = {(DEVICE, HOST): copies, (HOST, DEVICE): copies}
        self.worker = Worker(routes, tiers=self.rank.tiers)

    @property
    def has_pending(self) -> bool:
        """Whether transfers are under way or about to start."""
        scheduler = self.scheduler
        return scheduler.num_in_flight + scheduler.num_queued > 0 or scheduler.control.is_busy

    def dispatch(self) -> None:
        """Start every transfer ordered since the last call."""
        plan = self.scheduler.plan()
        if plan:
            self.worker.execute(plan)

    def settle(self) -> Settled:
        """Learn which transfers ended since the last call. Answer questions of other threads."""
        self.mailbox.answer()
        self.scheduler.note_ready(FIRST_RANK, self.rank.ready_slots)
        for change in self.worker.health():
            self.scheduler.note_health(change)
        return self.scheduler.settle(self.worker.poll())

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def source(self) -> Source:
        """The figures for a metrics endpoint."""
        slot_bytes: dict[str, int] = dict.fromkeys(
            (HOST, *self.rank.tiers), self.rank.host.tier.slot_bytes
        )
        return Source(
            self.scheduler.onlooker, self.mailbox, slot_bytes=slot_bytes, disks=self.rank.disks
        )

    def close(self) -> None:
        """Finish the transfers under way, then end both halves. Safe to call twice."""
        self.worker.close()
        self.scheduler.close()
        self.rank.close()


IDLE_SECONDS = 0.0005

Work = list[tuple[ServedRequest, int]]
"""One step's requests and how many tokens of each to compute."""


@dataclass(frozen=True)
class Limits:
    """How much one step may take."""

    step_tokens: int = 256
    max_running: int = 8


@dataclass
class Counts:
    """The engine's work. The tokens of a preempted request count each time."""

    num_prefill_tokens: int = 0
    num_loaded_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """Continuous batching over one device.

    Owns the requests and the device blocks. Its runner owns the KV bytes and the model, and its
    offloader owns everything slower than the device. Only later requests are preempted for an
    earlier one, so the first request always makes progress.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        limits: Limits | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        self.runner = runner
        self.memory = DeviceMemory(runner.groups, runner.num_blocks)
        self.counts = Counts()
        self.limits = limits or Limits()
        self.offloader = offloader
        self.clock = time.perf_counter
        self._namespace = runner.namespace
        self._block_tokens = runner.block_tokens
        self._requests: dict[RequestId, ServedRequest] = {}
        self._waiting: list[ServedRequest] = []
        self._running: list[ServedRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, request: ServedRequest) -> None:
        """Take a request. Earlier arrivals are scheduled first."""
        longest = len(request.prompt) + request.max_new_tokens
        most = min(self.runner.max_tokens, self.memory.num_blocks * self._block_tokens)
        if longest > most:
            raise InputError(
                f"request {request.id} may grow to {longest} tokens; the model and "
                f"{self.memory.num_blocks} device blocks of {self._block_tokens} hold {most}"
            )
        request.tables = [[] for _ in self.memory.groups]
        self._requests[request.id] = request
        insort(self._waiting, request, key=_order)

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state. A transfer under way keeps its blocks until it ends."""
        request = self._requests.pop(request_id)
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        if request.ferried is not None:
            request.ferried.end()
        self._drop(request)

    def step(self) -> list[ServedRequest]:
        """Do one step. Returns the requests that finished in it."""
        if self.offloader:
            self._settle(self.offloader)
        start, num_prefilled = self.clock(), self.counts.num_prefill_tokens
        work = self._schedule()
        result = self.runner.submit([request.span(count) for request, count in work])
        for request, count in work:
            self._advance(request, count)
        if self.offloader:  # after the compute was queued: the copies are ordered behind it
            self.offloader.dispatch()
        if not work and self._requests:
            time.sleep(IDLE_SECONDS)  # a transfer may end
        tokens = result()
        if self.offloader:
            scheduler = self.offloader.scheduler
            num_prefilled = self.counts.num_prefill_tokens - num_prefilled
            if num_prefilled:
                scheduler.note_prefill(num_prefilled, self.clock() - start)
        return self._postprocess(work, tokens)

    def run(self) -> None:
        """Step until every request is done."""
        while self.has_work:
            self.step()

    def drain(self) -> None:
        """Wait until no transfer holds a device block. Call it between requests only."""
        if self.offloader:
            self._settle(self.offloader)
            while self.offloader.has_pending:
                self.offloader.dispatch()
                time.sleep(IDLE_SECONDS)
                self._settle(self.offloader)

    def _schedule(self) -> Work:
        budget, num_preemptions = self.limits.step_tokens, self.counts.num_preemptions
        work: Work = []

        def add(request: ServedRequest) -> int:
            count = min(request.num_uncomputed, budget)
            if request.state is not ServedState.RUNNING or not count:
                return 0
            if not self._make_room(request, count):
                return 0
            work.append((request, count))
            return count

        for request in tuple(self._running):
            budget -= add(request)
        if num_preemptions != self.counts.num_preemptions:
            return work  # no room for more requests
        num_admitted = len(self._requests) - len(self._waiting)
        for request in self._waiting[: max(0, self.limits.max_running - num_admitted)]:
            if not budget or not self._admit(request):
                break
            budget -= add(request)
        return work

    def _admit(self, request: ServedRequest) -> bool:
        """Give a waiting request its cached blocks. Returns False if it must wait."""
        self._extend_keys(request)
        # The last token is always computed: its logits are the next token.
        usable = request.keys[: (len(request.tokens) - 1) // self._block_tokens]
        num_cached, request.tables = self.memory.acquire(usable)
        num_tokens = num_cached
        if self.offloader:
            if request.ferried is None:
                request.ferried = self.offloader.scheduler.open(
                    request.id, request.keys, request.hints
                )
            match = request.ferried.match(
                computed_tokens=num_cached, max_tokens=len(usable) * self._block_tokens
            )
            if match.state is MatchState.WAIT:  # another request is loading these very blocks
                self._drop(request)
                return False
            num_tokens = match.num_tokens
        # This request and all admitted ones must be able to grow to their lengths.
        admitted = (r for r in self._requests.values() if r.state is not ServedState.WAITING)
        if not self.memory.can_grow(*((r.tables, len(r.tokens)) for r in (*admitted, request))):
            self._drop(request)
            return False
        self._waiting.remove(request)
        request.num_computed = num_cached
        request.num_device_hits += num_cached
        if num_tokens > num_cached:
            self._load(request, num_tokens)
        else:
            self._resume(request)
        return True

    def _load(self, request: ServedRequest, num_tokens: int) -> None:
        assert request.ferried is not None
        self.memory.grow_for_load(request.tables, num_tokens, request.num_computed)
        held = request.ferried.load(request.tables)
        if held:
            self._hold(held)
            request.num_loading = num_tokens - request.num_computed
            request.state = ServedState.LOADING
        else:  # the hit was lost after the match
            self.memory.cut(request.tables, request.num_computed)
            self._resume(request)

    def _resume(self, request: ServedRequest) -> None:
        request.state = ServedState.RUNNING
        insort(self._running, request, key=_order)

    def _make_room(self, request: ServedRequest, count: int) -> bool:
        """Get blocks for ``count`` more tokens, and preempt later requests for them if needed."""
        num_tokens = request.num_computed + count
        while not self.memory.can_grow((request.tables, num_tokens)):
            victim = self._running[-1]
            if victim is request:
                return False  # transfers or earlier requests hold the blocks: wait a step
            self._preempt(victim)
        self.memory.grow(request.tables, num_tokens)
        return True

    def _preempt(self, request: ServedRequest) -> None:
        self._running.remove(request)
        if request.ferried is not None:
            request.ferried.preempt()
        self._drop(request)
        request.state = ServedState.WAITING
        self.counts.num_preemptions += 1
        insort(self._waiting, request, key=_order)

    def _advance(self, request: ServedRequest, count: int) -> None:
        """Publish, store and trim full blocks, now that ``count`` more tokens are queued."""
        if request.num_uncomputed > 1 or not request.generated:  # else it only decodes
            self.counts.num_prefill_tokens += count
            request.num_prefilled += count
        self._add_computed(request, count)
        if request.ferried is not None:
            self._hold(request.ferried.store(request.tables, request.num_computed))
        # After the stores hold their blocks: blocks that a window has passed are handed out again.
        self.memory.trim(request.tables, request.num_computed)

    def _postprocess(self, work: Work, tokens: list[int]) -> list[ServedRequest]:
        now = self.clock()
        finished = []
        for (request, _), token in zip(work, tokens, strict=True):
            if request.num_uncomputed:
                continue  # a chunk of a longer prompt has no sample
            request.tokens.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            if len(request.generated) == request.max_new_tokens:
                self._finish(request)
                finished.append(request)
        return finished

    def _finish(self, request: ServedRequest) -> None:
        self._running.remove(request)
        del self._requests[request.id]
        if request.ferried is not None:
            # Blocks that found no room in flight when they were computed.
            self._hold(request.ferried.store(request.tables, request.num_computed))
            request.ferried.end()
        self._drop(request)

    def _settle(self, offloader: Offloader) -> None:
        settled = offloader.settle()
        for ferried in settled.loaded:
            request = self._requests[ferried.id]
            request.num_loaded += request.num_loading
            self.counts.num_loaded_tokens += request.num_loading
            self._add_computed(request, request.num_loading)
            self._resume(request)
        for failed in settled.failed:
            request = self._requests[failed.request.id]
            self.memory.cut(request.tables, failed.first_token)
            self._resume(request)
        for group, blocks in settled.released:
            self.memory.pools[group].release(blocks.tolist())

    def _hold(self, ordered: Iterable[Ordered]) -> None:
        for part in ordered:
            self.memory.pools[part.group].hold(part.blocks.tolist())

    def _add_computed(self, request: ServedRequest, count: int) -> None:
        first = request.num_computed // self._block_tokens
        request.num_computed += count
        self._extend_keys(request)
        full = range(first, request.num_computed // self._block_tokens)
        self.memory.publish(request.tables, request.keys, full)

    def _extend_keys(self, request: ServedRequest) -> None:
        known = len(request.keys)
        full = len(request.tokens) // self._block_tokens
        if full > known:
            tokens = request.tokens[known * self._block_tokens : full * self._block_tokens]
            parent = request.keys[known - 1] if known else None
            request.keys = request.keys + chain(self._namespace, tokens, parent)
            if request.ferried is not None:
                request.ferried.chain = request.keys

    def _drop(self, request: ServedRequest) -> None:
        self.memory.cut(request.tables, 0)
        request.num_computed = 0


def _order(request: ServedRequest) -> tuple[float, str]:
    return (request.arrival, request.id)


def serve(
    engine: Engine, chat: Chat, on_finish: Callable[[ServedRequest], None] | None = None
) -> dict[str, list[int]]:
    """Serve all turns of a chat with one engine. Returns the answers by request id."""
    dialogue = Dialogue(chat)
    answers: dict[str, list[int]] = {}
    while not dialogue.is_over:
        while (question := dialogue.ask()) is not None:
            engine.submit(ServedRequest(**question, arrival=engine.clock()))
        for request in engine.step():
            dialogue.answered(request.id, request.generated)
            answers[request.id] = request.generated
            if on_finish:
                on_finish(request)
    return answers
