"""Which blocks can be had from this server's host memory, told to routers in vLLM's own events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvferry.keys import Keys
from kvferry.pool import Pool
from kvferry.reach import Group
from kvferry.scheduler import Ordered
from kvferry.types import Key


@dataclass(frozen=True)
class _Told:
    """A block as routers know it."""

    block_hash: Any
    group: int


def vllms_words() -> Any:
    """What vLLM's events are made of."""
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return SimpleNamespace(
        stored=BlockStored, removed=BlockRemoved, medium=MEDIUM_CPU, name=maybe_convert_block_hash
    )


class EventLog:
    """Remembers what was ordered until it can be matched, and what routers were told until it goes.

    Owns nothing else; listens to the pool for blocks that leave. ``words`` are vLLM's.
    """

    def __init__(
        self, pool: Pool, groups: Sequence[Group], hash_tokens: int, words: Any = None
    ) -> None:
        self._words = words if words is not None else vllms_words()
        self._pool = pool
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._ordered: dict[Key, tuple[_Told, Any]] = {}
        self._told: dict[Key, _Told] = {}
        self._events: list[Any] = []
        pool.listeners.append(self._gone)

    def ordered(self, part: Ordered) -> None:
        """These blocks of a request are being stored."""
        request, size = part.request.chain.request, self._groups[part.group].block_tokens
        hashes, ratio = request.block_hashes, size // self._hash_tokens
        lora, name = getattr(request, "lora_request", None), self._words.name
        places = part.positions if isinstance(part.positions, range) else part.positions.tolist()
        for place, key in zip(places, part.keys, strict=True):
            told = _Told(name(hashes[(place + 1) * ratio - 1]), part.group)
            start = place * size
            stored = self._words.stored(
                block_hashes=[told.block_hash],
                parent_block_hash=name(hashes[place * ratio - 1]) if place else None,
                token_ids=list(request.all_token_ids[start : start + size]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=self._words.medium,
                lora_name=lora.name if lora else None,
                group_idx=part.group,
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
                    self._words.removed(
                        block_hashes=[told.block_hash],
                        medium=self._words.medium,
                        group_idx=told.group,
                    )
                )

    def take(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events
