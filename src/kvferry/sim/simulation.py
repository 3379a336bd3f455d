"""Runs trials over a trace, shared among processes. All trials see the same requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context, parent_process
from typing import Any

from kvferry.errors import InputError
from kvferry.sim.serving import Counted, Foretold, count, foretell, run_bound, run_trials
from kvferry.sim.trials import ALL_KNOWING, Score, Simulation, Trial

Progress = Callable[[float], None]
"""Receives the share of the work that is done, 0 to 1."""

_PROGRESS_SECONDS = 0.2
_shared: Any = None
"""In a child process: the requests served by each process."""


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
