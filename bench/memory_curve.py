"""What the estimate of other memory sizes is worth, and what it costs the engine's thread.

::

    python bench/memory_curve.py trace.jsonl --blocks 3000 10000

The estimate comes from sampled blocks in small pools; beside it stands what pools of the real sizes
hit on the same trace. The cost is the processor time that the scheduler's thread spends on handing
requests over, as a share of all it does for them. Without a trace it makes one up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from kvferry.cache.policies import policy_named
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.replay import PoolReplay, Tokens
from kvferry.config import Config
from kvferry.scheduler.scheduler import Scheduler
from kvferry.telemetry.observer import TIMES, MemoryCurve, ObservedRequest, TierSizes
from kvferry.telemetry.traces import TraceReader, TraceRequest
from kvferry.types import FIRST_RANK, Outcome, Receipt
from simulate_speed import write


def errors(requests: list[TraceRequest], policy: str, blocks: int, block_tokens: int) -> None:
    tier = TierSizes("host", tuple(blocks * times for times in TIMES))
    curve = MemoryCurve([tier], policy_named(policy), block_tokens=block_tokens)
    began = time.thread_time()
    for each in requests:
        seen = ObservedRequest(
            each.at, each.keys(), each.num_full, each.input_tokens, 0, each.hints
        )
        seen.answer_tokens = each.output_tokens
        curve.learn(seen)
    cost = (time.thread_time() - began) / len(requests) * 1e6
    curve.idle()
    told = curve.points["host"]
    tokens = sum(each.input_tokens for each in requests)
    row = []
    for times in TIMES:
        whole = PoolReplay(round(blocks * times), policy_named(policy))
        hits = sum(
            whole.serve(
                each.keys()[: each.num_full],
                each.num_full,
                each.at,
                None,
                Tokens(each.input_tokens, each.output_tokens),
            )[0]
            for each in requests
        )
        real = hits * block_tokens / tokens
        row.append(f"{told[times]:.3f} ({real:.3f})")
    print(f"| {policy} | {blocks:,} | {' | '.join(row)} | {cost:.0f} |", flush=True)


def serve(scheduler: Scheduler, each: TraceRequest, block_tokens: int, num_steps: int) -> None:
    """What an engine's hooks do for one request that answers with so many tokens."""
    keys = each.keys()
    request = scheduler.open("bench", keys)
    match = request.match()
    table = np.arange(len(keys))
    if match.to_load:
        request.load([table])
    request.store([table], each.num_full * block_tokens)
    for _ in range(num_steps):
        plan = scheduler.plan()
        scheduler.settle(Receipt(one.id, FIRST_RANK, Outcome.OK) for one in plan.transfers)
    request.end()


class Timed:
    """A call, and what processor time each took, as the clock has it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call
        self.seconds: list[float] = []

    def __call__(self, *arguments: object) -> None:
        began = time.thread_time()
        self.call(*arguments)
        self.seconds.append(time.thread_time() - began)

    @property
    def median(self) -> float:
        return median(self.seconds)


def nothing(*arguments: object) -> None:
    """What the clock and the call to it take: timed at the same place, as often."""


def overhead(requests: list[TraceRequest], blocks: int, block_tokens: int, num_steps: int) -> None:
    config = Config(load_policy="always")
    scheduler = Scheduler(Pool(blocks), (FullAttention(block_tokens),), config=config)
    scheduler.watch_requests()
    watched = scheduler.book._observing
    assert watched is not None
    answered, clock = Timed(watched.answered), Timed(nothing)

    def both(*arguments: object) -> None:
        # Whichever is second finds the caches warm: they take turns.
        calls = (answered, clock) if len(clock.seconds) % 2 else (clock, answered)
        for call in calls:
            call(*arguments)

    watched.answered = both  # type: ignore[assignment,method-assign]
    whole = Timed(serve)
    for each in requests:
        whole(scheduler, each, block_tokens, num_steps)
    scheduler.close()
    spent = max(0.0, answered.median - clock.median)
    all_of_it = whole.median - answered.median - clock.median + spent
    print(
        f"On the scheduler's thread, for a request with {num_steps} tokens of answer, medians: "
        f"{spent * 1e6:.2f} us of {all_of_it * 1e6:.0f} us, {spent / all_of_it:.2%} "
        f"(with what timing it takes {answered.median * 1e6:.2f} us)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3000])
    parser.add_argument("--policies", default="lru")
    parser.add_argument(
        "--answer", type=int, nargs="+", default=[1, 20, 100, 300], help="tokens, so steps"
    )
    parser.add_argument("--requests", type=int, default=3000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace
        if path is None:
            path = Path(folder, "made.jsonl")
            write(path, arguments.requests)
        reader = TraceReader([path])
        requests = list(reader)
    for num_steps in arguments.answer:
        overhead(requests[:1000], arguments.blocks[0], reader.block_tokens, num_steps)
    print("\nShare of prompt tokens, as estimated (as simulated), and the estimate's cost")
    sizes = " | ".join(f"{times:g} x" for times in TIMES)
    print(f"| policy | blocks | {sizes} | us a request |")
    print(f"|---|---|{'---|' * len(TIMES)}---|")
    for policy in arguments.policies.split(","):
        for blocks in arguments.blocks:
            errors(requests, policy, blocks, reader.block_tokens)


if __name__ == "__main__":
    main()
