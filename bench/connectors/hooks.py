"""How long vLLM spends in a connector's hooks: in the scheduler's and in the worker's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from connectors.engine import Engine

HOOKS = {
    "scheduler": (
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "request_finished_all_groups",
        "has_pending_push_work",
        "take_events",
        "get_kv_connector_stats",
    ),
    "worker": (
        "handle_preemptions",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "build_connector_worker_meta",
    ),
}

Times = dict[str, list[float]]


@contextmanager
def timed_hooks(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Iterator[Times]:
    """Seconds of every call while this lasts, by side and hook."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    times: Times = {}
    wrapped: list[tuple[Any, str]] = []
    if has_kv_transfer_group():
        sides = {"scheduler": engine.core.scheduler.connector, "worker": get_kv_transfer_group()}
        for side, connector in sides.items():
            for name in HOOKS[side]:
                hook = getattr(connector, name, None)
                if hook is not None:
                    calls = times.setdefault(f"{side}: {name}", [])
                    setattr(connector, name, _timed(hook, calls, clock))
                    wrapped.append((connector, name))
    try:
        yield times
    finally:
        for connector, name in wrapped:
            delattr(connector, name)  # the class's own shows again


def _timed(
    hook: Callable[..., Any], calls: list[float], clock: Callable[[], float]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        try:
            return hook(*args, **kwargs)
        finally:
            calls.append(clock() - began)

    return timed


def thread_seconds() -> dict[str, float]:
    """The processor time of every thread that Python knows, and of all others together."""
    tick = os.sysconf("SC_CLK_TCK")
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        name = names.get(int(task), "not Python's")
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Per hook: calls, seconds in all, the longest."""
    return {
        name: {"calls": len(calls), "seconds": sum(calls), "longest": max(calls)}
        for name, calls in times.items()
        if calls
    }
