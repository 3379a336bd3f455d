"""vLLM's side of the contract: keys of its requests, its device blocks and its free queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np

from kvferry.cache.reach import Group, RecurrentState
from kvferry.connectors.common.hints import read_hints, tenant_of
from kvferry.core.identity import Namespace, adopt, adopt_one
from kvferry.core.keys import Key, Keys
from kvferry.hints import Hints
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK, BlockTable, Ordered
from kvferry.types import DeviceBlocks

NULL_BLOCK = 0
"""vLLM's placeholder in block tables for a block that a request does not have."""

_NEXT = 32
"""The most free blocks that :attr:`VllmEngine.evicts` examines, and at most an eighth of all."""

_GROUP_BYTES = 4
"""Bytes of the group number at the end of each block hash in vLLM's pool."""

_HINTS = (("max_offload_tokens", "max_store_tokens"), ("max_load_tokens", "max_load_tokens"))
"""Request parameters of vLLM's own offloading, each with our hint of the same meaning."""

_NO_KEYS = Keys.empty()
_hash_of = attrgetter("block_hash")


class RequestKeys:
    """The chain of one vLLM request: the keys of its hash blocks so far.

    Reads ``block_hashes``, a list that vLLM extends with every full block of known tokens. These
    hashes cover the request's salt, adapter and images.
    """

    __slots__ = ("_keys", "_last", "_namespace", "had_blocks", "hashes", "request")

    def __init__(self, request: Any, namespace: Namespace) -> None:
        self.request = request
        self.hashes: list[bytes] = request.block_hashes
        self._namespace = namespace
        self._keys = _NO_KEYS
        self._last: bytes | None = None
        self.had_blocks: Sequence[Sequence[int]] = ()
        """Device blocks, by group, of a request that has ended; other requests may use them now."""

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, position: int) -> Key:
        return adopt_one(self._namespace, self.hashes[position])

    def keys(self) -> Keys:
        hashes = self.hashes
        known = len(self._keys.array)
        # Hashes are chained, so one equal hash means that all before it are equal. A request whose
        # tokens were replaced (streamed input) starts over.
        if known > len(hashes) or (known and hashes[known - 1] != self._last):
            self._keys, known = _NO_KEYS, 0
        if known < len(hashes):
            new = adopt(self._namespace, hashes[known:])
            self._keys = self._keys + new if known else new
            self._last = hashes[-1]
        return self._keys


