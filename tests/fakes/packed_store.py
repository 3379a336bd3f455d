"""A store of objects with several blocks, as tiers that ask it hear of it: no bytes, only answers.

What is asked and said goes through the parts that the real store's process has for that.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tests.fakes.desk import Desk

from kvferry.core.keys import Keys
from kvferry.scheduler.tier import PackedTier, WriteMode
from kvferry.tiers.remote.objects import PackLookup, pack_objects
from kvferry.types import HOST, MatchState, Outcome, Rank, Receipt, TierName, Transfer

STORE = TierName("store")
MOST = 16


def packing(write: WriteMode = WriteMode.THROUGH, most_in_one: int = MOST) -> PackedTier:
    return PackedTier(STORE, write, capacity=1000, most_in_one=most_in_one)


class PackedStore:
    """Which objects there are, by name, and how many blocks each has. Servers share it."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.num_heads = 0

    def put(self, keys: Keys, most: int, runs: np.ndarray | None = None) -> None:
        """Blocks that follow each other, as a server with this setting writes them."""
        runs = np.zeros(len(keys), dtype=np.int64) if runs is None else runs
        for parcel in pack_objects(names(keys), runs, most):
            there = self.counts.get(parcel.name, 0)
            self.counts[parcel.name] = max(there, parcel.num_blocks)

    def found(self, keys: Keys, runs: np.ndarray | None, most: int = 8) -> list[bool]:
        """What a process says that is asked this, and writes so many blocks into one object."""
        asked = names(keys)
        lookup = PackLookup(asked, runs, lambda of, at: False)
        for at in lookup.order(most):
            if not lookup.is_answered(at):
                self.num_heads += 1
                if asked[at] in self.counts:
                    lookup.found(at, self.counts[asked[at]])
        there = {at for parcel in lookup.objects() for at in parcel.positions}
        return [at in there for at in range(len(asked))]

    def say(self, desk: Desk) -> None:
        """Answer everything this server has asked."""
        receipts = []
        for question in desk.asked:
            ok = self.found(Keys(question.keys), question.runs)
            failed = tuple(at for at, is_there in enumerate(ok) if not is_there)
            outcome = Outcome.PARTIAL if failed else Outcome.OK
            receipts.append(Receipt(question.id, Rank(0), outcome, failed=failed))
        desk.asked = []
        desk.scheduler.settle(receipts)

    def take(self, moves: Iterable[Transfer], most: int) -> None:
        """Write what goes down there."""
        for move in moves:
            if move.dst == STORE:
                assert move.keys is not None
                self.put(Keys(move.keys), most, move.runs)

    def serve(self, desk: Desk, most: int = 8) -> None:
        """Everything under way ends, and what that brings about."""
        while True:
            sent = desk.plan()
            self.take(sent, most)
            if desk.asked:
                self.say(desk)
            elif desk.flying:
                desk.land()
            else:
                return

    def keep(self, desk: Desk, name: str, chain: Keys, most: int = 8) -> None:
        """A whole life, and what goes down by that."""
        desk.store(name, chain, 4 * len(chain))
        desk.scheduler.finish(name)
        self.serve(desk, most)


def names(keys: Keys) -> list[str]:
    return [bytes(key).hex() for key in keys]


def brought(
    desk: Desk,
    name: str,
    chain: Keys,
    store: PackedStore,
    most: int | None = None,
    computed: int = 0,
) -> int:
    """How many blocks a request has in the end, with what comes up for it into the host."""
    for _ in range(8):
        match = desk.match(name, chain, computed, most)
        if match.state is not MatchState.WAIT:
            return match.num_tokens // 4
        store.serve(desk)
    raise AssertionError(f"{name} waits for ever")


def promoted(moves: Iterable[Transfer]) -> list[Keys]:
    return [Keys(move.keys) for move in moves if move.dst == HOST and move.keys is not None]
