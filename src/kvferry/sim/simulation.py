"""Simulates policies and capacities on one trace, in parallel processes."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.replay import PoolReplay, TierHits
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler.placement import evidence_of
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.settings.eviction import DEFAULT_TIER_POLICY
from kvferry.telemetry.traces import TraceReader, TraceRequest
from kvferry.types import FIRST_RANK, MatchState, Outcome, Receipt, TierName

Ints = npt.NDArray[np.int64]

_CONTINUATION_SHARE = 0.5
"""A request continues an earlier request if it repeats more than this share of its blocks."""


@dataclass(frozen=True, eq=False)
class PreviousUses:
    """The previous request that used each block of a trace. Takes about 55 bytes per block.

    ``starts[r]`` to ``starts[r + 1]`` are the blocks of request r. ``before`` has, for each block,
    the latest earlier request with the same block, or -1. Along a request it never increases.
    """

    starts: Ints
    before: npt.NDArray[np.int32]
    times: npt.NDArray[np.float64]

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], *, keep_partial: bool = False) -> PreviousUses:
        """Read every request once. Partial last blocks count only with ``keep_partial``."""
        numbers, counts, times = [], [], []
        for request in requests:
            stored = len(request.numbers) if keep_partial else request.num_full
            numbers.append(request.numbers[:stored])
            counts.append(stored)
            times.append(request.at)
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        flat = np.concatenate([np.empty(0, dtype=np.uint64), *numbers])
        del numbers
        order = np.argsort(flat, kind="stable")
        same = flat[order[1:]] == flat[order[:-1]]
        del flat
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        before = np.full(len(owner), -1, dtype=np.int32)
        before[order[1:][same]] = owner[order[:-1][same]]
        return cls(starts, before, np.array(times))

    @property
    def num_requests(self) -> int:
        return len(self.times)

    def later_uses(self) -> tuple[Ints, Ints, Ints]:
        """Find the requests that reuse the blocks of each request next, and how many blocks each.

        Returns:
            ``(starts, later, counts)``. The entries of request r are at ``starts[r]`` to
            ``starts[r + 1]``.
        """
        owner = np.repeat(np.arange(self.num_requests), np.diff(self.starts))
        known = np.flatnonzero(self.before >= 0)
        earlier, later = self.before[known].astype(np.int64), owner[known]
        # Equal pairs are adjacent, because ``before`` never increases along a request.
        edges = np.flatnonzero((np.diff(earlier) != 0) | (np.diff(later) != 0)) + 1
        firsts = np.concatenate(([0], edges)) if len(known) else edges
        counts = np.diff(np.concatenate((firsts, [len(known)])))
        earlier, later = earlier[firsts], later[firsts]
        order = np.lexsort((later, earlier))
        starts = np.searchsorted(earlier[order], np.arange(self.num_requests + 1))
        return starts, later[order], counts[order]

    def continuations(self) -> tuple[Ints, Ints]:
        """Return the conversation of each request, and the request that continues it or -1.

        A request continues the latest one with its deepest known block, if it repeats most of that
        request's blocks. Otherwise it begins a conversation.
        """
        conversation = np.arange(self.num_requests)
        continues = np.full(self.num_requests, -1, dtype=np.int64)
        starts = self.starts.tolist()
        for request in range(self.num_requests):
            first, end = starts[request], starts[request + 1]
            known = int(np.count_nonzero(self.before[first:end] >= 0))
            if not known:
                continue
            earlier = int(self.before[first + known - 1])
            size = starts[earlier + 1] - starts[earlier]
            if known > _CONTINUATION_SHARE * size:
                conversation[request] = conversation[earlier]
                if continues[earlier] < 0:
                    continues[earlier] = request
        return conversation, continues


def clairvoyant_hits(uses: PreviousUses, capacity: int) -> npt.NDArray[np.int64]:
    """Return how many leading blocks each request finds in a cache that knows the future."""
    starts, later, counts = (each.tolist() for each in uses.later_uses())
    kept = [0] * uses.num_requests
    hits = np.zeros(uses.num_requests, dtype=np.int64)
    farthest: list[int] = []  # heap of -r for requests r that blocks are kept for; may repeat
    used = 0
    for request in range(uses.num_requests):
        hits[request] = kept[request]
        used -= kept[request]
        kept[request] = 0
        for at in range(starts[request], starts[request + 1]):
            if not kept[later[at]]:
                heapq.heappush(farthest, -later[at])
            kept[later[at]] += counts[at]
            used += counts[at]
        while used > capacity:
            last = -farthest[0]
            going = min(kept[last], used - capacity)
            kept[last] -= going
            used -= going
            if not kept[last]:
                heapq.heappop(farthest)
    return hits


_MAX_PROMOTION_STEPS = 1000
"""Most steps that a request waits for a promotion. Then it computes its blocks."""


class SchedulerReplay:
    """Replays requests on host memory and lower tiers. Owns a scheduler, its pools and their clock.

    Transfers take no time: a block spilled in one step is on its tier in the next. A promotion
    brings as many blocks as the host has room for.
    """

    def __init__(
        self,
        capacity: TierHits,
        policy: EvictionPolicyMaker,
        tier_policy: EvictionPolicyMaker,
        *,
        write: str,
        block_tokens: int,
    ) -> None:
        self._now = 0.0
        self._block_tokens = block_tokens

        def clock() -> float:
            return self._now

        self.host = Pool(capacity[0], policy, clock=clock)
        self.tiers = [
            SlotTier(
                TierName(f"tier{at}"),
                Pool(num_places, tier_policy, clock=clock),
                WriteMode(write),
            )
            for at, num_places in enumerate(capacity[1:], 1)
        ]
        self.scheduler = Scheduler(
            self.host,
            (FullAttention(block_tokens),),
            config=Config(load_policy="always"),
            tiers=self.tiers,
            clock=clock,
        )

    @property
    def evicted(self) -> int:
        pools = [self.host, *(tier.pool for tier in self.tiers)]
        return sum(pool.counts.evicted for pool in pools)

    @property
    def stored(self) -> int:
        return self.host.num_reserved

    def serve(
        self,
        keys: Keys,
        num_storable: int,
        at: float,
        evidence: Evidence | None,
        num_tokens: int = 0,
    ) -> TierHits:
        self._now = at
        where = self._where(keys)
        hints = None
        if evidence is not None:
            ended, continues, within, sender = evidence
            hints = Hints(ended=ended, continues=continues, within=within, session=sender)
        request = self.scheduler.open("", keys, hints)
        match = request.match()
        for _ in range(_MAX_PROMOTION_STEPS):
            if match.state is not MatchState.WAIT:
                break
            self._step()
            match = request.match()
        hit = match.num_tokens // self._block_tokens if match.state is MatchState.HIT else 0
        table = np.arange(len(keys))
        if hit:
            request.load([table])
            self._step()
        request.store([table], num_storable * self._block_tokens)
        request.end()
        self._step()
        found = np.bincount(where[:hit], minlength=len(self.tiers) + 1)
        return tuple(found.tolist())

    def _where(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the fastest tier of each block, the host as 0. Missing blocks get 0 too."""
        where = np.zeros(len(keys), dtype=np.int64)
        missing = ~self.host.cached(keys)
        for at, tier in enumerate(self.tiers, 1):
            here = missing & tier.pool.cached(keys)
            where[here] = at
            missing &= ~here
        return where

    def _step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.settle(
            Receipt(transfer.id, FIRST_RANK, Outcome.OK) for transfer in plan.transfers
        )


