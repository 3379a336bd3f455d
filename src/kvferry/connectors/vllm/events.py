"""kvferry's events for routers in vLLM's form."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as routers know it."""

    block_hash: Any
    parent: Any
    tokens: array[int]
    lora_id: int | None
    lora_name: str | None
    group: int


class VllmEvents:
    """Makes vLLM's events: medium CPU is host memory, STORAGE any tier below it. Owns nothing."""

    def __init__(self, group_ids: Sequence[int], hash_tokens: int) -> None:
        """``group_ids`` are vLLM's numbers of the groups that are stored."""
        self._group_ids = group_ids
        self._hash_tokens = hash_tokens
        self._events, self._name = vllm_events()
        self.host: str = self._events.MEDIUM_CPU
        self.lower: str = getattr(self._events, "MEDIUM_STORAGE", "STORAGE")  # of later versions

    def describe(self, request: Any, group: int, start: int, size: int) -> _Block:
        hashes, lora = request.block_hashes, getattr(request, "lora_request", None)
        return _Block(
            block_hash=self._name(hashes[(start + size) // self._hash_tokens - 1]),
            parent=self._name(hashes[start // self._hash_tokens - 1]) if start else None,
            tokens=array("L", request.all_token_ids[start : start + size]),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            group=self._group_ids[group],
        )

    def stored(self, block: _Block, medium: str) -> Any:
        return self._events.BlockStored(
            block_hashes=[block.block_hash],
            parent_block_hash=block.parent,
            token_ids=block.tokens.tolist(),
            block_size=len(block.tokens),
            lora_id=block.lora_id,
            medium=medium,
            lora_name=block.lora_name,
            group_idx=block.group,
        )

    def removed(self, block: _Block, medium: str) -> Any:
        return self._events.BlockRemoved(
            block_hashes=[block.block_hash], medium=medium, group_idx=block.group
        )


def vllm_events() -> tuple[Any, Any]:
    """vLLM's module of events, and what makes a block's hash into one that events have."""
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return kv_events, maybe_convert_block_hash
