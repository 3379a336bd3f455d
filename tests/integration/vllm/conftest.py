"""Tests with a real vLLM on the CPU: run in an environment of their own, see the Makefile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm import models
from tests.integration.vllm.engine import Engine

if util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

# One process: an engine starts in two seconds, and every step can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_gemma(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines, one at a time, and ends the last one."""
    running: list[Engine] = []

    def end() -> None:
        while running:
            running.pop().close()

    def begin(model: Path, **options: Any) -> Engine:
        end()
        running.append(Engine(model, **options))
        return running[-1]

    yield begin
    end()