ALL_KNOWING = "all-knowing"
"""Policy name of the bound: a policy that knows the future."""


@dataclass(frozen=True)
class Trial:
    """One policy at one capacity: blocks per tier, host first. ``write`` is ``tier_write``."""

    policy: str
    capacity: TierHits
    write: str = "spill"
    tier_policy: str = DEFAULT_TIER_POLICY


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The trials, the files of their trace, and options. Plain data that can be sent to processes.

    Partial last blocks are looked up, but stored only with ``keep_partial``. For a share ``hints``
    of the conversations, hints from the trace's future tell the policy whether they continue.
    """

    paths: tuple[Path, ...]
    trials: tuple[Trial, ...]
    block_tokens: int | None = None
    keep_partial: bool = False
    hints: float = 0.0
    bound: bool = True
    jobs: int = 0


PREFILL_SECONDS = 50e-6
"""Seconds to compute a prompt token: 20,000 tokens a second, as a model of 8 billion weights on one
card does. The reported seconds saved use this and ``LOAD_SECONDS``."""
LOAD_SECONDS = 2.6e-6
"""Seconds to load the KV of a token: 128 KiB at 50 GB/s."""


@dataclass(eq=False)
class Score:
    """The results of one trial.

    ``hits`` has the blocks found on each tier, host first. A block counts if all blocks before it
    in its request were found too.
    """

    trial: Trial
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hits: list[int] = field(default_factory=list)
    stored: int = 0
    evicted: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, tokens: int, hits: TierHits, block_tokens: int) -> None:
        """Count one request."""
        self.requests += 1
        self.blocks += blocks
        self.tokens += tokens
        self.hit_tokens += min(sum(hits) * block_tokens, tokens)
        self.hits += [0] * (len(hits) - len(self.hits))
        for tier, count in enumerate(hits):
            self.hits[tier] += count

    @property
    def hit_ratio(self) -> float:
        """Share of the looked-up blocks that hit."""
        return sum(self.hits) / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Share of the prompt tokens that need no compute."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def seconds_saved(self) -> float:
        """Seconds of prefill saved, less the seconds of the loads that replace it."""
        return self.hit_tokens * (PREFILL_SECONDS - LOAD_SECONDS)

    def as_data(self) -> dict[str, Any]:
        """Return the results as data for JSON."""
        return {
            "policy": self.trial.policy,
            "tier_policy": self.trial.tier_policy if len(self.trial.capacity) > 1 else None,
            "capacity_blocks": list(self.trial.capacity),
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": sum(self.hits),
            "hit_blocks_by_tier": list(self.hits),
            "hit_ratio": round(self.hit_ratio, 5),
            "tokens": self.tokens,
            "tokens_saved": self.hit_tokens,
            "token_ratio": round(self.token_ratio, 5),
            "seconds_saved": round(self.seconds_saved, 3),
            "stored": self.stored,
            "evicted": self.evicted,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class TraceSize:
    """The size of a trace, and the errors in its lines."""

    block_tokens: int
    num_requests: int
    num_blocks: int
    num_tokens: int
    seconds: float
    num_bad: int
    num_late: int
    complaints: tuple[str, ...]


FutureHints = list[Evidence | None]
"""For each request, a hint derived from the trace's future, or None."""


