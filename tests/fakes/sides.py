"""Both sides of the connector without an engine: the test is vLLM's scheduler and all its ranks.

vLLM's own block pool and its own sum over the ranks' answers are used; requests and configurations
are stand-ins with the attributes that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput

from kvferry.config import Config
from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.messages import StepOrders
from kvferry.connectors.common.ranks import RankPlace
from kvferry.connectors.common.session import SchedulerSession
from kvferry.connectors.common.worker import WorkerSession
from kvferry.connectors.vllm.control import weights_of_caller
from kvferry.connectors.vllm.engine import VllmEngine
from kvferry.connectors.vllm.geometry import kv_cache_of
from kvferry.connectors.vllm.setup import contents_of, namespace_of, setup_of, support_of
from kvferry.types import Rank

BLOCK_TOKENS = 16
NUM_BLOCKS = 32
SPEC = type("FullAttentionSpec", (SimpleNamespace,), {})(block_size=BLOCK_TOKENS)
_random = np.random.default_rng(7)
SETTINGS = {
    "load_policy": "always",
    "load_deadline": "5min",
    "store_deadline": "5min",
    "overlap_loads": "off",  # what was told to have landed is looked at by the test itself
}


def hashes_of(tag: int, count: int = 4) -> list[bytes]:
    return [bytes([tag, number]) * 16 for number in range(count)]


def request_of(name: str, block_hashes: Sequence[bytes]) -> Any:
    tokens = len(block_hashes) * BLOCK_TOKENS + 1
    return SimpleNamespace(
        request_id=name,
        block_hashes=list(block_hashes),
        num_preemptions=0,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
        all_token_ids=list(range(tokens)),
    )


class VllmHooks(SchedulerSession):
    """A session that takes what vLLM hands to its hooks."""

    def __init__(self, setup: SessionSetup, namespace: Any) -> None:
        super().__init__(setup)
        self._namespace = namespace

    def bind_manager(self, manager: Any) -> None:
        groups, pool = self.setup.groups, manager.block_pool
        self.bind(lambda: VllmEngine(groups, self._namespace, pool, manager))

    def expect(self, request: Any) -> None:
        if not getattr(request, "skip_reading_prefix_cache", False):
            super().expect(request)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = super().match(request, computed_tokens)
        return found, bool(found)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = getattr(blocks, "get_block_ids", tuple)
        super().allocated(request, tables, num_external_tokens)

    def take(self, output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            super().take(output.kv_connector_worker_meta)


class Sides:
    """One scheduler's side and as many ranks as there are lists of layers. Owns their tensors.

    ``kv`` has them as arrays, rank by rank. ``has_listeners`` says that routers want events.
    """

    def __init__(
        self,
        *stages: Sequence[str],
        host: Sequence[str] = (),
        has_listeners: bool = False,
        role: str = "kv_both",
        **settings: Any,
    ) -> None:
        layers = [name for stage in stages for name in stage]
        caches = SimpleNamespace(
            num_blocks=NUM_BLOCKS,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=layers)],
        )
        self.config = _vllm_config(len(stages), has_listeners)
        self.config.kv_transfer_config = SimpleNamespace(kv_role=role)
        support = support_of(self.config, caches, recomputes_requests=False)
        sizes = host or ["1MiB"] * len(stages)
        configs = [
            Config.from_dict({"metrics_port": None, **SETTINGS, **settings, "host": size})
            for size in sizes
        ]
        self.kv: list[dict[str, npt.NDArray[np.float32]]] = [
            {name: np.zeros((NUM_BLOCKS, 2, BLOCK_TOKENS, 8), np.float32) for name in stage}
            for stage in stages
        ]
        self.ranks = [
            WorkerSession(
                place=RankPlace(Rank(number), len(stages), len(stages)),
                config=configs[number],
                contents=contents_of(self.config, caches),
                find_weights=lambda device: weights_of_caller(device),
            )
            for number in range(len(stages))
        ]
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.tables: dict[str, list[int]] = {}
        setup = setup_of(self.config, caches, configs[0], support)
        self.side = VllmHooks(setup, namespace_of(self.config, caches))
        self.side.bind_manager(
            SimpleNamespace(block_pool=self.pool, get_block_ids=lambda name: (self.tables[name],))
        )
        for rank, arrays in zip(self.ranks, self.kv, strict=True):
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            rank.register(partial(kv_cache_of, tensors, [layers], NUM_BLOCKS))
        self.side.meet_ranks([rank.introduce() for rank in self.ranks])
        self._total = KVOutputAggregator(len(stages))

    def allocate(self, name: str, num_blocks: int) -> Any:
        """Device blocks for a request, as vLLM hands them over."""
        blocks = self.pool.get_new_blocks(num_blocks)
        self.tables[name] = [block.block_id for block in blocks]
        return SimpleNamespace(get_block_ids=lambda: (self.tables[name],))

    def cache(self, request: Any) -> None:
        """Let the prefix cache know what a request has computed, as vLLM does in every step."""
        self.pool.cache_full_blocks(
            request,
            [self.pool.blocks[number] for number in self.tables[request.request_id]],
            num_cached_blocks=0,
            num_full_blocks=len(request.block_hashes),
            block_size=BLOCK_TOKENS,
            kv_cache_group_id=0,
        )

    def orders(
        self,
        scheduled: dict[str, int] | None = None,
        *,
        new: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> StepOrders:
        """A step of vLLM's; ``new`` are those of the scheduled that never ran before."""
        scheduled = scheduled or {}
        tokens = sum(scheduled.values())
        return self.side.orders(scheduled, tokens, new=bool(new), preempted=preempted)

    def answer(self, *numbers: int) -> Any:
        """What these ranks have to say now, summed up and heard; the others are silent."""
        outputs = []
        for number, rank in enumerate(self.ranks):
            told = KVConnectorOutput()
            if number in numbers:
                rank.poll()
                told.finished_recving = rank.finished.take("arrived")
                told.invalid_block_ids = rank.finished.take("invalid")
                told.kv_connector_worker_meta = rank.take_receipts()
            outputs.append(SimpleNamespace(kv_connector_output=told))
        summed = self._total.aggregate(outputs).kv_connector_output
        self.side.take(summed)
        return summed

    def run(self, orders: StepOrders) -> None:
        """All ranks carry out a step and finish their copies, but tell nobody yet."""
        for rank in self.ranks:
            rank.begin(orders)
            rank.after_forward()
            rank._drain()

    def step(self, scheduled: dict[str, int] | None = None, **more: Any) -> Any:
        """A whole step: ordered, carried out, and heard of from every rank."""
        self.run(self.orders(scheduled, **more))
        return self.answer(*range(len(self.ranks)))

    def compute(
        self, name: str, hashes: Sequence[bytes], num_blocks: int = 5, **attributes: Any
    ) -> Any:
        """A request that finds nothing here computes its prompt, and is in the prefix cache."""
        request = request_of(name, hashes)
        vars(request).update(attributes)
        self.side.match(request, 0)
        self.side.allocated(request, self.allocate(name, num_blocks), 0)
        self.write(self.tables[name])
        self.step({name: request.num_tokens}, new=[name])
        request.num_computed_tokens, request.num_output_tokens = request.num_tokens, 1
        self.cache(request)
        return request

    def converse(self, name: str, hashes: Sequence[bytes]) -> list[dict[str, Any]]:
        """A request computes its prompt, ends and is stored; returns the bytes of its blocks."""
        request = self.compute(name, hashes)
        wanted = self.bytes_at(self.tables[name][: len(hashes)])
        self.end(request)
        self.rest()
        return wanted

    def promise(self, request: Any) -> list[int]:
        """Match all blocks of a request and give it places for them, which are poisoned."""
        num_blocks = len(request.block_hashes)
        num_tokens = num_blocks * BLOCK_TOKENS
        assert self.side.match(request, 0) == (num_tokens, True)
        self.side.allocated(request, self.allocate(request.request_id, num_blocks + 1), num_tokens)
        places = self.tables[request.request_id][:num_blocks]
        self.write(places, np.nan)
        return places

    def rest(self) -> None:
        """Step for as long as the connector says that there is something to step for."""
        while self.side.has_work:
            self.step()

    def end(self, request: Any) -> None:
        """As vLLM does: the connector is told, then the blocks are freed, the last first."""
        self.side.finished(request, (list(self.tables[request.request_id]),))
        self.free(request)

    def free(self, request: Any) -> None:
        numbers = reversed(self.tables.pop(request.request_id))
        self.pool.free_blocks([self.pool.blocks[number] for number in numbers])

    def bytes_at(self, blocks: Sequence[int]) -> list[dict[str, npt.NDArray[np.float32]]]:
        """What these blocks hold, rank by rank."""
        return [{name: kv[list(blocks)] for name, kv in arrays.items()} for arrays in self.kv]

    def write(self, blocks: Sequence[int] | slice, value: float | None = None) -> None:
        """Fresh bytes into these blocks of every layer, or this value."""
        for arrays in self.kv:
            for kv in arrays.values():
                shape = kv[blocks].shape
                kv[blocks] = _random.standard_normal(shape) if value is None else value

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.side.close()


def assert_same(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    """The bytes of blocks, rank by rank; of fewer blocks, if fewer came."""
    for here, there in zip(found, wanted, strict=True):
        for name, kv in here.items():
            assert np.array_equal(kv, there[name][: len(kv)]), name


def _vllm_config(num_stages: int, has_listeners: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=num_stages,
            tensor_parallel_size=1,
            pipeline_parallel_size=num_stages,
            data_parallel_rank_local=None,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype="float32",
            quantization=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(),
        ),
        lora_config=None,
        speculative_config=None,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=has_listeners),
    )
