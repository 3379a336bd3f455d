"""Servers ask a shared store of packs for chains that part, many at a time, and in any order.

Whoever else asks, whatever they were told and whenever: a request gets as many blocks as it would
have found alone, and is not kept waiting for ever. And what one server has written, whatever else
it wrote before with the same beginning, any other finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.fakes.desk import Desk
from tests.fakes.packed_store import PackedStore, brought, packing
from tests.model.test_packs_stateful import chain_of

from kvferry.keys import Keys

LENGTH, MOST = 9, 4

_chains = st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH).map(
    lambda turns: Keys.from_bytes(chain_of([0, 0, *turns]))
)
_servers = st.integers(0, 1)


class Servers(RuleBasedStateMachine):
    """Two of them on one store. Objects only come, so what was there once is found."""

    @initialize(pack=st.integers(1, MOST))
    def begin(self, pack: int) -> None:
        self.store = PackedStore()
        self.pack = pack
        self.desks = [Desk(levels=[packing(most_in_one=MOST)], slots=1024) for _ in range(2)]
        self.waiting: list[tuple[int, str, Keys, int, int]] = []
        self.num_requests = 0

    @rule(server=_servers, chains=st.lists(_chains, min_size=1, max_size=3), cut=st.integers(0, 6))
    def ask(self, server: int, chains: Sequence[Keys], cut: int) -> None:
        """Requests that come in one step."""
        for chain in chains:
            name = f"r{self.num_requests}"
            self.num_requests += 1
            alone = self.store.found(chain, np.zeros(len(chain), dtype=np.int64))
            length = alone.index(False) if False in alone else len(alone)
            most = max(0, 4 * len(chain) - cut)
            self.waiting.append((server, name, chain, most, min(length, most // 4)))
            self.desks[server].match(name, chain, most=most)

    @rule(server=_servers)
    def step(self, server: int) -> None:
        """What was asked goes off; others may come before it is answered."""
        self.desks[server].plan()

    @rule(server=_servers, last=st.booleans())
    def answer(self, server: int, last: bool) -> None:
        """One question is answered, not always the oldest."""
        desk = self.desks[server]
        if desk.asked:
            later = desk.asked[:-1] if last else desk.asked[1:]
            desk.asked = desk.asked[-1:] if last else desk.asked[:1]
            self.store.say(desk)
            desk.asked = later

    @rule(server=_servers, seconds=st.sampled_from([0.0, 1.0, 11.0]))
    def all_get_theirs(self, server: int, seconds: float) -> None:
        desk = self.desks[server]
        for whose, name, chain, most, expected in self.waiting:
            if whose == server:
                assert brought(desk, name, chain, self.store, most=most) >= expected
                desk.scheduler.finish(name)
        self.waiting = [each for each in self.waiting if each[0] != server]
        desk.now += seconds
        desk.check_empty()


class Askers(Servers):
    """They only ask, for what others wrote, whole or in part."""

    @rule(chain=_chains, start=st.integers(0, LENGTH), most=st.integers(1, MOST))
    def write(self, chain: Keys, start: int, most: int) -> None:
        """A third server has written a part of a chain."""
        going = chain[start:] if start < len(chain) else chain
        self.store.put(going, most)


class Writers(Servers):
    """They write what they compute themselves."""

    @rule(server=_servers, chain=_chains, pack=st.integers(1, MOST))
    def compute(self, server: int, chain: Keys, pack: int) -> None:
        """A server stores a whole chain, which is written through: others find it by itself."""
        desk = self.desks[server]
        self.store.serve(desk, pack)
        level = desk.scheduler._parts.lower.levels[0]
        last = chain[len(chain) - 1 :]
        is_new = not (desk.pool.known(last) | level.known(last, desk.now))[0]
        name = f"c{self.num_requests}"
        self.num_requests += 1
        self.store.keep(desk, name, chain, pack)
        if is_new:
            assert all(self.store.found(chain, np.zeros(len(chain), dtype=np.int64)))


TestAskers = Askers.TestCase
TestAskers.settings = settings(max_examples=100, stateful_step_count=15, deadline=None)
TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=100, stateful_step_count=15, deadline=None)
