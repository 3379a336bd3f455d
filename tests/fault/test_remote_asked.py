"""What a server asks a store of packs, and what it need not ask again: counted at real S3 servers.

The scheduler and the store's own process are the real ones; the clock is the test's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from tests.fakes import remote, s3_servers
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk

from kvferry.core.keys import Keys
from kvferry.hostmem.slots import HostTier
from kvferry.scheduler.tier import REMEMBER_SECONDS, PackedTier, WriteMode
from kvferry.tiers.contract import Way
from kvferry.tiers.movers import TierMover
from kvferry.types import DEVICE, HOST, MatchState

every_server = pytest.mark.parametrize("kind", s3_servers.SERVERS)

SYSTEM = list(range(10))
A = keys([*SYSTEM, *range(100, 120)])
B = keys([*SYSTEM, *range(200, 220)])
SECRET = secrets.token_bytes(32)
"""What blocks hold is other bytes in every run."""


def contents(chain: Keys) -> np.ndarray:
    rows = [hashlib.shake_256(SECRET + bytes(key)).digest(remote.SIZE) for key in chain]
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), remote.SIZE)


class Server:
    """Everything below an engine: a scheduler, host memory, a tier with its process."""

    def __init__(self, endpoint: str, namespace: bytes) -> None:
        rank_tier = remote.open_s3(endpoint, remote.SIZE, namespace=namespace, pack=8)
        self.host = HostTier(128, remote.SIZE)
        self.host.rows[:] = 0xEE
        self.mover = TierMover(self.host, rank_tier)
        tier = PackedTier(rank_tier.name, WriteMode.THROUGH, most_in_one=self.mover.most_in_one)
        self.desk = Desk(
            tiers=[tier],
            slots=128,
            lookup_deadline=60.0,
            promote_deadline=60.0,
            store_deadline=60.0,
        )
        self.num_requests = 0

    def ask(self, chain: Keys) -> int:
        """A request comes; how many blocks it has in the end. Those that came up are right."""
        name = f"r{self.num_requests}"
        self.num_requests += 1
        while (match := self.desk.match(name, chain)).state is MatchState.WAIT:
            self.step()
        self.desk.scheduler.finish(name)
        return match.num_tokens // 4

    def keep(self, chain: Keys) -> None:
        """It computes this, and what it stores is written through."""
        self.desk.store("writer", chain, 4 * len(chain))
        self.desk.scheduler.finish("writer")
        while self.desk.scheduler.num_in_flight or self.desk.scheduler.num_queued:
            self.step()

    def step(self) -> None:
        """Everything that is to be done now is done."""
        plan = self.desk.scheduler.plan()
        for question in plan.questions:
            self.mover.ask(question)
        receipts = []
        up = []
        for move in plan.transfers:
            if move.src == DEVICE:
                receipts += self.desk.receipts(move)
                continue
            assert move.keys is not None
            if move.src == HOST:
                self.host.rows[move.src_slots] = contents(Keys(move.keys))
            else:
                up.append(move)
            self.mover.submit(move)
        receipts += self.mover.drain(remote.LONG)
        for move in up:
            assert move.keys is not None
            assert (self.host.rows[move.dst_slots] == contents(Keys(move.keys))).all()
        self.desk.scheduler.settle(receipts)


@pytest.fixture
def door(kind: str) -> Iterator[s3_servers.Door]:
    made = s3_servers.Door(s3_servers.server(kind))
    yield made
    made.fault = None
    made.close()


@pytest.fixture
def servers(door: s3_servers.Door) -> Iterator[list[Server]]:
    """One that goes through the door, and another that does not; they share what they write."""
    namespace = secrets.token_bytes(32)
    made = [Server(endpoint, namespace) for endpoint in (door.endpoint, door.behind.endpoint)]
    yield made
    for each in made:
        each.mover.close()


def looked_up(door: s3_servers.Door) -> list[bytes]:
    """The names that are asked for from now on."""
    names: list[bytes] = []
    door.fault = lambda way, name: names.append(name) if way is Way.FIND else None
    return names


@every_server
def test_the_second_with_an_unknown_prompt_asks_the_server_nothing(
    door: s3_servers.Door, servers: list[Server]
) -> None:
    ours, theirs = servers
    names = looked_up(door)
    assert ours.ask(A) == 0
    assert sorted(names) == sorted(A)
    names.clear()
    for now in (0.0, REMEMBER_SECONDS - 1.0):
        ours.desk.now = now
        assert ours.ask(A) == 0
        assert ours.ask(A + B) == 0, "it goes on, but could lie in no other object"
    assert names == []
    theirs.keep(A)
    ours.desk.now = REMEMBER_SECONDS
    assert ours.ask(A) == len(A), "what another wrote is found when the time is over"
    assert names


@every_server
def test_a_prompt_that_leaves_another_inside_an_object_spoils_no_hit(
    door: s3_servers.Door, servers: list[Server]
) -> None:
    ours, theirs = servers
    theirs.keep(B)
    names = looked_up(door)
    assert ours.ask(A) == 8, "B's second object begins with 8 and 9, and has the name of B's 15"
    assert ours.ask(B) == len(B), "that A does not find them says nothing to B"
    names.clear()
    assert ours.ask(A) == len(SYSTEM), "what came up for B A has, too"
    assert ours.ask(B) == len(B)
    assert names == []


@pytest.mark.parametrize("kind", ["moto"])
def test_what_this_server_wrote_after_it_was_told_no_is_found(
    door: s3_servers.Door, servers: list[Server]
) -> None:
    ours, theirs = servers
    assert ours.ask(A) == 0
    ours.keep(A)
    ours.desk.pool.reset()
    assert ours.ask(A) == len(A)
    assert theirs.ask(A) == len(A)
