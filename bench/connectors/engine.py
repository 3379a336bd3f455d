"""A vLLM engine in this process: started with one connector, stepped by hand, looked into.

Stepping by hand gives a time to first token without a server in between, and lets us see the very
bytes of the KV cache: the block of a prompt before it left the GPU and after it came back.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GiB = 1 << 30

_IS_OLD = find_spec("kvferry.transfer") is None
"""Another checkout, from before kvferry had its packages."""
_CONNECTOR = "kvferry.vllm.connector" if _IS_OLD else "kvferry.connectors.vllm.connector"
_PROFILES = ("kvferry.device.planning.profile_files", "kvferry.transfer.planner.profile")
"""Modules of older checkouts, which keep what they measured of the card in a folder."""

CONNECTORS = (
    "none",
    "idle",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "LMCacheConnectorV1",
    "kvferry",
)
ONLY_IF_NAMED = ("none", "idle", "LMCacheConnectorV1")
"""No rivals, or not part of vLLM."""

KV_HEADS = {"qwen7b": 4, "qwen7b-1kv": 1}
"""Shapes: Qwen2.5-7B, and the same with one KV head. A layer's page is 32 KiB and 8 KiB."""

LAYERS, HEADS, HEAD_SIZE, VOCABULARY, BLOCK_TOKENS = 28, 28, 128, 152064, 16

_LABELS = ("src", "dst", "reason", "path")

PROFILES = "BENCH_PROFILES"
"""Names the folder in which an older kvferry keeps what it measured of the card, for a run."""

_POISON = 77
"""A byte nothing computes: every KV value becomes 2.1e+08."""


@dataclass(frozen=True)
class Shape:
    """A model as far as its KV cache is concerned."""

    name: str
    kv_heads: int

    @property
    def token_bytes(self) -> int:
        return 2 * LAYERS * self.kv_heads * HEAD_SIZE * 2

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def config(self) -> dict[str, Any]:
        """As Hugging Face writes it."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": HEADS * HEAD_SIZE,
            "intermediate_size": 18944,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32768,
            "max_window_layers": LAYERS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        }

    def write(self, folder: str) -> str:
        """The config without weights; vLLM fills them in by ``load_format="dummy"``."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(self.config(), file)
        return folder


def shape_of(name: str) -> Shape:
    return Shape(name, KV_HEADS[name])


