"""kvferry's eviction policies for the host memory of vLLM's own OffloadingConnector.

::

    "eviction_policy": "KvferryPolicy",
    "cache_policy_module_path": "kvferry.connectors.vllm.policy"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvferry.cache.events import EventKind
from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import Arriving
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease
from kvferry.config import Config
from kvferry.connectors.common.storage import hashed_keys
from kvferry.core.keys import Key, Keys
from kvferry.types import NO_SLOT

_PERSON = b"kvferry policy\0\0"


class _Heard:
    """Marks a request that the policy has been told of; vLLM keeps it with the request."""


class KvferryPolicy(CachePolicy):  # type: ignore[misc]
    """Translates vLLM's policy interface to a :class:`Pool` of chunks, one slot for each.

    The setting ``policy`` (KVFERRY_POLICY) names the policy. Chunks of a request form a chain
    across all groups of layers: its end is evicted before its beginning. A chunk in use is leased.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._make = policy_named(Config.load().policy)
        self.clear()

    def clear(self) -> None:
        """Forget every chunk and everything that the policy has learned."""
        self._pool = Pool(self.cache_capacity, self._make)
        self._evicted = self._pool.log.reader((EventKind.EVICT,))
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._names: dict[Key, OffloadKey] = {}
        self._leases: dict[OffloadKey, Lease] = {}
        self._before: dict[OffloadKey, OffloadKey] = {}  # key before each, in the request to store
        self._arriving = Keys.empty()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk of this key; None if there is none."""
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Add a chunk after its request's nearest earlier chunk that is in the pool."""
        before = self._before.get(key)
        while before is not None and before not in self._chunks:
            before = self._before.get(before)
        keys = _keys([key])
        lease = self._pool.reserve(keys, parent=None if before is None else _key(before))
        assert lease is not None, "vLLM evicts before it inserts"
        lease.commit()
        self._chunks[key], self._names[keys[0]] = chunk, key
        if chunk.ref_cnt != 0:
            self.mark_non_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk whose store failed."""
        del self._chunks[key]
        del self._names[_key(key)]
        self._leases.pop(key).spoil()

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that these chunks were used."""
        self._pool.touch(_keys(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request is about to store these chunks, in the order of its tokens."""
        missing = list(keys)
        ordered = self._hear(req_context, missing)
        self._before = dict(zip(ordered[1:], ordered[:-1], strict=True))
        self._arriving = _keys(missing)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Note that an ended request used the chunks that it reused."""
        ordered = order_request_keys(key_groups, req_context)
        self._hear(req_context, ordered)
        self.touch([key for key in ordered if key in reused_keys], req_context)

    def _hear(self, request: ReqContext, some: list[OffloadKey]) -> list[OffloadKey]:
        """Return a request's keys in order, as far as vLLM says; tell the policy of them once."""
        positions = dict(getattr(request, "_offload_key_positions", {}))
        ordered = sorted(positions, key=positions.__getitem__) if positions else some
        if request.get_state(_Heard) is None:
            request.set_state(_Heard())
            keys = _keys(ordered)
            self._pool.raise_failure()
            self._pool.asked(keys, max(positions.values(), default=0), self._pool.lookup(keys))
        return ordered

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly ``n`` chunks and return them; if too few can go, evict none: None."""
        pool = self._pool
        own = pool.find(_keys(key for key in protected if key in self._chunks))
        nowhere = np.full(len(self._arriving), NO_SLOT)
        arriving = Arriving(self._arriving, nowhere, NO_SLOT, chained=True, must_stay=True)
        self._evicted.take()
        pool.eviction.make_room(pool.num_free + n, own, arriving)
        going = [self._names[key] for event in self._evicted.take() for key in event.all_keys()]
        if len(going) == n:
            for key in going:
                del self._names[_key(key)]
            return [(key, self._chunks.pop(key)) for key in going]
        for key in going:  # too few could be evicted: add them again, without their chains
            lease = pool.reserve(_keys([key]), chained=False)
            assert lease is not None
            lease.commit()
        return None

    def mark_evictable(self, key: OffloadKey) -> None:
        """Note that no transfer uses this chunk any more."""
        self._leases.pop(key).release()

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Note that a transfer uses this chunk."""
        lease = self._pool.lease(_keys([key]))
        assert lease is not None
        self._leases[key] = lease


def _key(key: OffloadKey) -> Key:
    return _keys([key])[0]


def _keys(keys: Iterable[OffloadKey]) -> Keys:
    return hashed_keys(keys, _PERSON)
