"""Reports which blocks this server can load instead of computing, as vLLM's KV events.

An event's medium is CPU for host memory, and STORAGE for any lower tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvferry.cache.events import EventKind
from kvferry.cache.pool import Pool
from kvferry.cache.reach import Group
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.types import HOST, TierName

_TIER_EVENTS = (EventKind.EVICT, EventKind.FOUND, EventKind.LOST, EventKind.PROMOTED)

_MAX_LOWER = 1 << 17
"""The most blocks on lower tiers reported to routers; the oldest are then reported as removed. A
shared store never says what it has dropped, and each block takes some 500 bytes here."""


class _Block(NamedTuple):
    """A block as reported to routers, and the tiers that it is on."""

    name: Any
    parent: Any
    tokens: array[int]
    lora: Any
    group: int
    places: set[TierName]

    @property
    def is_lower(self) -> bool:
        return bool(self.places - {HOST})


class VllmEvents:
    """Owns the blocks being stored until they can be matched, and the reported ones until removed.

    Reads the event logs of the host pool and of the lower tiers.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        group_ids: Sequence[int],
        pool: Pool,
        tiers: Sequence[LowerTier],
        hash_tokens: int,
    ) -> None:
        """``group_ids`` are vLLM's numbers of ``groups``."""
        self._groups = groups
        self._group_ids = group_ids
        self._pool = pool
        self._hash_tokens = hash_tokens
        self._forms, self._name = vllm_events()
        self._media = (self._forms.MEDIUM_CPU, getattr(self._forms, "MEDIUM_STORAGE", "STORAGE"))
        self._ordered: dict[Key, _Block] = {}
        self._reported: dict[Key, _Block] = {}
        self._lower: dict[Key, None] = {}  # the oldest first
        self._events: list[Any] = []
        self._readers = [
            (HOST, pool.log.reader((EventKind.EVICT,))),
            *((tier.name, tier.log.reader(_TIER_EVENTS)) for tier in tiers),
        ]

    def ordered(self, part: Ordered) -> None:
        """Note that these blocks of a request are being stored."""
        request, size = part.request.chain.request, self._groups[part.group].block_tokens
        hashes, per_block = request.block_hashes, size // self._hash_tokens
        places = part.positions if isinstance(part.positions, range) else part.positions.tolist()
        for place, key in zip(places, part.keys, strict=True):
            self._ordered[key] = _Block(
                self._name(hashes[(place + 1) * per_block - 1]),
                self._name(hashes[place * per_block - 1]) if place else None,
                array("L", request.all_token_ids[place * size : (place + 1) * size]),
                getattr(request, "lora_request", None),
                self._group_ids[part.group],
                set(),
            )

    def settled(self) -> None:
        """Report blocks that can be matched now; call it when stores may have landed."""
        self._read_logs()
        if not self._ordered:
            return
        keys = Keys.from_bytes(self._ordered)
        known, cached = self._pool.known(keys), self._pool.cached(keys)
        for key, is_known, is_cached in zip(list(self._ordered), known, cached, strict=True):
            if is_cached or not is_known:
                block = self._ordered.pop(key)
                if is_cached:
                    self._add(key, self._reported.setdefault(key, block), HOST)

    def take(self) -> Iterable[Any]:
        """Return the events since the last call."""
        self._read_logs()
        events, self._events = self._events, []
        return events

    def _read_logs(self) -> None:
        """Report the changes in all logs since the last call, in order of time."""
        events = [(event, name) for name, reader in self._readers for event in reader.take()]
        for event, name in sorted(events, key=lambda each: each[0].at):
            keys = list(self._reported) if event.keys is None else event.all_keys()
            for key in keys:
                block = self._reported.get(key)
                if block is None:
                    continue
                if event.kind is EventKind.FOUND:
                    self._add(key, block, name)
                elif event.kind is not EventKind.PROMOTED:
                    self._drop(key, block, name)
                elif HOST not in block.places:
                    self._ordered[key] = block
        while len(self._lower) > _MAX_LOWER:
            key = next(iter(self._lower))
            for place in self._reported[key].places - {HOST}:
                self._drop(key, self._reported[key], place)

    def _add(self, key: Key, block: _Block, place: TierName) -> None:
        if place in block.places:
            return
        if place == HOST or not block.is_lower:
            stored = self._forms.BlockStored(
                block_hashes=[block.name],
                parent_block_hash=block.parent,
                token_ids=block.tokens.tolist(),
                block_size=len(block.tokens),
                lora_id=block.lora.adapter_id if block.lora else None,
                medium=self._media[place != HOST],
                lora_name=block.lora.name if block.lora else None,
                group_idx=block.group,
            )
            self._events.append(stored)
        if place != HOST:
            self._lower[key] = None
        block.places.add(place)

    def _drop(self, key: Key, block: _Block, place: TierName) -> None:
        if place not in block.places:
            return
        block.places.remove(place)
        if place == HOST or not block.is_lower:
            if place != HOST:
                del self._lower[key]
            self._events.append(
                self._forms.BlockRemoved(
                    block_hashes=[block.name],
                    medium=self._media[place != HOST],
                    group_idx=block.group,
                )
            )
        if not block.places:
            del self._reported[key]


def vllm_events() -> tuple[Any, Any]:
    """Return vLLM's module of events, and its function that converts block hashes for events."""
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return kv_events, maybe_convert_block_hash
