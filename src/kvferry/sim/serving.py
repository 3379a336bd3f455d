"""One pass over a trace that serves every request to every trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence, policy_named
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.replay import NO_TOKENS, PoolReplay, Tokens
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.hints import Hints
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.sim.bounds import Future, all_knowing
from kvferry.sim.trials import HALVES, Capacity, Score, Simulation, Tally, TracePart, Trial
from kvferry.telemetry.traces import TraceReader, TraceRequest
from kvferry.types import FIRST_RANK, MatchState, Outcome, Receipt, TierName

_MOST_STEPS = 1000
"""A request computes its blocks if their promotion takes more steps."""


class SchedulerReplay:
    """Host memory and the tiers below it. Owns a scheduler, its pools and their clock.

    Transfers take no time: a block spilled in one step is on its tier in the next, and a promotion
    brings as many blocks as the host has room for.
    """

    def __init__(
        self,
        capacity: Capacity,
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
            config=Config(load_policy="always", memory_curve="off"),
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
        tokens: Tokens = NO_TOKENS,
    ) -> Capacity:
        self._now = at
        where = self._where(keys)
        hints = None
        if evidence is not None:
            hints = Hints(
                ended=evidence.ended, continues=evidence.continues, within=evidence.within
            )
        request = self.scheduler.open("", keys, hints)
        match = request.match()
        for _ in range(_MOST_STEPS):
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
        """The nearest tier of each block. 0 is the host, and stands for missing blocks too."""
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


_REPORT_EVERY = 256


@dataclass(frozen=True)
class Counted:
    """The size of a trace, and the complaints about its lines."""

    format: str
    block_tokens: int
    num_all: int
    num_requests: int
    num_blocks: int
    num_tokens: int
    seconds: float
    num_bad: int
    num_late: int
    complaints: tuple[str, ...]


Foretold = tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]
"""For each request no hint (0), it ended (1) or it continues (2), and the seconds until then."""


def _reader(asked: Simulation) -> TraceReader:
    return TraceReader(asked.paths, block_tokens=asked.block_tokens, strict=asked.strict)


def _chosen(reader: TraceReader, span: TracePart, num_all: int) -> Iterator[TraceRequest]:
    first, end = round(span.start_share * num_all), round(span.end_share * num_all)
    for at, request in enumerate(reader):
        if first <= at < end and span.start_seconds <= request.at < span.end_seconds:
            yield request


def count(asked: Simulation) -> Counted:
    """Read the whole trace and count it."""
    reader = _reader(asked)
    num_all = sum(1 for _ in reader)
    num_requests = num_blocks = num_tokens = 0
    first = last = 0.0
    for request in _chosen(reader, asked.span, num_all):
        first = request.at if not num_requests else first
        last = request.at
        num_requests += 1
        num_blocks += len(request.numbers)
        num_tokens += request.input_tokens
    return Counted(
        reader.format,
        reader.block_tokens,
        num_all,
        num_requests,
        num_blocks,
        num_tokens,
        last - first,
        reader.num_bad,
        reader.num_late,
        tuple(reader.complaints),
    )


def foretell(asked: Simulation, counted: Counted) -> Foretold:
    """Hints for a random share of the conversations."""
    future = Future.of(_chosen(_reader(asked), asked.span, counted.num_all))
    conversation, next_request = future.continuations()
    hinted = np.array([_drawn(asked.seed, each) < asked.hints for each in conversation.tolist()])
    continues = next_request >= 0
    kinds = np.where(hinted, np.where(continues, 2, 1), 0).astype(np.int8)
    within = np.where(continues, future.times[next_request] - future.times, 0)
    return kinds, within.astype(np.float32)


def _drawn(seed: int, conversation: int) -> float:
    """A number from 0 to 1, the same for the same conversation in every process."""
    digest = blake2b(b"%d/%d" % (seed, conversation), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


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
    asked: Simulation,
    trials: Sequence[Trial],
    counted: Counted,
    foretold: Foretold | None,
    report: Callable[[int], None],
) -> list[Score]:
    """Serve every request of the trace to each trial. ``report`` receives the number served."""
    replays = [_replay(trial, counted.block_tokens) for trial in trials]
    scores = _scores(asked, trials)
    at = -1
    for at, request in enumerate(_chosen(_reader(asked), asked.span, counted.num_all)):
        keys, num_blocks = request.keys(), len(request.numbers)
        storable = num_blocks if asked.keep_partial else request.num_full
        evidence = _evidence(request, at, foretold)
        tokens = Tokens(request.input_tokens, request.output_tokens)
        share = at / counted.num_requests
        for replay, score in zip(replays, scores, strict=True):
            began = time.thread_time()
            hits = replay.serve(keys, storable, request.at, evidence, tokens)
            score.seconds += time.thread_time() - began
            score.add(share, num_blocks, request.input_tokens, hits, counted.block_tokens)
        if at % _REPORT_EVERY == 0:
            report((at + 1) * len(trials))
    report((at + 1) * len(trials))
    for replay, score in zip(replays, scores, strict=True):
        score.stored, score.evicted = replay.stored, replay.evicted
    return scores


def _scores(asked: Simulation, trials: Sequence[Trial]) -> list[Score]:
    halves = HALVES if asked.halves else ()
    return [Score(trial, parts={name: Tally() for name in halves}) for trial in trials]


def _evidence(request: TraceRequest, at: int, foretold: Foretold | None) -> Evidence | None:
    """The hints of a request: from the trace's future, else from the trace itself."""
    if foretold is not None and foretold[0].item(at):
        continues = foretold[0].item(at) == 2
        within = foretold[1].item(at) if continues else None
        return Evidence(ended=not continues, continues=continues, within=within)
    hints: Hints | None = request.hints
    if hints is None or not (hints.ended or hints.continues):
        return None
    return Evidence(ended=hints.ended, continues=hints.continues, within=hints.within)


def run_bound(asked: Simulation, bounds: Sequence[Trial], counted: Counted) -> list[Score]:
    """The hits of a policy that knows the future, at each capacity."""
    sizes: list[tuple[int, int]] = []

    def noted() -> Iterator[TraceRequest]:
        for request in _chosen(_reader(asked), asked.span, counted.num_all):
            sizes.append((len(request.numbers), request.input_tokens))
            yield request

    future = Future.of(noted(), keep_partial=asked.keep_partial)
    scores = _scores(asked, bounds)
    for score in scores:
        began = time.perf_counter()
        for at, hits in enumerate(all_knowing(future, sum(score.trial.capacity)).tolist()):
            share = at / counted.num_requests
            score.add(share, *sizes[at], (hits,), counted.block_tokens)
        score.seconds = time.perf_counter() - began
    return scores
