"""vLLM's own scheduler and both sides of a connector, without a model: every token is the same.

What a connector's hooks cost depends on the steps vLLM makes, not on what they compute. So the
steps are vLLM's and the forward pass is left out; ``model_time`` lets the clock say that it took as
long as it would on a GPU. With a ``pace``, each step really takes that long, and the next one is
planned meanwhile, as vLLM does by default: then what is found depends on when copies end.
``slow_copies`` makes these take their time, too.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from connectors.disk_case import TinyShape
from connectors.engine import BLOCK_TOKENS, Live, transfer_config
from connectors.model_time import skip_a_step

NUM_LAYERS = 2
_TOKEN = 7
_REST_SECONDS = 10.0


class Modelless:
    """Owns vLLM's scheduler and a worker's connector. As ``Engine``, as far as loads use it."""

    def __init__(
        self,
        connector: str,
        *,
        num_blocks: int,
        pool_bytes: int,
        settings: Mapping[str, Any] | None = None,
        num_requests: int = 16,
        pace: Callable[[int], float] | None = None,
    ) -> None:
        """``num_requests`` run at a time; ``pace`` says the seconds of a step by its tokens."""
        import torch
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        shape = TinyShape("qwen7b")
        block_tokens = shape.block_tokens if pace is None else BLOCK_TOKENS
        options = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 20480,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": num_requests,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "block_size": block_tokens,
            "enable_prefix_caching": True,
            "async_scheduling": pace is not None,
        }
        model = shape.write(str(Path(tempfile.gettempdir(), "bench-modelless")))
        transfers = transfer_config(connector, pool_bytes, settings)
        self._config = EngineArgs(
            model=model, kv_transfer_config=transfers, **options
        ).create_engine_config()
        self._config.cache_config.num_gpu_blocks = num_blocks
        names = [f"layer{number}" for number in range(NUM_LAYERS)]
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        caches = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec)])
        self.scheduler = (Scheduler if pace is None else AsyncScheduler)(
            vllm_config=self._config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=block_tokens,
            log_stats=True,
        )
        self.core = SimpleNamespace(scheduler=self.scheduler)
        worker = KVConnectorFactory.create_connector(
            config=self._config, role=KVConnectorRole.WORKER, kv_cache_config=caches
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        self._worker: Any = worker
        self._kv = {name: torch.zeros(num_blocks, 2, block_tokens, 8) for name in names}
        worker.register_kv_caches(self._kv)
        shapes = worker.get_handshake_metadata()
        if shapes is not None:
            self.scheduler.connector.set_xfer_handshake_metadata({0: shapes})
        hash_function = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(block_tokens, hash_function)
        self._live: dict[str, Live] = {}
        self._number = 0
        self._pace = pace
        self._steps: deque[tuple[Any, Any, dict[str, list[int]], float]] = deque()
        self._busy_until = 0.0
        self._cached: dict[str, int] = {}
        self.steps_ms: list[float] = []
        self.params: Mapping[str, Any] | None = None
        freeze_gc_heap()  # as vLLM's engine does once it has started

    def add(self, prompt: list[int], max_tokens: int) -> Live:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": dict(self.params)} if self.params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self._number += 1
        name = f"r{self._number}"
        live = self._live[name] = Live(prompt, time.perf_counter())
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        return live

    def step(self) -> list[Live]:
        """As vLLM's engine and its worker make one; returns the requests that ended in it."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        began = time.perf_counter()
        if not (self.scheduler.has_requests() or self._steps):
            return []
        planned = self.scheduler.schedule()
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(planned) as told,
        ):
            if planned.total_num_scheduled_tokens and self._pace is None:
                skip_a_step()
        sampled = {name: self._sampled(name) for name in planned.num_scheduled_tokens}
        for name, num_new in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]  # vLLM has counted this step by now
            self._cached.setdefault(name, request.num_computed_tokens - num_new)
        if self._pace is not None:
            num_tokens = planned.total_num_scheduled_tokens
            self._busy_until = max(self._busy_until, time.perf_counter())
            self._busy_until += self._pace(num_tokens) if num_tokens else 0.0
            self._steps.append((planned, told, sampled, self._busy_until))
            if len(self._steps) == 1 and num_tokens:
                return []  # the next one is planned while this one runs
            planned, told, sampled, end = self._steps.popleft()
            time.sleep(max(1e-4, end - time.perf_counter()))
        names = list(planned.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=told,
        )
        ended = []
        for outputs in self.scheduler.update_from_output(planned, result).values():
            for output in outputs.outputs:
                live = self._live[output.request_id]
                live.first = live.first or time.perf_counter()
                live.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    live.done = time.perf_counter()
                    live.cached_tokens = self._cached.pop(output.request_id)
                    ended.append(self._live.pop(output.request_id))
        self.steps_ms.append(1e3 * (time.perf_counter() - began))
        return ended

    def _sampled(self, name: str) -> list[int]:
        """A token, once a request's prompt is computed: vLLM has counted this step by now."""
        request = self.scheduler.requests[name]
        return [_TOKEN] if request.num_computed_tokens >= request.num_tokens else []

    def run(self, prompt: list[int], max_tokens: int) -> Live:
        """One request alone, to its last token."""
        live = self.add(prompt, max_tokens)
        while not live.done:
            self.step()
        return live

    def settle(self, _: Sequence[list[int]] = ()) -> None:
        rest(self)

    def forget(self, _: Sequence[list[int]] = ()) -> None:
        """Drop the device's prefix cache, not the connector's."""
        rest(self)
        assert self.scheduler.reset_prefix_cache(), "vLLM did not reset its prefix cache"

    @property
    def has_grown(self) -> bool:
        """Whether host memory is whole; for connectors that have none, always."""
        memory = getattr(getattr(self._worker, "_worker", None), "_memory", None)
        return memory is None or bool(getattr(memory.host, "growth", memory.host).wait(0.0))

    def host_memory(self) -> str:
        return ""

    def counters(self) -> dict[str, float]:
        return {}


def rest(engine: Any) -> None:
    """Step an engine, this or one with a model, until its connector has nothing left to do."""
    end = time.perf_counter() + _REST_SECONDS
    while engine.core.scheduler.has_requests() and time.perf_counter() < end:
        engine.step()
        time.sleep(1e-4)


def slow_copies(block_seconds: float) -> None:
    """Let kvferry's copies in this process take so long for each block, in either direction."""
    from kvferry.transfer.engine.cpu import CpuEngine
    from kvferry.types import Transfer

    copy = CpuEngine._copy

    def slowly(self: CpuEngine, transfer: Transfer) -> None:
        time.sleep(block_seconds * len(transfer.src_slots))
        copy(self, transfer)

    CpuEngine._copy = slowly  # type: ignore[method-assign]
