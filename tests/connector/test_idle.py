"""A connector that serves nothing says so on vLLM's metrics: why, and at most once a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.sides import Sides, hashes_of, request_of

from kvferry.connectors.common.messages import RankShape
from kvferry.connectors.common.reports import SEPARATOR, Figures
from kvferry.connectors.common.session import SchedulerSession
from kvferry.telemetry.catalog import IDLE, IDLE_REASONS, INFO, LOOKUPS
from kvferry.types import Rank


@pytest.fixture
def sides(make_sides: Callable[..., Sides]) -> Sides:
    return make_sides(["layer0"], ["layer1"])


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr("kvferry.connectors.common.session.time.monotonic", lambda: clock[0])
    return clock


def told(figures: Figures | None) -> dict[str, float]:
    assert figures is not None
    return {reason: figures[SEPARATOR.join((IDLE.name, reason))] for reason in IDLE_REASONS}


def idle_side(sides: Any, refusal: str = "") -> SchedulerSession:
    """Another scheduler's side of the same server, which has heard no rank yet."""
    side = SchedulerSession(replace(sides.side.setup, refusal=refusal))
    side.bind(sides.side._make_engine)
    return side


def test_a_model_that_is_refused(sides, now):
    side = idle_side(sides, "prefix caching is off")
    figures = side.take_stats()
    assert told(figures) == {"refused": 1.0, "failed": 0.0}
    assert any(key.startswith(INFO.name) for key in figures or ())
    assert side.take_stats() is None
    now[0] += 0.9
    assert side.take_stats() is None
    now[0] += 0.2
    assert told(side.take_stats()) == {"refused": 1.0, "failed": 0.0}
    assert side.take_stats() is None
    assert side.banner() == "kvferry is idle: prefix caching is off"


def test_a_rank_that_refuses(sides, now):
    side = idle_side(sides)
    side.meet_ranks([sides.ranks[0].shape])
    assert side.take_stats() is None, "it may yet serve"
    assert side.idle_reason == "1 of 2 ranks were heard"
    side.meet_ranks([RankShape(Rank(1), refusal="no host memory")])
    assert told(side.take_stats()) == {"refused": 1.0, "failed": 0.0}
    assert side.idle_reason == "rank 1: no host memory"
    assert side.match(request_of("r", hashes_of(1)), 0) == 0


def test_one_that_vllm_has_not_bound_its_pool_to(sides):
    side = SchedulerSession(sides.side.setup)
    side.meet_ranks([rank.shape for rank in sides.ranks])
    assert side.idle_reason == "the engine has not bound its block pool"
    assert side.take_stats() is None
    side.bind(sides.side._make_engine)
    assert side.idle_reason == ""
    side.close()


def test_one_that_has_failed(sides, now):
    sides.end(sides.compute("r", hashes_of(1)))
    sides.rest()
    serving = sides.side.take_stats()
    assert told(serving) == {"refused": 0.0, "failed": 0.0}
    assert serving[LOOKUPS.name] == 1.0
    sides.side._trip("test", RuntimeError("a mistake"))
    assert told(sides.side.take_stats()) == {"refused": 0.0, "failed": 1.0}
    assert sides.side.take_stats() is None
    now[0] += 1.1
    assert told(sides.side.take_stats()) == {"refused": 0.0, "failed": 1.0}


def test_one_that_was_refused_and_then_fails_has_failed(sides, now):
    side = idle_side(sides, "prefix caching is off")
    side.guard.trip("test", RuntimeError("a mistake"))
    assert told(side.take_stats()) == {"refused": 0.0, "failed": 1.0}
