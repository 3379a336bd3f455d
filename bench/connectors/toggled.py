"""One engine with its connector's hooks at work, and without: their cost and nothing else.

Engines in two processes never run quite alike, whatever is in them: where their memory lies, when
they were started. Here both kinds of round are of the same engine, in turn::

    rounds    hooks  none  none  hooks  hooks  none …      each kind goes first as often

A step's place in the round says what it does, so steps are compared place by place: the lower
quartile over all rounds of a kind, which a hiccup of the machine does not reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from connectors.engine import Engine

Round = dict[str, Any]


@contextmanager
def without_hooks(engine: Engine) -> Iterator[None]:
    """Nothing of the connector runs while this lasts. Only while it has no request and no copy."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from connectors.idle import IdleConnector  # here: it needs vLLM

    connectors = (engine.core.scheduler.connector, get_kv_transfer_group())
    kinds = [type(connector) for connector in connectors]
    for connector in connectors:
        connector.__class__ = IdleConnector
    try:
        yield
    finally:
        for connector, kind in zip(connectors, kinds, strict=True):
            connector.__class__ = kind


def toggled(
    engine: Engine, rounds: int, *, prepare: Callable[[], None], run: Callable[[int], Round]
) -> dict[str, list[Round]]:
    """``run(number)`` so often with hooks and without; ``prepare`` before each, always with."""
    found: dict[str, list[Round]] = {"hooks": [], "none": []}
    for number in range(rounds):
        kinds = ("hooks", "none") if number % 2 else ("none", "hooks")
        for place, kind in enumerate(kinds):
            prepare()
            with without_hooks(engine) if kind == "none" else nullcontext():
                found[kind].append(run(2 * number + place))
    return found


def by_place(rounds: Sequence[Round]) -> list[float]:
    """The lower quartile of every step's milliseconds; empty if the rounds differ in steps."""
    lengths = {len(one["steps_ms"]) for one in rounds}
    if len(lengths) != 1 or len(rounds) < 2:
        return []
    steps = zip(*(one["steps_ms"] for one in rounds), strict=True)
    return [statistics.quantiles(step, n=4, method="inclusive")[0] for step in steps]
