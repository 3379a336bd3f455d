"""vLLM's side of the contract: its requests' keys, its device blocks, and its free queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np

from kvferry.cache.reach import Group, RecurrentState
from kvferry.connectors.common.contract import Step
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
"""So many of the next free blocks are looked at, or an eighth of all."""

_GROUP_BYTES = 4
"""A block's hash in vLLM's pool ends in its group's number."""

_HINTS = (("max_offload_tokens", "max_store_tokens"), ("max_load_tokens", "max_load_tokens"))
"""Parameters of vLLM's own offloading, and the hints that mean the same."""

_NO_KEYS = Keys.empty()
_hash_of = attrgetter("block_hash")


class RequestKeys:
    """The chain of one vLLM request: the keys of the hash blocks it has so far.

    Reads ``block_hashes``, which vLLM extends with every full block of known tokens. Those hashes
    cover the salt, the adapter and the images of the request.
    """

    __slots__ = ("_keys", "_last", "_namespace", "had_blocks", "request")

    def __init__(self, request: Any, namespace: Namespace) -> None:
        self.request = request
        self._namespace = namespace
        self._keys = _NO_KEYS
        self._last: bytes | None = None
        self.had_blocks: Sequence[Sequence[int]] = ()
        """Once it has ended: its device blocks by group. Other requests may have them by now."""

    def __len__(self) -> int:
        return len(self.request.block_hashes)

    def __getitem__(self, position: int) -> Key:
        return adopt_one(self._namespace, self.request.block_hashes[position])

    def keys(self) -> Keys:
        hashes = self.request.block_hashes
        known = len(self._keys.array)
        # Chained, so one equal hash means that all before it are equal: a request whose tokens
        # were replaced (streamed input) starts over.
        if known > len(hashes) or (known and hashes[known - 1] != self._last):
            self._keys, known = _NO_KEYS, 0
        if known < len(hashes):
            new = adopt(self._namespace, hashes[known:])
            self._keys = self._keys + new if known else new
            self._last = hashes[-1]
        return self._keys


class VllmEngine:
    """vLLM's block pool for the session. Owns one reference per held block.

    With vLLM's cache manager, block tables are asked from that; without, from its prefix cache,
    which names blocks by content: they hold the right bytes even if another request computed them.
    Of recurrent states only that can be trusted: a table also has the block that the next tokens
    write, and forgets those it no longer needs.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        namespace: Namespace,
        block_pool: Any,
        manager: Any = None,
        group_ids: Sequence[int] | None = None,
    ) -> None:
        """``namespace`` is for hash blocks of one token: the pool says how many they have.

        ``group_ids`` are vLLM's numbers of the groups; of its others nothing is known here.
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
        """A request's keys; its hints, with its salt's tenant; why some were not understood."""
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

    # -- what there is --------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM could give to a request now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def evicts(self) -> bool:
        """Whether one of the next blocks that vLLM gives away is one its prefix cache knows.

        Not the very next: ended requests put their last, nameless blocks at the queue's head. And
        where no block is left, the next one comes from a request that ends.
        """
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(min(_NEXT, self._pool.num_gpu_blocks // 8)):
            is_end = block is None or block.next_free_block is None  # the queue's own mark
            if is_end or block.block_hash is not None:
                return True
            block = block.next_free_block
        return False

    # -- tables ---------------------------------------------------------------------------------

    def table(self, ids: Sequence[int], length: int | None = None) -> BlockTable:
        """vLLM's table with NO_BLOCK for missing blocks, cut or filled up to ``length``."""
        table = np.array(ids if length is None else ids[:length], dtype=np.int64)
        table[table == NULL_BLOCK] = NO_BLOCK
        if length is not None and len(table) < length:
            table = np.append(table, np.full(length - len(table), NO_BLOCK))
        return table

    def tables(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """A table per group for the first ``num_tokens``; below ``from_token`` it may be blank."""
        keys: Any = request.chain
        known = None
        if self._manager is not None:
            known = self._manager.get_block_ids(keys.request.request_id)
        return [
            self.table(known[self._ids[number]], num_tokens // group.block_tokens)
            if known is not None and not isinstance(group, RecurrentState)
            else self._by_content(number, keys.request.block_hashes, num_tokens, from_token)
            for number, group in enumerate(self._groups)
        ]

    def remains(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """The same of a request that has ended: whatever the prefix cache still has of it."""
        keys: Any = request.chain
        hashes, had = keys.request.block_hashes, keys.had_blocks or ((),) * len(self._groups)
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
        """Where the prefix cache has these blocks: mostly where the request ``had`` them.

        A block has its content's name for as long as the cache knows it, and a look at one block is
        much cheaper than a search.
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
        if list(known) == wanted:  # mostly: at once
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
        """Whether some block is in use by copies alone: it is free once they have ended."""
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
            # Backwards: the end of a conversation is the first to be given away.
            self._pool.free_blocks(list(map(blocks.__getitem__, reversed(numbers))))
            for number in numbers:
                count = held.pop(number) - 1  # not del, which a Counter does in Python
                if count:
                    held[number] = count

    def release_all(self) -> None:
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[number] for number in self._held.elements()])
        self._held.clear()


def step_of(output: Any) -> Step:
    """A step as vLLM's scheduler puts it out."""
    new = output.scheduled_new_reqs
    return Step(
        output.num_scheduled_tokens,
        output.total_num_scheduled_tokens,
        [each.req_id for each in new] if new else (),
        output.preempted_req_ids or (),
    )
