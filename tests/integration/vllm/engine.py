"""A real vLLM engine in this process, driven step by step, and copies that can be tampered with."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.vllm import recurrent

from kvferry.telemetry.stats import SchedulerStats
from kvferry.types import DEVICE, HOST, Outcome, Receipt, Transfer

BLOCK_TOKENS = 32
LONG = 200.0
"""Seconds: far more than anything here takes, and less than a test may."""

FERRY = {
    "host": "64MiB",
    "max_storing_blocks": 1000,
    "load_policy": "always",
    "load_deadline": "5min",
    "store_deadline": "5min",
}
"""A machine under load must not turn into failed copies."""
SHARED = {
    **FERRY,
    "host": "8MiB",
    "tier_write": "through",
    "promote_deadline": "5min",
    "lookup_deadline": "5min",
}
"""For engines that share a store."""

Tokens = list[int]


def make_prompts(seed: int, *lengths: int) -> list[Tokens]:
    chooser = random.Random(seed)
    return [[chooser.randrange(256) for _ in range(length)] for length in lengths]


class Engine:
    """vLLM with or without kvferry. Everything happens in the caller's thread."""

    def __init__(self, model: Path, *, ferry: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        recurrent.allow()
        connector = {
            "kv_connector": "kvferry",
            "kv_role": "kv_both",
            "kv_connector_extra_config": ferry,
        }
        self.llm = LLM(
            model=str(model),
            enforce_eager=True,
            kv_transfer_config=connector if ferry is not None else None,
            **{
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks_override": 64,
                "max_model_len": 512,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 512,
                **options,
            },
        )
        self._names = itertools.count()
        self._tensors: Any = None
        self.is_spoiled = False
        """Whether the model or vLLM is no longer as it started."""

    def generate(self, prompts: Sequence[Tokens], max_tokens: int = 16, **sampling: Any) -> list:
        """The tokens that follow each prompt, all of them running at once."""
        names = [self.add(prompt, max_tokens, **sampling) for prompt in prompts]
        done = self.run()
        return [done[name] for name in names]

    def add(
        self,
        prompt: Tokens,
        max_tokens: int = 16,
        *,
        salt: str | None = None,
        hints: dict[str, Any] | None = None,
    ) -> str:
        from vllm import SamplingParams

        name = f"request-{next(self._names)}"
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        if hints is not None:
            sampling.extra_args = {"kv_transfer_params": {"kvferry": hints}}
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            asked["cache_salt"] = salt
        self.llm.llm_engine.add_request(name, asked, sampling)
        return name

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def step(self) -> dict[str, Tokens]:
        """One step; the requests that ended in it."""
        return {
            output.request_id: list(output.outputs[0].token_ids)
            for output in self.llm.llm_engine.step()
            if output.finished
        }

    def run(self) -> dict[str, Tokens]:
        """Step until every request has ended."""
        done: dict[str, Tokens] = {}
        give_up = time.monotonic() + LONG
        while self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < give_up, f"requests still wait: {self._figures()}"
            done |= self.step()
        return done

    def settle(self) -> None:
        """Step until every copy has landed and been told."""
        give_up = time.monotonic() + LONG
        while self.connector.has_pending_push_work():
            assert time.monotonic() < give_up, f"copies still fly: {self._figures()}"
            self.step()

    def await_tiers(self) -> None:
        """Step until every tier below can be used: on a busy machine it may come up late."""
        give_up = time.monotonic() + LONG
        self.step()
        while any(self.stats.ailments.values()):
            assert time.monotonic() < give_up, self.stats.ailments
            self.step()
            time.sleep(0.01)

    def _figures(self) -> object:
        serving = self.side.serving if self.connector is not None else None
        return serving.scheduler.stats() if serving is not None else "kvferry is not in service"

    def forget_device(self) -> None:
        """Drop vLLM's own prefix cache, so that whatever comes back comes through kvferry."""
        if self.connector is not None:
            self.settle()
        assert self.llm.reset_prefix_cache(), "vLLM still holds blocks"

    def check_round_trip(self, prompts: Sequence[Tokens], expected: list[Tokens]) -> None:
        """The answers are these, computed and then with what kvferry brings back."""
        assert self.generate(prompts) == expected
        self.forget_device()
        assert self.generate(prompts) == expected

    def note_preemptions(self, monkeypatch: Any) -> list[str]:
        """The names of requests that vLLM preempts from now on."""
        preempted: list[str] = []
        real = self.scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return real(request, *args, **kwargs)

        monkeypatch.setattr(self.scheduler, "_preempt_request", noted)
        return preempted

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        return self.connector._session

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def stats(self) -> SchedulerStats:
        stats: SchedulerStats = self.side.serving.scheduler.stats()
        return stats

    @property
    def loaded_blocks(self) -> int:
        """Blocks copied to the device so far, over all groups."""
        return self.stats.bytes_moved.get((HOST, DEVICE), 0) // self.side._shapes[0].slot_bytes

    def check_idle(self) -> None:
        """Nothing is left behind: no request, no hold, no lease, no device block in use."""
        self.settle()
        side, pool = self.side, self.scheduler.kv_cache_manager.block_pool
        assert side.guard.reason == ""
        assert side.serving.engine.num_held == 0
        assert not side.serving._requests
        side.serving.scheduler.check_integrity()
        assert side.serving.scheduler.pool.num_leases == 0
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # block 0 is nobody's

    # -- one vLLM for many tests ------------------------------------------------------------------

    def park(self) -> bool:
        """End kvferry in here; whether another test may have the same vLLM with a new kvferry."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        if self.is_spoiled or self.connector is None or self.worker._cache is None:
            return False
        try:
            for _ in range(200):
                if not self.connector.has_pending_push_work():
                    break
                self.step()
            is_clean = not self.llm.llm_engine.has_unfinished_requests()
            is_clean = self.llm.reset_prefix_cache() and is_clean
        except Exception:
            return False
        self._tensors = self.worker._cache.tensors
        self.connector.shutdown()
        ensure_kv_transfer_shutdown()
        return is_clean

    def adopt(self, ferry: dict[str, Any]) -> None:
        """A new kvferry in a parked vLLM, made and introduced as vLLM does at its start."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        scheduler = self.scheduler
        config, caches = scheduler.vllm_config, scheduler.kv_cache_config
        config.kv_transfer_config.kv_connector_extra_config = ferry
        core = self.llm.llm_engine.engine_core.engine_core
        (runner,) = core.model_executor.collective_rpc(lambda worker: worker.model_runner)
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
        kv_transfer_state.ensure_kv_transfer_initialized(config, caches)
        _register(runner, get_kv_transfer_group(), self._tensors)
        scheduler.connector = made
        made.bind_kv_cache_manager(scheduler.kv_cache_manager)
        made.set_xfer_handshake_metadata({0: get_kv_transfer_group().get_handshake_metadata()})

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()


def _register(self: Any, connector: Any, tensors: Any) -> None:
    """Called as if by vLLM's model runner, ``self``: kvferry looks for the model there."""
    connector.register_kv_caches(tensors)


@dataclass
class Tamper:
    """Stands between kvferry's worker and its copy engine, and spoils what it is told to."""

    mover: Any
    fails: Callable[[Transfer], bool] = lambda transfer: False
    zeroes: Callable[[Transfer], bool] = lambda transfer: False
    holds_receipts: bool = False
    copies_at_once: bool = False

    def __post_init__(self) -> None:
        self._own: list[Receipt] = []
        self.num_failed = 0

    def submit(self, transfer: Transfer) -> object:
        if self.fails(transfer):
            self.num_failed += 1
            self._own.append(Receipt(transfer.id, self.mover._rank, Outcome.FAILED, "tampered"))
            return None
        if transfer.dst == DEVICE and self.zeroes(transfer):
            self._own += self.mover.drain()  # a store may still write the slot
            self.mover._host[transfer.src_slots] = 0
        ticket = self.mover.submit(transfer)
        if self.copies_at_once:
            self._own += self.mover.drain()
        return ticket

    def poll(self) -> list[Receipt]:
        if self.holds_receipts:
            return []
        receipts, self._own = self._own, []
        return receipts + self.mover.poll()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mover, name)

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        receipts, self._own = self._own, []
        return receipts + self.mover.drain(timeout)

    def close(self) -> None:
        self.mover.close()


@contextlib.contextmanager
def tampering(monkeypatch: Any, **how: Any) -> Iterator[list[Tamper]]:
    """Engines made inside get tampered copies; yields the tampers, one per rank."""
    from kvferry.connectors.common import ranks
    from kvferry.connectors.common import worker as worker_side

    real = ranks.open_rank
    made: list[Tamper] = []

    def open_rank(*args: Any) -> Any:
        memory: Any = real(*args)
        made.append(Tamper(memory.engine, **how))
        memory.engine = made[-1]
        return memory

    monkeypatch.setattr(worker_side, "open_rank", open_rank)
    yield made
