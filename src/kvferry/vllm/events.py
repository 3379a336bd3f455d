"""Which blocks can be had from this server's host memory, told to routers in vLLM's own events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvferry.keys import Keys
from kvferry.pool import Pool
from kvferry.types import Key


@dataclass(frozen=True)
class _Told:
    """A block as routers know it."""

    block_hash: Any
    group: int


class EventLog:
    """Remembers what was ordered until it can be matched, and what routers were told until it goes.

    Owns nothing else; listens to the pool for blocks that leave.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ordered: dict[Key, tuple[_Told, BlockStored]] = {}
        self._told: dict[Key, _Told] = {}
        self._events: list[Any] = []
        pool.listeners.append(self._gone)

    def ordered(
        self,
        request: Any,
        group: int,
        places: Sequence[int],
        keys: Keys,
        *,
        block_tokens: int,
        hash_tokens: int,
    ) -> None:
        """Blocks at ``places`` of a request are being stored; ``keys`` are theirs in the pool."""
        hashes, ratio = request.block_hashes, block_tokens // hash_tokens
        lora = getattr(request, "lora_request", None)
        for place, key in zip(places, keys, strict=True):
            told = _Told(maybe_convert_block_hash(hashes[(place + 1) * ratio - 1]), group)
            parent = maybe_convert_block_hash(hashes[place * ratio - 1]) if place else None
            start = place * block_tokens
            stored = BlockStored(
                block_hashes=[told.block_hash],
                parent_block_hash=parent,
                token_ids=list(request.all_token_ids[start : start + block_tokens]),
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                group_idx=group,
            )
            self._ordered[key] = (told, stored)

    def settled(self) -> None:
        """Stores may have landed: tell of those that can be matched from now on."""
        if not self._ordered:
            return
        keys = Keys.from_bytes(self._ordered)
        known, cached = self._pool.known(keys), self._pool.cached(keys)
        for key, is_known, is_cached in zip(list(self._ordered), known, cached, strict=True):
            if is_cached or not is_known:
                told, stored = self._ordered.pop(key)
                if is_cached:
                    self._told[key] = told
                    self._events.append(stored)

    def _gone(self, keys: Keys) -> None:
        for key in keys:
            told = self._told.pop(key, None)
            if told is not None:
                self._events.append(
                    BlockRemoved(
                        block_hashes=[told.block_hash], medium=MEDIUM_CPU, group_idx=told.group
                    )
                )

    def take(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events