def _reader(simulation: Simulation) -> TraceReader:
    return TraceReader(simulation.paths, block_tokens=simulation.block_tokens)


def measure_trace(simulation: Simulation) -> TraceSize:
    """Read the whole trace; count its requests, blocks, tokens and invalid lines."""
    reader = _reader(simulation)
    num_requests = num_blocks = num_tokens = 0
    first = last = 0.0
    for request in reader:
        first = request.at if not num_requests else first
        last = request.at
        num_requests += 1
        num_blocks += len(request.numbers)
        num_tokens += request.input_tokens
    return TraceSize(
        reader.block_tokens,
        num_requests,
        num_blocks,
        num_tokens,
        last - first,
        reader.num_bad,
        reader.num_late,
        tuple(reader.complaints),
    )


def future_hints(simulation: Simulation) -> FutureHints:
    """Derive hints from the trace's future for a random share of the conversations."""
    uses = PreviousUses.of(_reader(simulation))
    conversation, next_request = uses.continuations()
    within = (uses.times[next_request] - uses.times).astype(np.float32)
    hints: FutureHints = [
        Evidence(ended=True) if then < 0 else Evidence(continues=True, within=seconds)
        for then, seconds in zip(next_request.tolist(), within.tolist(), strict=True)
    ]
    # A digest draws the same conversations in every process and with every version of numpy.
    drawn = [blake2b(b"0/%d" % each, digest_size=8).digest() for each in conversation.tolist()]
    most = simulation.hints * 2**64
    return [
        each if int.from_bytes(digest, "little") < most else None
        for each, digest in zip(hints, drawn, strict=True)
    ]


def _replay(trial: Trial, block_tokens: int) -> PoolReplay | SchedulerReplay:
    policy = policy_named(trial.policy)
    if len(trial.capacity) == 1:
        return PoolReplay(trial.capacity[0], policy)
    return SchedulerReplay(
        trial.capacity,
        policy,
        policy_named(trial.tier_policy),
        write=trial.write,
        block_tokens=block_tokens,
    )


