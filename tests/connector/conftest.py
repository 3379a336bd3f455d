"""The connector's two sides, in an environment with vLLM: see the Makefile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.memory_tiers import MemoryTier

from kvferry.tiers import memory

if util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True)
def stores_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests here are short: without this none would store while it runs."""
    monkeypatch.setattr("kvferry.scheduler.stores.STORE_TOKENS", 256)


@pytest.fixture(autouse=True)
def faulty_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers of memory that settings open can fail on request."""
    monkeypatch.setattr(memory, "MemoryTier", MemoryTier)


@pytest.fixture
def make_sides(no_leaked_threads: None) -> Iterator[Callable[..., Any]]:
    """Makes sides, and ends them."""
    from tests.fakes.sides import Sides

    made: list[Sides] = []

    def begin(*stages: Any, **options: Any) -> Sides:
        made.append(Sides(*stages, **options))
        return made[-1]

    yield begin
    for sides in made:
        sides.close()