class VllmEngine:
    """vLLM's block pool for the session. Owns one reference per hold of a block.

    Block tables come from vLLM's cache manager, if there is one. Else they come from its prefix
    cache, which names blocks by content: these have the right bytes, whichever request computed
    them. Recurrent states always come from the prefix cache. Their tables include the block that
    the next tokens overwrite, and lack blocks that vLLM no longer needs.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        namespace: Namespace,
        block_pool: Any,
        manager: Any = None,
        group_ids: Sequence[int] | None = None,
    ) -> None:
        """``namespace`` is for hash blocks of one token; their real size comes from the pool.

        ``group_ids`` are vLLM's numbers of ``groups``; its other groups are ignored.
        """
        self._groups = groups
        self._ids = tuple(range(len(groups)) if group_ids is None else group_ids)
        self._pool = block_pool
        self._manager = manager
        self.hash_tokens = int(block_pool.hash_block_size)
        self._namespace = replace(namespace, block_tokens=self.hash_tokens)
        self._held: Counter[int] = Counter()

    # -- requests -------------------------------------------------------------------------------

    def describe(self, request: Any, *, has_tenants: bool) -> tuple[RequestKeys, Hints | None, str]:
        """Return a request's keys; its hints, with its salt's tenant; why any are ignored."""
        keys = RequestKeys(request, self._namespace)
        params = getattr(request, "kv_transfer_params", None)
        envelope = getattr(request, "kv_hints", None)
        if params is None and envelope is None and not has_tenants:
            return keys, None, ""
        actions = [
            (f"{each.action_type}@{each.action_version}", each.payload)
            for each in (envelope.actions if envelope is not None else ())
        ]
        hints, reason = read_hints(params if params is not None else {}, _HINTS, actions)
        salt = getattr(request, "cache_salt", None)
        if has_tenants and salt and not hints.tenant:
            hints = replace(hints, tenant=tenant_of(salt))
        return keys, hints, reason

    def conversation(self, request: Any) -> str:
        return str(getattr(request, "session_id", None) or "")

    # -- counts ---------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM can give to a request now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def evicts(self) -> bool:
        """Whether one of the next blocks that vLLM gives to requests is in its prefix cache.

        Checks more than the first, because ended requests put their last blocks, without a hash, at
        the queue's head. With no free block left, the next one comes from a request that ends.
        """
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(min(_NEXT, self._pool.num_gpu_blocks // 8)):
            is_end = block is None or block.next_free_block is None  # the queue's sentinel
            if is_end or block.block_hash is not None:
                return True
            block = block.next_free_block
        return False

    # -- tables ---------------------------------------------------------------------------------

    def table(self, ids: Sequence[int], length: int | None = None) -> BlockTable:
        """Return vLLM's table with NO_BLOCK for missing blocks, cut or padded to ``length``."""
        table = np.array(ids if length is None else ids[:length], dtype=np.int64)
        table[table == NULL_BLOCK] = NO_BLOCK
        if length is not None and len(table) < length:
            table = np.append(table, np.full(length - len(table), NO_BLOCK))
        return table

    def tables(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """Return a table per group for ``num_tokens``; below ``from_token`` it may be blank."""
        keys: Any = request.chain
        known = None
        if self._manager is not None:
            known = self._manager.get_block_ids(request.id)
        return [
            self.table(known[self._ids[number]], num_tokens // group.block_tokens)
            if known is not None and not isinstance(group, RecurrentState)
            else self._by_content(number, keys.hashes, num_tokens, from_token)
            for number, group in enumerate(self._groups)
        ]

    def remains(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """Return an ended request's tables, with the blocks that the prefix cache still has."""
        keys: Any = request.chain
        hashes, had = keys.hashes, keys.had_blocks or ((),) * len(self._groups)
        return [
            self._by_content(number, hashes, num_tokens, from_token, had[number])
            for number in range(len(self._groups))
        ]

    def _by_content(
        self,
        number: int,
        hashes: Sequence[bytes],
        num_tokens: int,
        from_token: int,
        had: Sequence[int] = (),
    ) -> BlockTable:
        """Return the device blocks in which the prefix cache has a request's blocks.

        First compares the hashes of the blocks that the request ``had``. A block keeps its hash as
        long as it is cached, and comparing one is much cheaper than a search.
        """
        blocks, block_tokens = self._pool.blocks, self._groups[number].block_tokens
        per_block = block_tokens // self.hash_tokens
        length = min(num_tokens // block_tokens, len(hashes) // per_block)
        first = min(from_token // block_tokens, length)
        names = hashes[(first + 1) * per_block - 1 : length * per_block : per_block]
        table = [NO_BLOCK] * first
        group_id = self._ids[number]
        suffix = group_id.to_bytes(_GROUP_BYTES, "big")
        wanted, there = [name + suffix for name in names], had[first:length]
        known = map(_hash_of, map(blocks.__getitem__, there))
        if list(known) == wanted:  # mostly, all blocks are where they were
            return np.array([*table, *there], dtype=np.int64)
        for name, whole, likely in zip(names, wanted, chain(there, repeat(NULL_BLOCK))):  # noqa: B905
            if blocks[likely].block_hash == whole:
                table.append(likely)
            else:
                cached = self._pool.get_cached_block(name, [group_id])
                table.append(cached[0].block_id if cached else NO_BLOCK)
        return np.array(table, dtype=np.int64)

    # -- holding --------------------------------------------------------------------------------

    @property
    def keeps_free_blocks(self) -> bool:
        """Whether some block is in use only by copies, and so is free once they have ended."""
        blocks = self._pool.blocks
        return any(blocks[number].ref_cnt == count for number, count in self._held.items())

    def hold(self, mentions: Iterable[DeviceBlocks | Ordered]) -> None:
        blocks = self._pool.blocks
        for mention in mentions:
            numbers = mention.blocks.tolist()
            self._pool.touch(list(map(blocks.__getitem__, numbers)))
            self._held.update(numbers)

    def release(self, mentions: Iterable[DeviceBlocks]) -> None:
        blocks, held = self._pool.blocks, self._held
        for mention in mentions:
            numbers = mention.blocks.tolist()
            # In reverse: vLLM reuses the end of a conversation before its beginning.
            self._pool.free_blocks(list(map(blocks.__getitem__, reversed(numbers))))
            for number in numbers:
                count = held.pop(number) - 1  # not del, which a Counter does in Python
                if count:
                    held[number] = count

    def release_all(self) -> None:
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[number] for number in self._held.elements()])
        self._held.clear()
