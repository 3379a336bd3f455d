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
from connectors.first_tokens import ANSWER, GB, others
from connectors.loads import new_tokens
from connectors.measuring import Measuring

DECODERS, DECODER_TOKENS = 8, 1000
"""Who decodes while others' hits are loaded: so many, with prompts so long."""
REST_SECONDS = 0.05
"""Between one such hit and the next."""


@dataclass(frozen=True)
class OverlapCase:
    """What one process is about. Lengths are in tokens."""

    shape: str
    is_cpu: bool
    pool_bytes: int
    device_bytes: int
    prompt_tokens: int
    num_prompts: int
    answer_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class OverlapMeasurer(Measuring):
    """Owns the engine of this process; each method is an order's answer."""

    ORDERS = ("start", "warm", "copies", "fill", "first", "bytes", "beside")

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

    # -- the copy alone ---------------------------------------------------------------------------

    def copies(self, about: dict[str, Any]) -> dict[str, list[float]]:
        """Loads of a whole prompt with nothing beside: GB/s in one go and in parts, in turn."""
        from kvferry.transfer.layout import LayerParts

        self.engine.forget(others(1))
        copier = _worker()._memory.engine
        jobs = copier.__dict__.get("_jobs")
        num_blocks = self._case.prompt_tokens // self.engine.shape.block_tokens
        found: dict[str, list[float]] = {}
        planner = copier.__dict__.get("_planner")
        for round_ in range(about["rounds"]):
            for path in about["paths"]:
                if planner is not None:
                    copier._planner = _planner_of(path, planner)
                for parts in about["parts"]:
                    if parts and planner is not None:
                        jobs.cuts = tuple(LayerParts.of(each, parts) for each in jobs.layouts)
                    seconds = _timed_load(copier, num_blocks, in_parts=parts > 0)
                    speed = num_blocks * self.engine.shape.block_bytes / seconds / GB
                    name = f"{path}, {'whole' if not parts else f'{parts} parts'}"
                    if round_:  # the first of each compiles, and makes tables
                        found.setdefault(name, []).append(speed)
        if planner is not None:
            copier._planner = planner
            jobs.cuts = tuple(map(LayerParts.of, jobs.layouts))
        self.engine.poison()
        return found

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

    # -- those who decode meanwhile ---------------------------------------------------------------

    def beside(self, mode: str) -> dict[str, Any]:
        """Decode with hits coming in one after the other; ``none`` is without any."""
        rng = random.Random(time.perf_counter_ns())
        engine, answer = self.engine, self._case.answer_tokens
        lives = [engine.add(new_tokens(rng, DECODER_TOKENS), answer) for _ in range(DECODERS)]
        while not all(len(live.tokens) > 2 for live in lives):
            engine.step()
        counts, at = [len(live.tokens) for live in lives], [time.perf_counter()] * len(lives)
        gaps: list[float] = []
        hits: list[Live] = []
        rests_until = time.perf_counter() + REST_SECONDS
        with overlap(engine, mode if mode != "none" else "off"):
            while any(not live.done for live in lives):
                now = time.perf_counter()
                is_free = not hits or bool(hits[-1].done)
                if mode != "none" and is_free and now >= rests_until:
                    hits.append(engine.add(self._prompts[len(hits) % len(self._prompts)], 2))
                engine.step()
                now = time.perf_counter()
                if hits and hits[-1].done and rests_until < hits[-1].done:
                    rests_until = now + REST_SECONDS
                for number, live in enumerate(lives):
                    new = len(live.tokens) - counts[number]
                    if new:
                        gaps += [1e3 * (now - at[number]) / new] * new
                        counts[number], at[number] = len(live.tokens), now
            while hits and not hits[-1].done:
                engine.step()
        done = [hit for hit in hits if hit.cached_tokens > self._case.prompt_tokens // 2]
        return {"gaps_ms": gaps, "hit_ms": [_ttft(hit) for hit in done], "hits": len(hits)}


# -- switching, and looking on --------------------------------------------------------------------


@contextmanager
def overlap(engine: Engine, mode: str) -> Iterator[None]:
    """``off`` or ``auto``, then a number of parts and a path to copy by: ``auto/8@kernel``."""
    from kvferry.cache.policies.load_or_compute import Overlapping

    served = _serving(engine)._overlap
    kept = served._policy, served._is_off
    words, _, path = mode.partition("@")
    policy, _, parts = words.partition("/")
    served._policy, served._is_off = Overlapping(policy), policy == "off"
    restore = _cut_into(int(parts)) if parts else None
    copier: Any = _worker()._memory.engine
    planner = vars(copier).get("_planner")
    if path and planner is not None:
        copier._planner = _planner_of(path, planner)
    try:
        yield
    finally:
        served._policy, served._is_off = kept
        if path and planner is not None:
            copier._planner = planner
        if restore is not None:
            restore()


def _cut_into(num_parts: int) -> Callable[[], None]:
    """Have loads land in so many parts; returns how to undo that."""
    from kvferry.connectors.common.overlap import LayerwiseLoads
    from kvferry.transfer.layout import LayerParts

    worker = _worker()
    copier, kept = worker._memory.engine, worker.layerwise
    jobs = copier._jobs
    layout = jobs.layouts[0]
    parts = LayerParts.of(layout, num_parts)
    whole, jobs.cuts = jobs.cuts, (parts,)
    layers = list(worker._cache.layers)
    worker.layerwise = LayerwiseLoads(copier, layers, layout, land=worker._drain, parts=parts)
    worker.layerwise._calls = {mode: set(names) for mode, names in kept._calls.items()}

    def restore() -> None:
        jobs.cuts, worker.layerwise = whole, kept

    return restore


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
            self._watch_answer(layerwise, "due", "queued")
            self._watch(layerwise, "tell", "told")
            self._watch(layerwise, "begin_forward", "forward")
            self._watch(layerwise, "ended", "landed")
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def after(self, start: float) -> dict[str, float]:
        """Milliseconds after a moment."""
        return {name: 1e3 * (at - start) for name, at in self._at.items()}

    def _watch_answer(self, owner: Any, method: str, name: str) -> None:
        """When it first returned something."""
        real = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if found is not None:
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
    return float(stats.seconds_moved.get(("host", "device"), 0.0))


def _planner_of(path: str, planner: Any) -> Any:
    from kvferry.settings.copy_paths import BY_NAME
    from kvferry.transfer.planner.choose import Planner

    return planner if path == "auto" else Planner(planner.profile, BY_NAME, pinned=path)


def _timed_load(copier: Any, num_blocks: int, *, in_parts: bool) -> float:
    """Seconds on the device's clock of one load of the first blocks and slots."""
    import numpy as np

    from kvferry.types import DEVICE, HOST, Transfer

    numbers = np.arange(1, num_blocks + 1)
    copier.submit(Transfer(1 << 40, HOST, DEVICE, numbers, numbers, in_parts=in_parts))  # type: ignore[arg-type]
    (receipt,) = copier.drain()
    assert not receipt.reason, receipt.reason
    return float(receipt.seconds)


def _ttft(live: Live) -> float:
    return 1e3 * (live.first - live.added)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
