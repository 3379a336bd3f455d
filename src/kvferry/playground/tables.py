"""Block tables of requests, one per group, over the group's own device blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry import reach
from kvferry.keys import Keys
from kvferry.playground.blocks import BlockPool
from kvferry.scheduler import NO_BLOCK

Tables = list[list[int]]
"""A request's device blocks by group and position; NO_BLOCK where a window has passed."""


class DeviceMemory:
    """The device blocks of all groups, and what a request needs of each.

    Owns one pool per group; leaves the tables to the requests and the bytes to the runner.

    ::

        full attention   | 3 | 7 | 1 | 0 | 4 |            every block from the first token
        sliding window   | - | - | - | 5 | 2 |            only what the next token can see
    """

    def __init__(self, groups: Sequence[reach.Group], num_blocks: int) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self.block_tokens = groups[0].block_tokens

    @property
    def num_allocated(self) -> int:
        """Blocks handed out so far, over all groups."""
        return sum(pool.num_allocated for pool in self.pools)

    def new_tables(self) -> Tables:
        return [[] for _ in self.groups]

    def acquire(self, keys: Keys) -> tuple[int, Tables]:
        """The longest hit all groups can serve from the device, and tables that hold its blocks."""
        present = [np.array([pool.has(key) for key in keys], dtype=np.bool_) for pool in self.pools]
        num_tokens = reach.longest_hit(self.groups, present, len(keys) * self.block_tokens)
        tables = self.new_tables()
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            needed = reach.needed(group, num_tokens)
            table += [NO_BLOCK] * (num_tokens // self.block_tokens - len(needed))
            table += pool.acquire(keys[needed.start : needed.stop])
        return num_tokens, tables

    def can_ever_hold(self, num_tokens: int, step_tokens: int) -> bool:
        """Whether one request of this length fits the empty device."""
        return all(
            _most_blocks(group, num_tokens, step_tokens) <= self.num_blocks for group in self.groups
        )

    def can_hold(self, requests: Iterable[tuple[Tables, int]], step_tokens: int) -> bool:
        """Whether these requests, with the tables they have, could all grow to their lengths."""
        missing = [0] * len(self.groups)
        for tables, num_tokens in requests:
            for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
                most = _most_blocks(group, num_tokens, step_tokens)
                missing[g] += max(0, most - _num_held(table))
        return all(
            pool.can_allocate(count) for pool, count in zip(self.pools, missing, strict=True)
        )

    def can_grow(self, tables: Tables, num_tokens: int) -> bool:
        """Whether there are blocks for every token up to ``num_tokens``, in all groups."""
        return all(
            pool.can_allocate(self._num_blocks(num_tokens) - len(table))
            for pool, table in zip(self.pools, tables, strict=True)
        )

    def grow(self, tables: Tables, num_tokens: int) -> None:
        """Make the tables cover every token up to ``num_tokens``, to compute them."""
        for pool, table in zip(self.pools, tables, strict=True):
            table += pool.allocate(max(0, self._num_blocks(num_tokens) - len(table)))

    def grow_for_load(self, tables: Tables, num_tokens: int, computed_tokens: int) -> None:
        """Make the tables hold what a hit of ``num_tokens`` needs beyond ``computed_tokens``."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            needed = reach.needed(group, num_tokens, computed_tokens=computed_tokens)
            num_missing = num_tokens // self.block_tokens - len(table)
            table += [NO_BLOCK] * (num_missing - len(needed))
            table += pool.allocate(len(needed))

    def publish(self, tables: Tables, keys: Keys, blocks: range) -> None:
        """Make these positions' blocks findable by their keys."""
        for at in blocks:
            for pool, table in zip(self.pools, tables, strict=True):
                if table[at] != NO_BLOCK:
                    pool.publish(table[at], keys[at])

    def trim(self, tables: Tables, num_tokens: int) -> None:
        """Release what no token from ``num_tokens`` on can see."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            passed = max(0, group.first_token(num_tokens)) // self.block_tokens
            pool.release([block for block in table[:passed] if block != NO_BLOCK])
            table[:passed] = [NO_BLOCK] * min(passed, len(table))

    def cut(self, tables: Tables, num_tokens: int) -> None:
        """Release everything from ``num_tokens`` on."""
        for pool, table in zip(self.pools, tables, strict=True):
            first = self._num_blocks(num_tokens)
            pool.release([block for block in table[first:] if block != NO_BLOCK])
            del table[first:]

    def check_integrity(self, *, num_held: int | None = None) -> None:
        for pool in self.pools:
            pool.check_integrity(num_held=num_held)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


def _most_blocks(group: reach.Group, num_tokens: int, step_tokens: int) -> int:
    """Blocks one request can hold at a time on its way to ``num_tokens``."""
    everything = -(-num_tokens // group.block_tokens)
    if group.look_back is None:
        return everything
    return min(everything, -(-(group.look_back + step_tokens) // group.block_tokens) + 1)


def _num_held(table: list[int]) -> int:
    return sum(block != NO_BLOCK for block in table)
