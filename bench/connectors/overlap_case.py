"""One engine whose loads overlap the forward pass, or do not: in turn, in one process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from connectors.case import warm_up
from connectors.disk_case import CPU_OPTIONS, GROWN_AFTER, TinyShape
from connectors.engine import Engine, Live, shape_of
from connectors.first_tokens import ANSWER, others
from connectors.loads import new_tokens
from connectors.measuring import Measuring


@dataclass(frozen=True)
class OverlapCase:
    """What one process is about. Lengths are in tokens."""

    shape: str
    is_cpu: bool
    pool_bytes: int
    device_bytes: int
    prompt_tokens: int
    num_prompts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class OverlapMeasurer(Measuring):
    """Owns the engine of this process; each method is an order's answer."""

    ORDERS = ("start", "warm", "fill", "first", "bytes")

    def __init__(self, case: OverlapCase) -> None:
        self._case = case
        super().__init__()
        rng = random.Random(21)
        self._prompts = [new_tokens(rng, case.prompt_tokens) for _ in range(case.num_prompts)]

    def start(self, _: None) -> dict[str, Any]:
        case = self._case
        self._engine = Engine(
            TinyShape(case.shape) if case.is_cpu else shape_of(case.shape),
            "kvferry",
            pool_bytes=case.pool_bytes,
            device_bytes=case.device_bytes,
            settings={"load_policy": "always", "overlap_loads": "auto"},
            options=CPU_OPTIONS if case.is_cpu else None,
        )
        return {"seconds": self.engine.start_seconds, "num_gpu_blocks": self.engine.num_blocks}

    def warm(self, _: None) -> str:
        warm_up(self.engine)
        end = time.monotonic() + GROWN_AFTER
        while not self.engine.has_grown and time.monotonic() < end:
            time.sleep(0.1)
        return self.engine.host_memory()

    # -- first tokens -----------------------------------------------------------------------------

    def fill(self, _: None) -> dict[str, list[float]]:
        """Every prompt computed, once more from the GPU, and stored."""
        cold, device = [], []
        for prompt in self._prompts:
            cold.append(_ttft(self.engine.run(prompt, ANSWER)))
            device.append(_ttft(self.engine.run(prompt, ANSWER)))
        self.engine.settle(others(3))
        return {"cold_ms": cold, "device_ms": device}

    def first(self, about: dict[str, Any]) -> dict[str, Any]:
        """One round: every prompt from host memory in each of the modes, and from the GPU."""
        found: dict[str, Any] = {"host_ms": {}, "device_ms": [], "copy_ms": {}, "steps": {}}
        answers: dict[str, list[list[int]]] = {}
        for number, prompt in enumerate(self._prompts):
            modes = about["modes"][number % 2 :] + about["modes"][: number % 2]
            for mode in modes:
                self.engine.forget(others(1))
                with overlap(self.engine, mode), Marks(self.engine) as marks:
                    before = _load_seconds(self.engine)
                    live = self.engine.run(prompt, ANSWER)
                    again = self.engine.run(prompt, ANSWER)
                    self.engine.settle(others(1))
                found["host_ms"].setdefault(mode, []).append(_ttft(live))
                found["copy_ms"].setdefault(mode, []).append(
                    1e3 * (_load_seconds(self.engine) - before)
                )
                found["device_ms"].append(_ttft(again))
                found["steps"].setdefault(mode, []).append(marks.after(live.added))
                answers.setdefault(f"{number}", []).extend((live.tokens, again.tokens))
        found["wrong_answers"] = sum(
            tokens != told[0] for told in answers.values() for tokens in told
        )
        return found

    def bytes(self, mode: str) -> dict[str, Any]:
        """Digests of blocks before they left the GPU and after they came back, all overwritten."""
        from connectors.case import check_bytes

        with overlap(self.engine, mode):
            return check_bytes(self.engine, self._case)  # type: ignore[arg-type]


# -- switching, and looking on --------------------------------------------------------------------


@contextmanager
def overlap(engine: Engine, mode: str) -> Iterator[None]:
    """With ``overlap_loads`` as the mode says."""
    served = _serving(engine)._overlap
    kept, served._is_off = served._is_off, mode == "off"
    try:
        yield
    finally:
        served._is_off = kept


class Marks:
    """When what happened to a load, while this lasts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Marks:
        worker, layerwise = _worker(), _worker().layerwise
        self._watch(_serving(self._engine), "match", "asked")
        self._watch(worker, "_carry_out", "ordered")
        if layerwise is not None:
            self._watch_answer(layerwise, "may_tell", "queued")
            self._watch(layerwise, "tell", "told")
            self._watch(layerwise, "begin_forward", "forward")
            self._watch(layerwise, "landed", "landed")
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def after(self, start: float) -> dict[str, float]:
        """Milliseconds after a moment."""
        return {name: 1e3 * (at - start) for name, at in self._at.items()}

    def _watch_answer(self, owner: Any, method: str, name: str) -> None:
        """When it first said yes."""
        real = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if found:
                self._at.setdefault(name, time.perf_counter())
            return found

        setattr(owner, method, watched)
        self._undo.append(lambda: delattr(owner, method))

    def _watch(self, owner: Any, method: str, name: str) -> None:
        real = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name != "forward" or ("ordered" in self._at and "forward" not in self._at):
                self._at.setdefault(name, time.perf_counter())
            return real(*args, **kwargs)

        setattr(owner, method, watched)
        self._undo.append(lambda: delattr(owner, method))


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def _serving(engine: Engine) -> Any:
    return engine.core.scheduler.connector._session.serving


def _load_seconds(engine: Engine) -> float:
    stats = _serving(engine).scheduler.stats()
    return float(
        sum(t.seconds for key, t in stats.traffic.items() if key[:2] == ("host", "device"))
    )


def _ttft(live: Live) -> float:
    return 1e3 * (live.first - live.added)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
