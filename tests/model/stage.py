"""What the serving engine of these tests is made of: models, stories, device blocks, ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tests.fakes.memory_tiers import KeyedMemoryTier, MemoryTier

from kvferry.cache import reach
from kvferry.core.identity import Namespace, chain, scope
from kvferry.core.keys import Key
from kvferry.errors import TransferError
from kvferry.hostmem.slots import HostTier
from kvferry.scheduler.tier import WriteMode
from kvferry.tiers.contract import Way
from kvferry.tiers.movers import TierMover
from kvferry.types import Question, Rank, TierName, Transfer, TransferId

Values = npt.NDArray[np.uint64]

VALUE_BYTES = 8
STAIN = 1 << 20
LONG_AGO = 1 << 16

KINDS: dict[str, tuple[reach.Group, ...]] = {
    "full": (reach.FullAttention(4),),
    "window": (reach.FullAttention(4), reach.SlidingWindow(4, window=11)),
    "recurrent": (reach.FullAttention(4), reach.RecurrentState(4)),
    "chunked": (reach.FullAttention(4), reach.ChunkedLocal(4, chunk=24)),
    "pairs": (reach.FullAttention(8),),
    "pairs and window": (reach.FullAttention(8), reach.SlidingWindow(8, window=18)),
    "three": (
        reach.FullAttention(8),
        reach.SlidingWindow(8, window=16),
        reach.RecurrentState(16),
    ),
    "window of pairs": (reach.FullAttention(4), reach.SlidingWindow(8, window=9)),
    "window alone": (reach.SlidingWindow(4, window=7),),
    "chunks alone": (reach.ChunkedLocal(4, chunk=8),),
}
"""Models by the shape of their layers."""


@dataclass(frozen=True)
class Setup:
    """One model, one server, and what lies below it."""

    kind: str = "full"
    hash_tokens: int = 4
    num_ranks: int = 1
    num_slots: int = 24
    num_blocks: int = 32
    tiers: tuple[tuple[int | None, WriteMode], ...] = ()
    """Places (None: it finds blocks by their keys) and write mode of each, nearest first."""
    joins_loads: bool = True
    piece_slots: int = 0
    """With any, hits are loaded while they come up, in pieces of so many blocks."""
    bounded: bool = True
    stores_late: bool = False
    """Requests that end leave what is not stored, to be stored later or by the next turn."""
    store_threshold: int = 1
    load_policy: str = "always"
    longest: int = 96
    num_stories: int = 6
    seed: int = 0

    @property
    def groups(self) -> tuple[reach.Group, ...]:
        return KINDS[self.kind]


class Stories:
    """What is asked: token sequences, half of which go on from inside an earlier one."""

    def __init__(self, setup: Setup) -> None:
        rng = np.random.default_rng(setup.seed)
        self.tokens: list[npt.NDArray[np.int64]] = []
        for number in range(setup.num_stories):
            tokens = rng.integers(0, 1 << 30, setup.longest)
            if number % 2:
                shared = int(rng.integers(1, setup.longest))
                tokens[:shared] = self.tokens[int(rng.integers(number))][:shared]
            self.tokens.append(tokens)
        self.keys = [chain(_namespace(setup.hash_tokens), tokens) for tokens in self.tokens]
        # What a block holds depends on the group and every token up to its end.
        self.ends = [
            [chain(_namespace(g.block_tokens), tokens) for g in setup.groups]
            for tokens in self.tokens
        ]
        self.values: list[list[Values]] = [
            [keys.array[:, 0] ^ np.uint64(g) for g, keys in enumerate(by_group)]
            for by_group in self.ends
        ]


@lru_cache
def _namespace(block_tokens: int) -> Namespace:
    return Namespace(
        model="serving", dtype="none", layout="none", geometry="none", block_tokens=block_tokens
    )


@lru_cache(maxsize=4096)
def salt(what: int) -> np.uint64:
    return np.uint64(int.from_bytes(scope(what, LONG_AGO)[:VALUE_BYTES], "little"))


class Device:
    """One group's device blocks: values, reference counts, a free queue that is a prefix cache."""

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self.values = np.zeros((num_ranks, num_blocks), dtype=np.uint64)
        self.expected = np.zeros(num_blocks, dtype=np.uint64)
        self.holders = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cache: dict[int, int] = {}
        self.cached_as: dict[int, tuple[int, bytes]] = {}

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self.free)
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.forget(block)
            self.holders[block] = 1
        self.values[:, blocks] = 0xDEAD
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
            self.free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            assert self.holders[block] > 0, f"device block {block} was released by nobody"
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.cached_as)

    def publish(self, block: int, value: int, key: bytes) -> None:
        if value not in self.cache:
            self.forget(block)
            self.cache[value] = block
            self.cached_as[block] = (value, key)

    def forget(self, block: int) -> None:
        known = self.cached_as.pop(block, None)
        if known is not None:
            del self.cache[known[0]]

    def forget_all(self) -> None:
        self.cache.clear()
        self.cached_as.clear()


@dataclass(eq=False)
class Served:
    """One request: ``waiting`` without blocks, ``loading`` into some, or ``running``."""

    id: str
    story: int
    prompt: int
    target: int
    tables: list[list[int]]
    state: str = "waiting"
    computed: int = 0
    published: int = 0
    loading: tuple[int, int, int] = (0, 0, 0)
    stained: bool = False


@dataclass
class RankSide:
    """One rank's worker: what it was given and has not done, its host memory, its lower tiers.

    ``submitted`` says how often a tier had forgotten everything when an order reached it.
    """

    rank: Rank
    host: HostTier
    tiers: dict[TierName, MemoryTier | KeyedMemoryTier] = field(default_factory=dict)
    movers: dict[TierName, TierMover] = field(default_factory=dict)
    todo: list[Transfer | Question] = field(default_factory=list)
    submitted: dict[TransferId, int] = field(default_factory=dict)
    mood: str = "ok"

    def fault(self, way: Way, key: Key) -> None:
        """``some``: half of all blocks, by their keys, another half on each rank."""
        if self.mood in ("fail", "refuse") or (self.mood == "some" and key[self.rank] & 1):
            raise TransferError(f"injected: no {way.value} today")


def single(group: reach.Group) -> reach.Group:
    """The same layers with slots of one block: how the engine's own cache sees them."""
    if isinstance(group, reach.SlidingWindow):
        return reach.SlidingWindow(group.block_tokens, window=group.window)
    if isinstance(group, reach.ChunkedLocal):
        return reach.ChunkedLocal(group.block_tokens, chunk=group.chunk)
    return type(group)(group.block_tokens)
