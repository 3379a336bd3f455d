"""What the connector's two sides meet of vLLM: its own where it is installed, else stand-ins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.fakes.vllm_pool import BlockPool

HAS_VLLM = util.find_spec("vllm") is not None


@dataclass(frozen=True)
class VllmParts:
    """Makes a block pool, a rank's output, the sum over those, and tensors as ranks see them."""

    pool: Callable[..., Any]
    output: Callable[[], Any]
    total: Callable[[int], Any]
    tensor: Callable[[Any], Any]


BLOCK_TOKENS = 16


def request_of(name: str, block_hashes: Sequence[bytes], computed: int = 0) -> Any:
    tokens = len(block_hashes) * BLOCK_TOKENS + 1
    return SimpleNamespace(
        request_id=name,
        block_hashes=list(block_hashes),
        num_preemptions=0,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=computed,
        num_output_tokens=0,
        all_token_ids=list(range(tokens)),
    )


def step_of(
    tables: Mapping[str, tuple[list[int], ...]],
    scheduled: Mapping[str, int],
    new: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> Any:
    """What vLLM's scheduler says of a step."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=tables[name]) for name in new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
        preempted_req_ids=set(preempted) or None,
    )


@dataclass
class Output:
    """What a rank says of a step, or all of them together."""

    finished_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


class Total:
    """The sum over all ranks: a request has arrived once every rank has said so, in any step."""

    def __init__(self, expected_finished_count: int) -> None:
        self._num_ranks = expected_finished_count
        self._arrived: Counter[str] = Counter()

    def aggregate(self, outputs: Sequence[Any]) -> Any:
        total, arrived = Output(), set()
        for output in (one.kv_connector_output for one in outputs):
            for name in output.finished_recving or ():
                self._arrived[name] += 1
                if self._arrived[name] == self._num_ranks:
                    arrived.add(name)
                    del self._arrived[name]
            total.invalid_block_ids |= output.invalid_block_ids
            told, more = total.kv_connector_worker_meta, output.kv_connector_worker_meta
            if told is not None and more is not None:
                more = told.aggregate(more)
            total.kv_connector_worker_meta = more if more is not None else told
        total.finished_recving = arrived or None
        return SimpleNamespace(kv_connector_output=total)


class OnCpu(np.ndarray):
    """An array that says where it is, as a tensor does."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cpu", index=None)


STAND_INS = VllmParts(BlockPool, Output, Total, lambda array: array.view(OnCpu))


def vllms_own() -> VllmParts:
    """The tensors are torch's then: the same memory as the arrays that tests look at."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.outputs import KVConnectorOutput

    return VllmParts(BlockPool, KVConnectorOutput, KVOutputAggregator, torch.from_numpy)


def parts_here() -> VllmParts:
    return vllms_own() if HAS_VLLM else STAND_INS
