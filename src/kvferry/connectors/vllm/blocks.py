"""vLLM's device blocks: which a request has, which copies still need, which go next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from kvferry.cache.reach import Group, RecurrentState
from kvferry.core.identity import Namespace, adopt
from kvferry.core.keys import Keys
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK, BlockTable, Ordered
from kvferry.types import DeviceBlocks

NULL_BLOCK = 0
"""vLLM's placeholder in block tables for a block that a request does not have."""

_NEXT = 32
"""So many of the next free blocks are looked at, or an eighth of all."""


class VllmBlocks:
    """What our scheduler asks and tells vLLM's block pool. Owns one reference per block held.

    A block that is held goes to nobody else, so a request may finish at once while its stores go
    on. What the blocks mean is vLLM's. With vLLM's cache manager block tables are asked from that;
    without, from its prefix cache, which names blocks by content: what it answers holds the right
    bytes even if another request computed them. Of recurrent states only that can be trusted: a
    table also has the block that the next tokens write, and forgets those it no longer needs.
    """

    def __init__(self, groups: Sequence[Group], block_pool: Any, manager: Any = None) -> None:
        self._groups = groups
        self._pool = block_pool
        self._manager = manager
        self._hash_tokens = int(block_pool.hash_block_size)
        self._held: Counter[int] = Counter()
        self._evicts: bool | None = None

    # -- what there is --------------------------------------------------------------------------

    @property
    def hash_tokens(self) -> int:
        """Tokens that one of vLLM's block hashes covers."""
        return self._hash_tokens

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
    def queue_head(self) -> Any:
        """The block that vLLM gives away next."""
        return self._pool.free_block_queue.fake_free_list_head.next_free_block

    def begin_step(self) -> None:
        """What vLLM is about to give away is looked at anew, at most once before the next call.

        Many ask in a step: every request that comes or goes.
        """
        self._evicts = None

    @property
    def evicts(self) -> bool:
        """Whether one of the next blocks that vLLM gives away is one its prefix cache knows.

        Not the very next: ended requests put their last, nameless blocks at the queue's head. And
        where no block is left, the next one comes from a request that ends.
        """
        if self._evicts is None:
            block = self._pool.free_block_queue.fake_free_list_head.next_free_block
            self._evicts = False
            for _ in range(min(_NEXT, self._pool.num_gpu_blocks // 8)):
                is_end = block is None or block.next_free_block is None  # the queue's own mark
                if is_end or block.block_hash is not None:
                    self._evicts = True
                    break
                block = block.next_free_block
        return self._evicts

    # -- tables ---------------------------------------------------------------------------------

    def tables(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """A table per group for the first ``num_tokens``; below ``from_token`` it may be blank."""
        theirs = request.chain.request  # type: ignore[attr-defined]  # ours are RequestKeys
        known = None
        if self._manager is not None:
            known = self._manager.get_block_ids(theirs.request_id)
        return [
            table_of(known[number], num_tokens // group.block_tokens)
            if known is not None and not isinstance(group, RecurrentState)
            else self._by_content(number, group, theirs.block_hashes, num_tokens, from_token)
            for number, group in enumerate(self._groups)
        ]

    def remember(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """A request ends that has these blocks, by group: where to look for its content first."""
        request.chain.end(block_ids)  # type: ignore[attr-defined]  # ours are RequestKeys

    def remains(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        """The same of a request that has ended: whatever the prefix cache still has of it."""
        ours: Any = request.chain
        hashes, had = ours.request.block_hashes, ours.had_blocks or ((),) * len(self._groups)
        return [
            self._by_content(number, group, hashes, num_tokens, from_token, had[number])
            for number, group in enumerate(self._groups)
        ]

    def _by_content(
        self,
        number: int,
        group: Group,
        hashes: Sequence[bytes],
        num_tokens: int,
        from_token: int,
        had: Sequence[int] = (),
    ) -> BlockTable:
        """Where the prefix cache has these blocks: mostly where the request ``had`` them.

        A block has its content's name for as long as the cache knows it, and a look at one block is
        much cheaper than a search.
        """
        pool, blocks = self._pool, self._pool.blocks
        per_block = group.block_tokens // self._hash_tokens
        length = min(num_tokens // group.block_tokens, len(hashes) // per_block)
        first = min(from_token // group.block_tokens, length)
        names = hashes[(first + 1) * per_block - 1 : length * per_block : per_block]
        table = [NO_BLOCK] * first
        suffix = number.to_bytes(4, "big")
        wanted, there = [name + suffix for name in names], had[first:length]
        if [blocks[likely].block_hash for likely in there] == wanted:  # mostly: at once
            return np.array([*table, *there], dtype=np.int64)
        for name, whole, likely in zip(names, wanted, chain(there, repeat(NULL_BLOCK))):  # noqa: B905
            if blocks[likely].block_hash == whole:
                table.append(likely)
            else:
                cached = pool.get_cached_block(name, [number])
                table.append(cached[0].block_id if cached else NO_BLOCK)
        return np.array(table, dtype=np.int64)

    # -- holding --------------------------------------------------------------------------------

    @property
    def keeps_free_blocks(self) -> bool:
        """Whether some block is in use by copies alone: it is free once they have ended."""
        blocks = self._pool.blocks
        return any(blocks[number].ref_cnt == count for number, count in self._held.items())

    def hold(self, ordered: Iterable[DeviceBlocks | Ordered]) -> None:
        blocks = self._pool.blocks
        for mention in ordered:
            numbers = mention.blocks.tolist()
            self._pool.touch([blocks[number] for number in numbers])
            self._held.update(numbers)

    def drop(self, released: Iterable[DeviceBlocks]) -> None:
        blocks, held = self._pool.blocks, self._held
        for mention in released:
            numbers = mention.blocks.tolist()
            # Backwards: the end of a conversation is the first to be given away.
            self._pool.free_blocks([blocks[number] for number in reversed(numbers)])
            # Mostly each is held once. By hand else: a load has a thousand blocks, and subtracting
            # counters takes twice as long.
            counts = list(map(held.pop, numbers, repeat(0)))
            if counts.count(1) == len(counts):
                continue
            held.update(
                {number: count for number, count in zip(numbers, counts, strict=True) if count}
            )
            for number in numbers:
                count = held[number] - 1
                if count:
                    held[number] = count
                else:
                    held.pop(number)  # not del, which a Counter does in Python

    def drop_all(self) -> None:
        """Only once no copy runs: we are out of service and the ranks have drained."""
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[number] for number in self._held.elements()])
        self._held.clear()


def table_of(ids: Sequence[int], length: int | None = None) -> BlockTable:
    """vLLM's table in our words, cut or filled up to ``length``."""
    table = np.array(ids if length is None else ids[:length], dtype=np.int64)
    table[table == NULL_BLOCK] = NO_BLOCK
    if length is not None and len(table) < length:
        table = np.append(table, np.full(length - len(table), NO_BLOCK))
    return table


# ------------------------------------------------------------------------------------------------
# For lazy stores: the blocks vLLM will give away next, as its free queue has them.

_GROUP_BYTES = 4
"""A block's hash in vLLM's pool ends in its group's number."""


def next_to_go(
    block: Any, depth: int, namespace: Namespace
) -> Iterator[tuple[int, Keys, list[int]]]:
    """Per group, keys and ids of named blocks among ``depth`` of the free queue, from this on."""
    named: dict[int, tuple[list[bytes], list[int]]] = {}
    for _ in range(depth):
        if block is None or block.next_free_block is None:  # the queue's own end mark
            break
        if block.block_hash is not None and not block.is_null:
            name = bytes(block.block_hash)
            group = int.from_bytes(name[-_GROUP_BYTES:], "big")
            hashes, ids = named.setdefault(group, ([], []))
            hashes.append(name[:-_GROUP_BYTES])
            ids.append(block.block_id)
        block = block.next_free_block
    for group, (hashes, ids) in named.items():
        yield group, adopt(namespace, hashes), ids


def num_allocated(scheduler_output: Any) -> int:
    """Device blocks that requests were given in this step."""
    tables = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
    tables += [ids for ids in scheduler_output.scheduled_cached_reqs.new_block_ids if ids]
    return sum(len(ids) for table in tables for ids in table)
