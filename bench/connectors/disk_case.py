"""One life of a server with a disk below its host memory: what is measured in its process."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from connectors.case import warm_up
from connectors.engine import Engine, Shape, shape_of
from connectors.first_tokens import ANSWER, others
from connectors.loads import Load, new_tokens, run_load
from connectors.measuring import Measuring

GROWN_AFTER = 30.0
_WRITTEN_AFTER = 60.0
"""Seconds after which blocks that are not on disk count as lost."""
_DURABLE_SECONDS = 2.0
"""What was written is promised to be durable after one second; the next life begins after two."""


@dataclass(frozen=True)
class DiskCase:
    """What one process is about. Lengths are in tokens; an empty ``disk`` is none."""

    shape: str
    is_cpu: bool
    pool_bytes: int
    device_bytes: int
    disk: str
    disk_bytes: int
    write: str
    prompt_tokens: int
    num_prompts: int
    load: Load
    load_policy: str = "auto"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"load_policy": self.load_policy}
        if self.disk:
            found |= {
                "disk": self.disk,
                "disk_size": self.disk_bytes,
                "disk_keep_free": 0,
                "tier_write": self.write,
            }
        return found


class DiskMeasurer(Measuring):
    """Owns the engine of this process; each method is an order's answer."""

    ORDERS = ("start", "warm", "fill", "back", "digests", "over", "counted")

    def __init__(self, case: DiskCase) -> None:
        self._case = case
        super().__init__()
        rng = random.Random(11)
        self._prompts = [new_tokens(rng, case.prompt_tokens) for _ in range(case.num_prompts)]

    def start(self, _: None) -> dict[str, Any]:
        case = self._case
        shape = TinyShape(case.shape) if case.is_cpu else shape_of(case.shape)
        engine = self._engine = Engine(
            shape,
            "kvferry",
            pool_bytes=case.pool_bytes,
            device_bytes=case.device_bytes,
            settings=case.settings,
            options=CPU_OPTIONS if case.is_cpu else None,
        )
        return {
            "seconds": engine.start_seconds,
            "num_gpu_blocks": engine.num_blocks,
            "block_bytes": shape.block_bytes,
        }

    def warm(self, _: None) -> dict[str, Any]:
        warm_up(self.engine)
        end = time.monotonic() + GROWN_AFTER
        while not self.engine.has_grown and time.monotonic() < end:
            time.sleep(0.1)
        restored = self._stats().restored.get("disk", 0)
        return {"host_memory": self.engine.host_memory(), "restored": restored}

    # -- across a restart -------------------------------------------------------------------------

    def fill(self, _: None) -> list[dict[str, Any]]:
        """Compute every prompt, and wait until all of it is on disk and durable."""
        found = []
        for prompt in self._prompts:
            cold = self.engine.run(prompt, ANSWER)
            digests = self.engine.digests(prompt)
            again = self.engine.run(prompt, ANSWER)
            found.append(
                {
                    "cold_ms": _ttft(cold),
                    "device_ms": _ttft(again),
                    "answers": [cold.tokens, again.tokens],
                    "digests": digests,
                    "written": self._await_disk(prompt),
                }
            )
        time.sleep(_DURABLE_SECONDS)
        return found

    def back(self, number: int) -> dict[str, Any]:
        """One prompt as a request after the restart finds it, and then from the GPU's own cache."""
        prompt = self._prompts[number]
        before = self._moved()
        back = self.engine.run(prompt, ANSWER)
        digests = self.engine.digests(prompt)
        again = self.engine.run(prompt, ANSWER)
        return {
            "disk_ms": _ttft(back),
            "device_ms": _ttft(again),
            "answers": [back.tokens, again.tokens],
            "digests": digests,
            "cached_blocks": back.cached_tokens // self.engine.shape.block_tokens,
            "read_bytes": self._moved() - before,
        }

    def digests(self, number: int) -> list[tuple[int, ...]]:
        """A control: the same prompt's blocks after everything on the GPU was overwritten."""
        self.engine.poison()
        return self.engine.digests(self._prompts[number])

    def over(self, number: int) -> dict[str, Any]:
        """Conversations that need the disk, others in every round."""
        found = run_load(self.engine, self._case.load, seed=50 + number, fills=True)
        del found["steps_ms"]
        return found

    def counted(self, _: None) -> dict[str, float]:
        return self.engine.counters()

    # -- looking ----------------------------------------------------------------------------------

    def _serving(self) -> Any:
        side = self.engine.core.scheduler.connector._session
        if side.serving is None:
            raise RuntimeError(f"kvferry does not serve: {side.idle_reason}")
        return side.serving

    def _stats(self) -> Any:
        return self._serving().scheduler.stats()

    def _moved(self) -> int:
        return int(self._stats().bytes_moved.get(("disk", "host"), 0))

    def _await_disk(self, prompt: list[int]) -> int:
        """Serve others, as a server does, until every block of this prompt is on disk."""
        serving, end = self._serving(), time.monotonic() + _WRITTEN_AFTER
        from kvferry.core.identity import adopt  # not there in an older checkout

        keys = adopt(serving.engine._namespace, self.engine.hashes(prompt))
        (disk, *_) = serving.scheduler.lower.tiers
        while (there := int(disk.pool.cached(keys).sum())) < len(keys):
            if time.monotonic() > end:
                raise RuntimeError(f"{there} of {len(keys)} blocks are on disk; {disk.ailment}")
            self.engine.settle(others(1))
        return there


def _ttft(live: Any) -> float:
    return 1e3 * (live.first - live.added)


# -- to try it out without a GPU -----------------------------------------------------------------

CPU_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_config": None,
    "compilation_config": None,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.1,
}


class TinyShape(Shape):
    """Two thin layers, for a CPU: its figures mean nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tiny-{name}", 2)

    @property
    def token_bytes(self) -> int:
        return 2 * 2 * self.kv_heads * 32 * 4

    @property
    def block_tokens(self) -> int:
        return 32  # a CPU's attention knows no smaller ones

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.2,
            "dtype": "float32",
        }
