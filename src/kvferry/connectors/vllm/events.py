"""Which blocks can be had from this server without computing, told to routers in vLLM's own events.

::

    medium CPU       in host memory
    medium STORAGE   on any tier below it: the disk, a store that servers share
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvferry.cache.events import EventKind
from kvferry.cache.pool import Pool
from kvferry.cache.reach import Group
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.types import HOST, Key, TierName

_MOST_BELOW = 1 << 17
"""Blocks below the host of which routers are told; then the oldest is taken back. A shared store
never says what it has dropped, and what is known of a block takes some 500 bytes."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as routers know it."""

    block_hash: Any
    parent: Any
    tokens: array[int]
    lora_id: int | None
    lora_name: str | None
    group: int


@dataclass(slots=True)
class _Told:
    """A block routers were told of, and where it is."""

    block: _Block
    places: set[TierName] = field(default_factory=set)

    @property
    def is_below(self) -> bool:
        return bool(self.places - {HOST})


def vllms_words() -> Any:
    """What vLLM's events are made of."""
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return SimpleNamespace(
        stored=kv_events.BlockStored,
        removed=kv_events.BlockRemoved,
        medium=kv_events.MEDIUM_CPU,
        storage=getattr(kv_events, "MEDIUM_STORAGE", "STORAGE"),  # a later word
        name=maybe_convert_block_hash,
    )


class BlockEvents:
    """Remembers what was ordered until it can be matched, and what routers were told until it goes.

    Owns nothing else; listens to the pool for blocks that leave, and to the tiers. ``words`` are
    vLLM's.
    """

    def __init__(
        self,
        pool: Pool,
        groups: Sequence[Group],
        hash_tokens: int,
        words: Any = None,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        self._words = words if words is not None else vllms_words()
        self._pool = pool
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._ordered: dict[Key, _Block] = {}
        self._told: dict[Key, _Told] = {}
        self._below: dict[Key, None] = {}  # the oldest first
        self._events: list[Any] = []
        pools = [(HOST, pool), *((each.name, each.pool) for each in tiers)]
        self._evicted = [
            (name, each.log.reader((EventKind.EVICT,))) for name, each in pools if each is not None
        ]
        for tier in tiers:
            tier.listen(self)

    def ordered(self, part: Ordered) -> None:
        """These blocks of a request are being stored."""
        request, size = part.request.chain.request, self._groups[part.group].block_tokens
        hashes, ratio = request.block_hashes, size // self._hash_tokens
        lora, name = getattr(request, "lora_request", None), self._words.name
        places = part.positions if isinstance(part.positions, range) else part.positions.tolist()
        for place, key in zip(places, part.keys, strict=True):
            start = place * size
            self._ordered[key] = _Block(
                block_hash=name(hashes[(place + 1) * ratio - 1]),
                parent=name(hashes[place * ratio - 1]) if place else None,
                tokens=array("L", request.all_token_ids[start : start + size]),
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                group=part.group,
            )

    def settled(self) -> None:
        """Stores may have landed: tell of those that can be matched from now on."""
        self._read_evictions()
        if not self._ordered:
            return
        keys = Keys.from_bytes(self._ordered)
        known, cached = self._pool.known(keys), self._pool.cached(keys)
        for key, is_known, is_cached in zip(list(self._ordered), known, cached, strict=True):
            if is_cached or not is_known:
                block = self._ordered.pop(key)
                if is_cached:
                    self._add(key, self._told.setdefault(key, _Told(block)), HOST)

    # -- what tiers say ------------------------------------------------------------------------

    def came(self, tier: TierName, keys: Keys) -> None:
        self._read_evictions()
        for key in keys:
            told = self._told.get(key)
            if told is not None:
                self._add(key, told, tier)
        while len(self._below) > _MOST_BELOW:
            key = next(iter(self._below))
            for place in self._told[key].places - {HOST}:
                self._drop(key, place)

    def went(self, tier: TierName, keys: Keys | None) -> None:
        self._read_evictions()
        for key in list(self._told) if keys is None else keys:
            self._drop(key, tier)

    def rose(self, keys: Keys) -> None:
        self._read_evictions()
        for key in keys:
            told = self._told.get(key)
            if told is not None and HOST not in told.places:
                self._ordered[key] = told.block

    def _read_evictions(self) -> None:
        """Report what pools have evicted, before newer events of the same keys."""
        for name, reader in self._evicted:
            for event in reader.take():
                for key in event.all_keys():
                    self._drop(key, name)

    # -- what routers hear ----------------------------------------------------------------------

    def _add(self, key: Key, told: _Told, place: TierName) -> None:
        if place in told.places:
            return
        if place == HOST:
            self._events.append(self._stored(told.block, self._words.medium))
        elif not told.is_below:
            self._below[key] = None
            self._events.append(self._stored(told.block, self._words.storage))
        told.places.add(place)

    def _drop(self, key: Key, place: TierName) -> None:
        told = self._told.get(key)
        if told is None or place not in told.places:
            return
        told.places.remove(place)
        if place == HOST:
            self._events.append(self._removed(told.block, self._words.medium))
        elif not told.is_below:
            del self._below[key]
            self._events.append(self._removed(told.block, self._words.storage))
        if not told.places:
            del self._told[key]

    def _stored(self, block: _Block, medium: str) -> Any:
        return self._words.stored(
            block_hashes=[block.block_hash],
            parent_block_hash=block.parent,
            token_ids=block.tokens.tolist(),
            block_size=self._groups[block.group].block_tokens,
            lora_id=block.lora_id,
            medium=medium,
            lora_name=block.lora_name,
            group_idx=block.group,
        )

    def _removed(self, block: _Block, medium: str) -> Any:
        return self._words.removed(
            block_hashes=[block.block_hash], medium=medium, group_idx=block.group
        )

    def take(self) -> Iterable[Any]:
        self._read_evictions()
        events, self._events = self._events, []
        return events
