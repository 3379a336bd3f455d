"""A scheduler on a desk: the test speaks for the engine and for every rank, and moves the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.fakes.by_name import ByName, SettledByName
from tests.fakes.crafted_keys import keys as numbered

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import BlockTable
from kvferry.types import (
    DEVICE,
    HOST,
    DeviceBlocks,
    Match,
    MatchState,
    Outcome,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
)

FULL = reach.FullAttention(4)


def story(number: int, num_keys: int) -> Keys:
    """The chain of one conversation: its keys are no one else's."""
    return numbered(range(1000 * number, 1000 * number + num_keys))


class Desk:
    """One scheduler, and what was sent off by it. Owns no bytes: only who was told what."""

    def __init__(
        self,
        *groups: reach.Group,
        slots: int = 16,
        ranks: int = 1,
        blocks: int | None = None,
        tiers: Sequence[LowerTier] = (),
        hash_tokens: int | None = None,
        block_bytes: Sequence[int] = (),
        joins_loads: bool = True,
        spare_tokens: int = 0,
        **settings: object,
    ) -> None:
        self.now = 0.0
        self.pool = Pool(slots, clock=lambda: self.now)
        self.groups = groups or (FULL,)
        self.ranks = range(ranks)
        self.scheduler = ByName(
            self.pool,
            self.groups,
            config=Config(**{"load_policy": "always", **settings}),  # type: ignore[arg-type]
            num_ranks=ranks,
            hash_block_tokens=hash_tokens,
            num_device_blocks=blocks,
            block_bytes=block_bytes,
            tiers=tiers,
            joins_loads=joins_loads,
            spare_tokens=spare_tokens,
            clock=lambda: self.now,
        )
        self.flying: list[Transfer] = []
        self.asked: list[Question] = []
        self.forgotten: list[TierName] = []

    def tables(self, num_tokens: int, first_block: int = 0) -> list[BlockTable]:
        """Tables long enough for these tokens; place p is device block ``first_block + p``."""
        return [
            list(range(first_block, first_block + -(-num_tokens // group.block_tokens)))
            for group in self.groups
        ]

    def store(
        self, request_id: str, keys: Keys, num_tokens: int, first_block: int = 0
    ) -> dict[int, list[int]]:
        """Store the first tokens; returns the device blocks being read, by group."""
        tables = self.tables(num_tokens, first_block)
        return by_group(self.scheduler.store(request_id, keys, tables, num_tokens))

    def match(
        self, request_id: str, keys: Keys, computed: int = 0, most: int | None = None
    ) -> Match:
        return self.scheduler.match(request_id, keys, computed_tokens=computed, max_tokens=most)

    def load(self, request_id: str, num_tokens: int, first_block: int = 0) -> dict[int, list[int]]:
        return by_group(self.scheduler.load(request_id, self.tables(num_tokens, first_block)))

    def plan(self) -> list[Transfer]:
        """Send off what was ordered; returns it."""
        plan = self.scheduler.plan()
        sent = list(plan.transfers)
        self.flying += sent
        self.asked += plan.questions
        self.forgotten += plan.forget
        return sent

    def receipts(self, transfer: Transfer, failed: str = "") -> list[Receipt]:
        outcome = Outcome.FAILED if failed else Outcome.OK
        return [Receipt(transfer.id, Rank(rank), outcome, failed) for rank in self.ranks]

    def land(self, *transfers: Transfer, failed: str = "") -> SettledByName:
        """Every rank answers for these transfers (all, if none is named)."""
        chosen = list(transfers) or list(self.flying)
        self.flying = [t for t in self.flying if t not in chosen]
        return self.scheduler.settle([r for t in chosen for r in self.receipts(t, failed)])

    def say(self, *there: Keys) -> SettledByName:
        """Every rank answers all questions; rank ``r`` has the keys in ``there[r]``."""
        receipts = []
        for question in self.asked:
            for rank, own in zip(self.ranks, there, strict=True):
                asked = Keys(question.keys)
                failed = tuple(at for at, key in enumerate(asked) if key not in set(own))
                outcome = Outcome.PARTIAL if failed else Outcome.OK
                receipts.append(Receipt(question.id, Rank(rank), outcome, failed=failed))
        self.asked = []
        return self.scheduler.settle(receipts)

    def run(self) -> SettledByName:
        """Send off what was ordered and let everything in flight land."""
        self.plan()
        return self.land()

    def keep(self, request_id: str, keys: Keys, num_tokens: int) -> None:
        """A whole life: compute, store, finish, land. These tokens can be matched from now on."""
        self.store(request_id, keys, num_tokens)
        self.scheduler.finish(request_id)
        self.run()

    def hit(self, keys: Keys, computed: int = 0) -> int:
        """How many tokens a stranger would be given right now; claims nothing."""
        match = self.match("stranger", keys, computed)
        assert match.state is not MatchState.WAIT
        self.scheduler.finish("stranger")
        return match.num_tokens

    def check_empty(self) -> None:
        """Nothing is claimed, in flight or queued any more."""
        self.scheduler.check_integrity()
        assert self.pool.num_leases == 0
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.num_queued == 0


def by_group(held: Iterable[DeviceBlocks]) -> dict[int, list[int]]:
    """Device blocks as plain lists; one mention of a group at most."""
    found: dict[int, list[int]] = {}
    for group, blocks in held:
        assert group not in found
        found[group] = blocks.tolist()
    return found


def routes(transfers: Iterable[Transfer]) -> list[tuple[str, str]]:
    return [(t.src, t.dst) for t in transfers]


STORE = (DEVICE, HOST)
