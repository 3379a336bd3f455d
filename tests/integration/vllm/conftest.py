"""Tests with a real vLLM on the CPU: run in an environment of their own, see the Makefile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm import models
from tests.integration.vllm.engine import Engine
from tests.integration.vllm.reference import Reference

if util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

_MODELS = ("gemma_hits", "gemma", "granite_hits", "granite", "mamba_hits", "mamba", "llama")

# One process: an engine starts in two seconds, and every step can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# One thread that may run anywhere: threads that spin for each other crawl on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Older vLLM name blocks at random in every process otherwise, and nothing outlives one.
os.environ.setdefault("PYTHONHASHSEED", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if "soak" not in item.keywords:  # it has a limit of its own, and runs longer
                item.add_marker(pytest.mark.timeout(300))
    # Tests of one model after the other: an engine takes seconds to start.
    order = {path: at for at, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (order[item.path], _model_of(item)))


def _model_of(item: pytest.Item) -> str:
    if Path(__file__).parent not in item.path.parents:
        return ""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    given = [value for value in parameters.values() if isinstance(value, str)]
    named = {*getattr(item, "fixturenames", ()), *given}
    return next((model for model in _MODELS if model in named), "")


@pytest.fixture(autouse=True)
def stores_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here have short contexts: without this no request would store while it runs."""
    monkeypatch.setattr("kvferry.scheduler.stores.STORE_TOKENS", 256)


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """vLLM leaves threads behind; ours must end with the engine."""
    yield
    give_up = time.monotonic() + 20.0
    while leaked := [t.name for t in threading.enumerate() if t.name.startswith("kvferry-")]:
        assert time.monotonic() < give_up, f"still running: {leaked}"
        time.sleep(0.005)


def _model(name: str) -> Any:
    """A fixture of this name: the folder of a model that ``models`` makes."""

    @pytest.fixture(scope="session", name=name)
    def make(tmp_path_factory: pytest.TempPathFactory) -> Path:
        if name in ("granite", "mamba"):
            _require_float_convolutions()
        folder = tmp_path_factory.mktemp("models") / name
        made: Path = getattr(models, f"make_{name}")(folder)
        return made

    return make


def _hits(name: str) -> Any:
    """The same model, where this vLLM lets kvferry serve more than one group."""

    @pytest.fixture(name=f"{name}_hits")
    def require(request: pytest.FixtureRequest) -> Any:
        _require_several_groups()
        return request.getfixturevalue(name)

    return require


llama, gemma, granite, mamba = map(_model, ("llama", "gemma", "granite", "mamba"))
gemma_hits, granite_hits, mamba_hits = map(_hits, ("gemma", "granite", "mamba"))


def _require_several_groups() -> None:
    from kvferry.connectors.vllm.connector import _RECOMPUTES_REQUESTS

    if not _RECOMPUTES_REQUESTS:
        pytest.skip("this vLLM recovers from failed loads with one group only: kvferry is idle")


def _require_float_convolutions() -> None:
    """Some vLLM pack every convolution for bfloat16 instructions, where the processor has them.

    They then cannot load the tests' small models of float32, with or without kvferry.
    """
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(272, 1, 4), requires_grad=False)
    try:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    except RuntimeError as error:
        pytest.skip(f"this vLLM cannot run models with states in float32 on this CPU: {error}")


@pytest.fixture(scope="session")
def expect() -> Iterator[Callable[..., list[list[int]]]]:
    """What a model says without kvferry; one engine per model, kept for all tests."""
    known: dict[Path, Reference] = {}

    def ask(model: Path, prompts: list[list[int]], max_tokens: int = 16) -> list[list[int]]:
        if model not in known:
            known[model] = Reference(model)
        return known[model].generate(prompts, max_tokens)

    yield ask
    for reference in known.values():
        reference.close()


@pytest.fixture(scope="session")
def parked() -> Iterator[dict[str, Engine]]:
    """The last engine, by what it was started with: most tests want the same one."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def start(no_leaked_threads: None, parked: dict[str, Engine]) -> Iterator[Callable[..., Engine]]:
    """Starts engines, one at a time, and ends kvferry in the last one."""
    running: list[tuple[str, Engine]] = []

    def end() -> None:
        while running:
            name, engine = running.pop()
            if engine.park():
                parked[name] = engine
            else:
                engine.close()

    def begin(
        model: Path, *, ferry: dict[str, Any] | None = None, is_fresh: bool = False, **options: Any
    ) -> Engine:
        end()
        name = f"{model} {ferry is not None} {sorted(options.items())}"
        engine = None if is_fresh else parked.pop(name, None)
        while parked:
            parked.popitem()[1].close()
        if engine is None:
            engine = Engine(model, ferry=ferry, **options)
            engine.is_spoiled = is_fresh
        elif ferry is not None:
            engine.adopt(ferry)
        running.append((name, engine))
        return engine

    yield begin
    end()
