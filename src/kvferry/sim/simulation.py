"""Runs trials over a trace: all see the same requests, and several processes share the work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from kvferry.errors import InputError
from kvferry.sim.serving import (
    ALL_KNOWING,
    Counted,
    Foretold,
    TracePart,
    count,
    foretell,
    run_bound,
    run_trials,
)
from kvferry.sim.trials import Score, Trial

Progress = Callable[[float], None]
"""Told how much of the work is done, 0 to 1."""

_LOOK_SECONDS = 0.2
_shared: Any = None
"""In a process of ours: how much each has done."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What to try, on which trace, and how. Plain data: it travels to other processes.

    Partial last blocks are asked for and never stored, unless ``keep_partial``. Of a ``hints``
    share of the conversations the policy is told whether they go on, from the trace's future.
    ``span`` cuts the trace; ``halves`` counts each half of what is left by itself, too.
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


@dataclass(frozen=True, eq=False)
class Simulated:
    """What came of it: the trace as it was read, a score for each trial, and the bound's."""

    trace: Counted
    scores: tuple[Score, ...]
    bounds: tuple[Score, ...]


def simulate(asked: Simulation, progress: Progress = lambda share: None) -> Simulated:
    """Run every trial. InputError where the trace is none, or nothing is left of it."""
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
    """One for each capacity: all tiers together, as if they were one."""
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
    """The trials dealt out to processes, each of which reads the trace by itself."""
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
                waiting = wait(waiting, _LOOK_SECONDS).not_done
                progress(sum(done) / total)
                broken = [each for each in parts if each.done() and each.exception()]
                if broken:
                    broken[0].result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _end(pool)
            raise
        scores = list(chain.from_iterable(part.result() for part in parts))
        return scores, best.result() if best is not None else []


def _end(pool: ProcessPoolExecutor) -> None:
    """Nobody wants the result any more (Ctrl-C, a fault): end the processes that we started."""
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _begin(done: Any) -> None:
    global _shared
    _shared = done
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Whoever wanted the result was killed: nobody would ever end this process otherwise."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(
    asked: Simulation,
    trials: Sequence[Trial],
    counted: Counted,
    foretold: Foretold | None,
    at: int,
) -> list[Score]:
    def tell(num: int) -> None:
        _shared[at] = num

    return run_trials(asked, trials, counted, foretold, tell)
