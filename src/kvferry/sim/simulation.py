"""Runs trials over a trace, shared among processes. All trials see the same requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Promise
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.replay import PoolReplay, Tokens
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.settings.eviction import DEFAULT_TIER_POLICY
from kvferry.sim.bounds import Future, all_knowing
from kvferry.sim.replay import SchedulerReplay
from kvferry.telemetry.traces import TraceReader, TraceRequest

Progress = Callable[[float], None]
"""Receives the share of the work that is done, 0 to 1."""

_REPORT_EVERY = 256
_PROGRESS_SECONDS = 0.2
_shared: Any = None
"""In a child process: the requests served by each process."""

Capacity = tuple[int, ...]
"""Blocks of each tier, host memory first."""

ALL_KNOWING = "all-knowing"
"""The policy name of the bound."""

HALVES = ("first half", "second half")


@dataclass(frozen=True)
class Trial:
    """One policy at one capacity. ``write`` is how blocks reach the tiers below the host."""

    policy: str
    capacity: Capacity
    write: str = "spill"
    tier_policy: str = DEFAULT_TIER_POLICY


@dataclass(frozen=True)
class TracePart:
    """The part of a trace to simulate, in shares of its requests or in seconds."""

    start_share: float = 0.0
    end_share: float = 1.0
    start_seconds: float = 0.0
    end_seconds: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The trials, their trace and the rules. Plain data, so that it travels to other processes.

    Partial last blocks are looked up, and stored only with ``keep_partial``. For a ``hints`` share
    of the conversations the policy learns from the trace's future whether they continue. ``halves``
    also counts each half of the requests.
    """

    paths: tuple[Path, ...]
    trials: tuple[Trial, ...]
    block_tokens: int | None = None
    strict: bool = False
    keep_partial: bool = False
    hints: float = 0.0
    seed: int = 0
    span: TracePart = field(default_factory=TracePart)
    halves: bool = False
    bound: bool = True
    jobs: int = 0


@dataclass(eq=False)
class Tally:
    """Counts over some requests.

    ``hits`` are the blocks found on each tier, nearest first. A block counts if all blocks before
    it in its request were found too.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hits: list[int] = field(default_factory=list)

    def add(self, blocks: int, tokens: int, hits: Capacity, hit_tokens: int) -> None:
        """Count one request."""
        self.requests += 1
        self.blocks += blocks
        self.tokens += tokens
        self.hit_tokens += hit_tokens
        self.hits += [0] * (len(hits) - len(self.hits))
        for tier, count in enumerate(hits):
            self.hits[tier] += count

    @property
    def hit_ratio(self) -> float:
        """Blocks found of all blocks looked up."""
        return sum(self.hits) / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Share of the prompt tokens that need no compute."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def as_data(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": sum(self.hits),
            "hit_blocks_by_tier": list(self.hits),
            "hit_ratio": round(self.hit_ratio, 5),
            "tokens": self.tokens,
            "tokens_saved": self.hit_tokens,
            "token_ratio": round(self.token_ratio, 5),
        }


@dataclass(eq=False)
class Score:
    """The figures of one trial: of all requests, and of each half of them if asked for."""

    trial: Trial
    whole: Tally = field(default_factory=Tally)
    parts: dict[str, Tally] = field(default_factory=dict)
    stored: int = 0
    evicted: int = 0
    seconds: float = 0.0

    def add(
        self, share: float, blocks: int, tokens: int, hits: Capacity, block_tokens: int
    ) -> None:
        """Count one request at this share of the trace."""
        saved = min(sum(hits) * block_tokens, tokens)
        self.whole.add(blocks, tokens, hits, saved)
        if self.parts:
            self.parts[HALVES[share >= 0.5]].add(blocks, tokens, hits, saved)

    def as_data(self) -> dict[str, Any]:
        return {
            "policy": self.trial.policy,
            "tier_policy": self.trial.tier_policy if len(self.trial.capacity) > 1 else None,
            "capacity_blocks": list(self.trial.capacity),
            **self.whole.as_data(),
            "stored": self.stored,
            "evicted": self.evicted,
            "seconds": round(self.seconds, 3),
            "parts": {name: tally.as_data() for name, tally in self.parts.items()},
        }


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


@dataclass(frozen=True, eq=False)
class Simulated:
    """The trace, a score for each trial, and a score of the bound for each capacity."""

    trace: Counted
    scores: tuple[Score, ...]
    bounds: tuple[Score, ...]


def simulate(asked: Simulation, progress: Progress = lambda share: None) -> Simulated:
    """Run every trial. Raises InputError if the trace has no request to simulate."""
    if not asked.trials:
        raise InputError("nothing to try: name a policy and a capacity")
    counted = count(asked)
    if not counted.num_requests:
        first = f" ({counted.complaints[0]})" if counted.complaints else ""
        raise InputError(f"there is no request to simulate in {asked.paths[0]}{first}")
    foretold = foretell(asked, counted) if asked.hints else None
    bounds = _bounds(asked.trials) if asked.bound else ()
    jobs = min(asked.jobs or os.cpu_count() or 1, len(asked.trials) + bool(bounds))
    if jobs > 1:
        scores, best = _together(asked, counted, foretold, bounds, jobs, progress)
    else:
        total = counted.num_requests * len(asked.trials)
        scores = run_trials(asked, asked.trials, counted, foretold, lambda n: progress(n / total))
        best = run_bound(asked, bounds, counted) if bounds else []
    order = {trial: at for at, trial in enumerate(asked.trials)}
    scores.sort(key=lambda score: order[score.trial])
    return Simulated(counted, tuple(scores), tuple(best))


def _bounds(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """One trial for each capacity, with all tiers as one."""
    sums = dict.fromkeys(sum(trial.capacity) for trial in trials)
    return tuple(Trial(ALL_KNOWING, (capacity,)) for capacity in sums)


def _together(
    asked: Simulation,
    counted: Counted,
    foretold: Foretold | None,
    bounds: Sequence[Trial],
    jobs: int,
    progress: Progress,
) -> tuple[list[Score], list[Score]]:
    """Deal the trials out to processes. Each reads the trace by itself."""
    context = get_context("spawn")
    hands = [asked.trials[at::jobs] for at in range(jobs) if asked.trials[at::jobs]]
    done = context.Array("q", len(hands), lock=False)
    total = counted.num_requests * len(asked.trials)
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(done,)) as pool:
        parts: list[Promise[list[Score]]] = [
            pool.submit(_work, asked, hand, counted, foretold, at) for at, hand in enumerate(hands)
        ]
        best = pool.submit(run_bound, asked, bounds, counted) if bounds else None
        try:
            waiting = {*parts, *([best] if best is not None else [])}
            while waiting:
                waiting = wait(waiting, _PROGRESS_SECONDS).not_done
                progress(sum(done) / total)
                broken = [each for each in parts if each.done() and each.exception()]
                if broken:
                    broken[0].result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        scores = list(chain.from_iterable(part.result() for part in parts))
        return scores, best.result() if best is not None else []


def _begin(done: Any) -> None:
    """Prepare a child process. It ends with its parent, however that ends."""
    global _shared
    _shared = done

    def end_with_parent() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(
    asked: Simulation,
    trials: Sequence[Trial],
    counted: Counted,
    foretold: Foretold | None,
    at: int,
) -> list[Score]:
    def report(num_served: int) -> None:
        _shared[at] = num_served

    return run_trials(asked, trials, counted, foretold, report)