def run_trials(
    simulation: Simulation,
    trials: Sequence[Trial],
    size: TraceSize,
    hints: FutureHints | None,
) -> list[Score]:
    """Replay every request of the trace in each trial. Returns the trials' scores."""
    replays = [_replay(trial, size.block_tokens) for trial in trials]
    scores = [Score(trial) for trial in trials]
    for at, request in enumerate(_reader(simulation)):
        keys, num_blocks = request.keys(), len(request.numbers)
        storable = num_blocks if simulation.keep_partial else request.num_full
        evidence = (hints[at] if hints else None) or evidence_of(request.hints)
        for replay, score in zip(replays, scores, strict=True):
            began = time.thread_time()
            hits = replay.serve(keys, storable, request.at, evidence, request.input_tokens)
            score.seconds += time.thread_time() - began
            score.add(num_blocks, request.input_tokens, hits, size.block_tokens)
    for replay, score in zip(replays, scores, strict=True):
        score.stored, score.evicted = replay.stored, replay.evicted
    return scores


def run_bound(simulation: Simulation, bounds: Sequence[Trial], size: TraceSize) -> list[Score]:
    """Score a policy that knows the future, at each capacity."""
    sizes: list[tuple[int, int]] = []

    def noted() -> Iterator[TraceRequest]:
        for request in _reader(simulation):
            sizes.append((len(request.numbers), request.input_tokens))
            yield request

    uses = PreviousUses.of(noted(), keep_partial=simulation.keep_partial)
    scores = [Score(trial) for trial in bounds]
    for score in scores:
        began = time.perf_counter()
        for at, hits in enumerate(clairvoyant_hits(uses, sum(score.trial.capacity)).tolist()):
            score.add(*sizes[at], (hits,), size.block_tokens)
        score.seconds = time.perf_counter() - began
    return scores


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The trace's size, the score of each trial, and the score of the bound at each capacity."""

    trace: TraceSize
    scores: tuple[Score, ...]
    bounds: tuple[Score, ...]


def simulate(simulation: Simulation) -> SimulationResult:
    """Run every trial. Raises InputError if there is no trial or no request to simulate."""
    if not simulation.trials:
        raise InputError("nothing to try: name a policy and a capacity")
    size = measure_trace(simulation)
    if not size.num_requests:
        first = f" ({size.complaints[0]})" if size.complaints else ""
        raise InputError(f"there is no request to simulate in {simulation.paths[0]}{first}")
    hints = future_hints(simulation) if simulation.hints else None
    sums = dict.fromkeys(sum(trial.capacity) for trial in simulation.trials if simulation.bound)
    bounds = [Trial(ALL_KNOWING, (capacity,)) for capacity in sums]  # its tiers count as one
    jobs = min(simulation.jobs or os.cpu_count() or 1, len(simulation.trials) + bool(bounds))
    if jobs > 1:
        scores, best = _run_in_processes(simulation, size, hints, bounds, jobs)
    else:
        scores = run_trials(simulation, simulation.trials, size, hints)
        best = run_bound(simulation, bounds, size) if bounds else []
    order = {trial: at for at, trial in enumerate(simulation.trials)}
    scores.sort(key=lambda score: order[score.trial])
    return SimulationResult(size, tuple(scores), tuple(best))


def _run_in_processes(
    simulation: Simulation,
    size: TraceSize,
    hints: FutureHints | None,
    bounds: Sequence[Trial],
    jobs: int,
) -> tuple[list[Score], list[Score]]:
    """Run the trials and the bound in ``jobs`` processes. Each process reads the trace itself."""
    context = get_context("spawn")
    shares = [simulation.trials[at::jobs] for at in range(jobs) if simulation.trials[at::jobs]]
    with ProcessPoolExecutor(jobs, context, initializer=_exit_with_parent) as pool:
        parts: list[Future[list[Score]]] = [
            pool.submit(run_trials, simulation, share, size, hints) for share in shares
        ]
        best = [pool.submit(run_bound, simulation, bounds, size)] if bounds else []
        try:
            for ended in wait([*parts, *best], return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        scores, bound = (
            list(chain.from_iterable(each.result() for each in some)) for some in (parts, best)
        )
        return scores, bound


def _exit_with_parent() -> None:
    """Prepare a child process: it exits when its parent does, even if the parent is killed."""

    def end_with_parent() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
