"""How long vLLM spends in a connector's hooks, and what each thread has of the processor.

A hook's time on the clock is more than its time on the processor by what its thread waited for: the
interpreter, which another thread has (the GIL), or the processor (``queued_seconds``).
"""

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
        "on_new_request",
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
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "build_connector_worker_meta",
    ),
}

Times = dict[str, list[tuple[float, float]]]


@contextmanager
def timed_hooks(engine: Engine) -> Iterator[Times]:
    """Seconds of every call on the clock and on the processor, by side and hook."""
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
                    setattr(connector, name, _timed(hook, calls))
                    wrapped.append((connector, name))
    try:
        yield times
    finally:
        for connector, name in wrapped:
            delattr(connector, name)  # the class's own shows again


def _timed(hook: Callable[..., Any], calls: list[tuple[float, float]]) -> Callable[..., Any]:
    clock, processor = time.perf_counter, time.thread_time

    def timed(*args: Any, **kwargs: Any) -> Any:
        began, worked = clock(), processor()
        try:
            return hook(*args, **kwargs)
        finally:
            calls.append((clock() - began, processor() - worked))

    return timed


def thread_seconds() -> dict[str, float]:
    """The processor time of every thread that Python knows, and of all others together."""
    tick = os.sysconf("SC_CLK_TCK")
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        name = names.get(int(task), "not Python's")
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found


def queued_seconds() -> float:
    """How long this thread was ready to run and had no processor, so far."""
    with open("/proc/thread-self/schedstat", encoding="utf-8") as file:
        return int(file.read().split()[1]) / 1e9


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Per hook: calls, seconds on the clock and on the processor, the longest."""
    return {
        name: {
            "calls": len(calls),
            "seconds": sum(seconds for seconds, _ in calls),
            "worked": sum(worked for _, worked in calls),
            "longest": max(seconds for seconds, _ in calls),
        }
        for name, calls in times.items()
        if calls
    }