def transfer_config(
    connector: str, pool_bytes: int, settings: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Each connector with its own defaults and the same host memory; ``settings`` are kvferry's."""
    if connector == "none":
        return None
    config: dict[str, Any] = {"kv_role": "kv_both"}
    if connector == "kvferry":
        return config | {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_connector_extra_config": {"host": pool_bytes, **(settings or {})},
        }
    if connector == "idle":
        return config | {
            "kv_connector": "IdleConnector",
            "kv_connector_module_path": "connectors.idle",
        }
    if connector == "LMCacheConnectorV1":
        return config | {"kv_connector": connector}
    return config | {
        "kv_connector": connector,
        "kv_connector_extra_config": {"cpu_bytes_to_use": pool_bytes},
    }


def variables(connector: str, pool_bytes: int) -> dict[str, str]:
    """What a connector's process is told by its environment.

    ``LMCACHE_PATH`` names folders that only LMCache's process is to import from.
    """
    if connector != "LMCacheConnectorV1":
        return {}
    path = [os.environ.get("LMCACHE_PATH", ""), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{pool_bytes / GiB:g}",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",  # its keys are hashes
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # it did not finish with the other one (LMCache 0.5.3)
    }


@dataclass(eq=False)
class Live:
    """A request on its way."""

    prompt: list[int]
    added: float
    first: float = 0.0
    done: float = 0.0
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    steps: tuple[int, int] = (0, 0)
    """Of the engine's steps, the first one of this request and the one after its first token."""


class Engine:
    """Owns vLLM's engine. ``start_seconds`` is what making it took, imports left out."""

    def __init__(
        self,
        shape: Shape,
        connector: str,
        *,
        pool_bytes: int,
        device_bytes: int,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """``settings`` are kvferry's, ``options`` vLLM's, over those below."""
        from vllm import LLM

        for module in _PROFILES:
            with suppress(ImportError):
                # Not by XDG_CACHE_HOME: vLLM's compile cache is keyed by that, too.
                profiles: Any = import_module(module)
                profiles.cache_directory = lambda: Path(os.environ[PROFILES])
        folder = os.path.join(tempfile.gettempdir(), f"bench-{shape.name}")
        began = time.perf_counter()
        usual: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "seed": 0,
            "attention_config": {"backend": "FLASH_ATTN"},
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
            "max_model_len": 20480,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 8192,
            "block_size": shape.block_tokens,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": device_bytes,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        self.llm = LLM(
            model=shape.write(folder),
            kv_transfer_config=transfer_config(connector, pool_bytes, settings),
            **(usual | dict(options or {})),
        )
        self.start_seconds = time.perf_counter() - began
        self.shape = shape
        self._engine = self.llm.llm_engine
        self._number = 0
        self._live: dict[str, Live] = {}
        self.steps_ms: list[float] = []
        self.params: Mapping[str, Any] | None = None
        """What every request says to the connector (``kv_transfer_params``)."""

    # -- requests -------------------------------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int) -> Live:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": dict(self.params)} if self.params is not None else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            detokenize=False,
            ignore_eos=True,
            extra_args=extra,
        )
        self._number += 1
        live = self._live[f"r{self._number}"] = Live(prompt, time.perf_counter())
        live.steps = (len(self.steps_ms),) * 2
        self._engine.add_request(f"r{self._number}", {"prompt_token_ids": prompt}, sampling)
        return live

    def step(self) -> list[Live]:
        """One step; returns the requests that ended in it."""
        ended = []
        began = time.perf_counter()
        outputs = self._engine.step()
        self.steps_ms.append(round(1e3 * (time.perf_counter() - began), 3))
        for output in outputs:
            live = self._live[output.request_id]
            live.tokens = list(output.outputs[0].token_ids)
            if live.tokens and not live.first:
                live.first = time.perf_counter()
                live.steps = live.steps[0], len(self.steps_ms)
                live.cached_tokens = output.num_cached_tokens or 0
            if output.finished:
                live.done = time.perf_counter()
                ended.append(self._live.pop(output.request_id))
        return ended

    def run(self, prompt: list[int], max_tokens: int) -> Live:
        """One request alone, from a quiet GPU to its last token."""
        _synchronize()
        live = self.add(prompt, max_tokens)
        while not live.done:
            self.step()
        return live

    def settle(self, other: Sequence[list[int]]) -> None:
        """Let stores end: some connectors collect them only while other requests run."""
        for prompt in other:
            self.run(prompt, 2)
            for _ in range(20):
                self._engine.step()
                time.sleep(0.005)

    # -- the device's cache ---------------------------------------------------------------------

    def forget(self, other: Sequence[list[int]]) -> None:
        """Drop the GPU's prefix cache, not the connector's."""
        for _ in range(20):
            if self.llm.reset_prefix_cache():
                return
            self.settle(other)  # a store may hold blocks
        raise RuntimeError("vLLM did not reset its prefix cache")

    @property
    def core(self) -> Any:
        return self._engine.engine_core.engine_core

    @property
    def num_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def kv_tensors(self) -> list[Any]:
        return list(self.core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def poison(self) -> None:
        """Overwrite the whole KV cache on the GPU, so that only a real load can bring a hit."""
        import torch

        for tensor in self.kv_tensors():
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw.set_(tensor.untyped_storage()).fill_(_POISON)
        _synchronize()

    def digests(self, prompt: list[int]) -> list[tuple[int, ...]]:
        """One number per layer of every whole block of this prompt that the GPU's cache has."""
        import torch

        blocks = self._blocks_of(prompt)
        device = self.kv_tensors()[0].device
        ids = torch.tensor(blocks, dtype=torch.int64, device=device)
        torch.manual_seed(1)
        columns = []
        for tensor in self.kv_tensors():
            axis = list(tensor.shape).index(self.num_blocks)
            rows = tensor.index_select(axis, ids).movedim(axis, 0).reshape(len(blocks), -1)
            words = rows.contiguous().view(torch.int32).to(torch.int64)
            odd = torch.randint(1, 1 << 31, (words.shape[1],), device=device) * 2 + 1
            columns.append((words * odd).sum(dim=1).tolist())
        return list(zip(*columns, strict=True))

    def hashes(self, prompt: list[int]) -> list[bytes]:
        """What vLLM calls the blocks of a prompt."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id="digest",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.core.request_block_hasher,
        )
        return list(request.block_hashes)

    def _blocks_of(self, prompt: list[int]) -> list[int]:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        found = [pool.get_cached_block(name, [0]) for name in self.hashes(prompt)]
        return [blocks[0].block_id for blocks in found if blocks]

    # -- what was counted -----------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Of vLLM and of the connector: prefix caches, copies, preemptions."""
        words = ("prefix_cache", "kvferry", "kv_offload", "preemptions")
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value and any(word in metric.name for word in words):
                labels = [f"{k}={v}" for k, v in sorted(metric.labels.items()) if k in _LABELS]
                found[metric.name + ("{" + ",".join(labels) + "}" if labels else "")] = value
        return found

    def host_memory(self) -> str:
        """How far kvferry's host memory is; empty for other connectors."""
        host = self._kvferry_host()
        return str(host.stats()) if host is not None else ""

    @property
    def has_grown(self) -> bool:
        """Whether host memory is whole; for connectors that make it at once, always."""
        host = self._kvferry_host()
        return host is None or getattr(host, "growth", host).wait(0.0)  # of older ones

    def _kvferry_host(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        memory = getattr(getattr(group, "_worker", None), "_memory", None)
        return memory.host if memory is not None else None


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
