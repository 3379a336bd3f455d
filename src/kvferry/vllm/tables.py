"""Which device blocks a request has, position by position, from whatever this vLLM lets us ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.reach import Group, RecurrentState
from kvferry.scheduler import NO_BLOCK, BlockTable

NULL_BLOCK = 0
"""vLLM's placeholder in block tables for a block that a request does not have."""


class DeviceTables:
    """Reads block tables. With vLLM's cache manager it asks that; without, its prefix cache.

    The prefix cache names blocks by content, so what it answers holds the right bytes even if
    another request computed them. Of recurrent states only that can be trusted: a table also has
    the block that the next tokens write, and forgets those whose state it no longer needs.
    """

    def __init__(
        self, groups: Sequence[Group], block_pool: Any, manager: Any, hash_tokens: int
    ) -> None:
        self._groups = groups
        self._pool = block_pool
        self._manager = manager
        self._hash_tokens = hash_tokens

    def of(self, request: Any, num_tokens: int, from_token: int) -> list[BlockTable]:
        """A table per group for the first ``num_tokens``; below ``from_token`` it may be blank."""
        known = None
        if self._manager is not None:
            known = self._manager.get_block_ids(request.request_id)
        return [
            table_of(known[number], num_tokens // group.block_tokens)
            if known is not None and not isinstance(group, RecurrentState)
            else self._by_content(number, group, request.block_hashes, num_tokens, from_token)
            for number, group in enumerate(self._groups)
        ]

    def cached(self, request: Any, num_tokens: int, from_token: int) -> list[BlockTable]:
        """The same of a request that has ended: whatever the prefix cache still has of it."""
        return [
            self._by_content(number, group, request.block_hashes, num_tokens, from_token)
            for number, group in enumerate(self._groups)
        ]

    def _by_content(
        self, number: int, group: Group, hashes: Sequence[Any], num_tokens: int, from_token: int
    ) -> BlockTable:
        table = np.full(num_tokens // group.block_tokens, NO_BLOCK, dtype=np.int64)
        per_block = group.block_tokens // self._hash_tokens
        for at in range(from_token // group.block_tokens, len(table)):
            cached = self._pool.get_cached_block(hashes[(at + 1) * per_block - 1], [number])
            if cached:
                table[at] = cached[0].block_id
        return table


def table_of(ids: Sequence[int], length: int | None = None) -> BlockTable:
    """vLLM's table in our words, cut or filled up to ``length``."""
    table = np.array(ids if length is None else ids[:length], dtype=np.int64)
    table[table == NULL_BLOCK] = NO_BLOCK
    if length is not None and len(table) < length:
        table = np.append(table, np.full(length - len(table), NO_BLOCK))
    return table
