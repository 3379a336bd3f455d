"""The engine's own device blocks: reference counts, and a prefix cache over the free ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvferry.cache import reach
from kvferry.core.keys import Key, Keys
from kvferry.errors import InputError, IntegrityError
from kvferry.hints import Hints
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.tools.demo.model import Span
from kvferry.types import RequestId


class BlockPool:
    """The blocks of one group: reference counts and the index from key to block.

    A free block keeps its content and its key until it is allocated again, so the free blocks are
    the prefix cache, oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.index: dict[Key, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks

    def allocate(self, count: int) -> list[int]:
        """Take the ``count`` oldest free blocks and forget their content."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self.index[key]
            self._num_holders[block] = 1
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each block: a request or a transfer."""
        for block in blocks:
            self._num_holders[block] += 1
            self.free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less. Give the blocks in order: the last one is reused first."""
        for block in reversed(blocks):
            if block == NO_BLOCK:
                continue
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self.free[block] = None
                if self._keys[block] is None:  # nothing to lose: allocate it first
                    self.free.move_to_end(block, last=False)

    def publish(self, block: int, key: Key) -> None:
        """Index a held block by its key. A key that is indexed already keeps its block."""
        if key not in self.index:
            self.index[key], self._keys[block] = block, key

    def check_integrity(self) -> None:
        """Prove that no block is held and that the index and the blocks' keys agree."""
        if any(self._num_holders) or len(self.free) != len(self._num_holders):
            raise IntegrityError(f"{len(self.free)} of {len(self._num_holders)} blocks are free")
        if self.index != {key: at for at, key in enumerate(self._keys) if key is not None}:
            raise IntegrityError("the index and the keys of the blocks differ")


Tables = list[list[int]]
"""A request's device blocks by group and position; NO_BLOCK where a window has passed."""


class DeviceMemory:
    """Owns one block pool per group. Requests own the tables, the runner owns the bytes.

    ::

        full attention   | 3 | 7 | 1 | 0 | 4 |            every block from the first token
        sliding window   | - | - | - | 5 | 2 |            only what the next token can see
    """

    def __init__(self, groups: Sequence[reach.Group], num_blocks: int) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self.block_tokens = groups[0].block_tokens

    def acquire(self, keys: Keys) -> tuple[int, Tables]:
        """Find the longest hit in all groups. Returns its tokens and tables with its blocks."""
        found = [np.array([key in pool.index for key in keys], np.bool_) for pool in self.pools]
        num_tokens = reach.longest_hit(self.groups, found, len(keys) * self.block_tokens)
        tables: Tables = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            needed = reach.needed(group, num_tokens)
            blocks = [pool.index[key] for key in keys[needed.start : needed.stop]]
            pool.hold(blocks)
            tables.append([NO_BLOCK] * (num_tokens // self.block_tokens - len(blocks)) + blocks)
        return num_tokens, tables

    def can_grow(self, *requests: tuple[Tables, int]) -> bool:
        """Whether these tables could all grow to cover so many tokens."""
        return all(
            sum(self._missing(tables[g], n) for tables, n in requests) <= len(pool.free)
            for g, pool in enumerate(self.pools)
        )

    def grow(self, tables: Tables, num_tokens: int) -> None:
        """Make the tables cover every token up to ``num_tokens``, to compute them."""
        for pool, table in zip(self.pools, tables, strict=True):
            table += pool.allocate(self._missing(table, num_tokens))

    def grow_for_load(self, tables: Tables, num_tokens: int, computed_tokens: int) -> None:
        """Make the tables hold what a hit of ``num_tokens`` needs beyond ``computed_tokens``."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            needed = reach.needed(group, num_tokens, computed_tokens=computed_tokens)
            num_unread = self._missing(table, num_tokens) - len(needed)
            table += [NO_BLOCK] * num_unread + pool.allocate(len(needed))

    def publish(self, tables: Tables, keys: Keys, blocks: range) -> None:
        """Index the blocks at these positions by their keys."""
        for at in blocks:
            for pool, table in zip(self.pools, tables, strict=True):
                if table[at] != NO_BLOCK:
                    pool.publish(table[at], keys[at])

    def trim(self, tables: Tables, num_tokens: int) -> None:
        """Release the blocks that no token from ``num_tokens`` on can see."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            passed = min(max(0, group.first_token(num_tokens)) // self.block_tokens, len(table))
            pool.release(table[:passed])
            table[:passed] = [NO_BLOCK] * passed

    def cut(self, tables: Tables, num_tokens: int) -> None:
        """Release everything from ``num_tokens`` on."""
        first = -(-num_tokens // self.block_tokens)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table[first:])
            del table[first:]

    def check_integrity(self) -> None:
        """Prove that every block is free, and cached under its key or not at all."""
        for pool in self.pools:
            pool.check_integrity()

    def _missing(self, table: list[int], num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_tokens) - len(table))


class ServedState(Enum):
    """The state of a request. A waiting request has no blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True)
class Turn:
    """One answered request: its answer, the sources of its prompt, its time to first token."""

    id: str
    answer: list[int]
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    prefilled_tokens: int
    first_token_seconds: float


@dataclass(eq=False)
class ServedRequest:
    """A prompt, its generated tokens, and the tables of the blocks with its KV.

    ::

        tokens   | prompt ................ | generated ... |
        computed | on device | loaded | computed here |    ^ next token to feed
        tables   | b0 | b1 | b2 | ...                 |    one per group
    """

    id: RequestId
    prompt: Sequence[int]
    max_new_tokens: int
    arrival: float = 0.0
    hints: Hints | None = None
    state: ServedState = ServedState.WAITING
    tokens: list[int] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    keys: Keys = field(default_factory=Keys.empty)
    ferried: Request | None = None
    """The same request in kvferry's scheduler."""

    num_computed: int = 0
    num_loading: int = 0
    first_token_at: float | None = None
    num_device_hits: int = 0
    num_loaded: int = 0
    num_prefilled: int = 0

    def __post_init__(self) -> None:
        if not len(self.prompt) or self.max_new_tokens < 1:
            raise InputError(f"request {self.id} needs a prompt and at least 1 token to generate")
        self.tokens = [int(token) for token in self.prompt]

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def turn(self) -> Turn:
        """The answer and its figures. The request must have its first token."""
        assert self.first_token_at is not None
        return Turn(
            id=self.id,
            answer=self.generated,
            prompt_tokens=len(self.prompt),
            device_tokens=self.num_device_hits,
            host_tokens=self.num_loaded,
            prefilled_tokens=self.num_prefilled,
            first_token_seconds=self.first_token_at - self.arrival,
        )

    def span(self, count: int) -> Span:
        """Its next ``count`` tokens, for the model."""
        start = self.num_computed
        tokens = np.array(self.tokens[start : start + count], dtype=np.int64)
        tables = tuple(np.array(table, dtype=np.int64) for table in self.tables)
        return Span(tokens, start, tables)
