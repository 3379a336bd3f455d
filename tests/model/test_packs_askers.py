"""Servers ask a shared store of packs for chains that part, many at a time, and in any order.

Whoever else asks, whatever they were told and whenever: a request gets as many blocks as it would
have found alone before the time for which a "no" is believed, and is not kept waiting for ever.
Nobody asks what was just answered to another with the same prompt. And what one server has written,
whatever else it wrote before with the same beginning, any other finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.fakes.desk import Desk
from tests.fakes.packed_store import PackedStore, brought, packing
from tests.model.test_packs_stateful import chain_of

from kvferry.core.keys import Keys
from kvferry.scheduler.tier import REMEMBER_SECONDS

LENGTH, MOST = 9, 4

_few_turns = st.builds(
    lambda common, way, own: [0] * common + [way] * own,
    st.sampled_from([2, 3]),
    st.integers(1, 2),
    st.sampled_from([0, 2, 4]),
)
"""So few that two often ask for the same, or part inside an object."""

_turns = st.one_of(_few_turns, _few_turns, st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH))
_chains = _turns.map(lambda turns: Keys.from_bytes(chain_of([0, 0, *turns])))
_servers = st.integers(0, 1)


class Asked(NamedTuple):
    """A prompt, how many of its blocks the engine has, and how many tokens a hit may have."""

    chain: Keys
    computed: int
    most: int


_requests = st.builds(
    lambda chain, computed, cut: Asked(
        chain, min(computed, len(chain) - 1), max(0, 4 * len(chain) - cut)
    ),
    _chains,
    st.sampled_from([0, 0, 0, 1, 2, 4]),
    st.integers(0, 6),
)


class Servers(RuleBasedStateMachine):
    """Two of them on one store, each with a clock. Objects only come.

    What was there for as long as a "no" is believed is found, and at once what one wrote oneself.
    """

    @initialize(long_ago=st.lists(st.tuples(_chains, st.integers(1, MOST)), min_size=1, max_size=3))
    def begin(self, long_ago: list[tuple[Keys, int]]) -> None:
        self.store = PackedStore()
        self.desks = [Desk(tiers=[packing(most_in_one=MOST)], slots=1024) for _ in range(2)]
        self.waiting: list[tuple[int, str, Asked, int]] = []
        self.num_requests = 0
        self.came: list[tuple[list[float], int | None, dict[str, int]]] = []
        self.before: dict[str, int] = {}
        for chain, most in long_ago:
            self.store.put(chain, most)
        self.note(None)
        for desk in self.desks:
            desk.now += 2 * REMEMBER_SECONDS

    def note(self, writer: int | None) -> None:
        """Objects have come since the last time, from one of them or from a third."""
        news = dict(self.store.counts.items() - self.before.items())
        self.came.append(([desk.now for desk in self.desks], writer, news))
        self.before = dict(self.store.counts)

    def sure(self, server: int, asked: Asked) -> int:
        """How long its hit is, at least, whatever this server was told before."""
        surely = PackedStore()
        for times, writer, objects in self.came:
            if writer == server or times[server] <= self.desks[server].now - REMEMBER_SECONDS:
                surely.counts |= objects  # those of one name only grow
        chain = asked.chain[asked.computed :]
        found = [*surely.found(chain, np.zeros(len(chain), dtype=np.int64)), False]
        return min(asked.computed + found.index(False), max(asked.most // 4, asked.computed))

    def gets(self, server: int, name: str, asked: Asked) -> int:
        desk, most = self.desks[server], asked.most
        computed = 4 * asked.computed
        return brought(desk, name, asked.chain, self.store, most=most, computed=computed)

    @rule(server=_servers, requests=st.lists(_requests, min_size=1, max_size=3))
    def ask(self, server: int, requests: Sequence[Asked]) -> None:
        """Requests that come in one step."""
        for asked in requests:
            name = f"r{self.num_requests}"
            self.num_requests += 1
            self.waiting.append((server, name, asked, self.sure(server, asked)))
            self.desks[server].match(name, asked.chain, 4 * asked.computed, asked.most)

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

    @rule(server=_servers, seconds=st.sampled_from([0.0, 1.0, 5.0, 9.0, 11.0]))
    def all_get_theirs(self, server: int, seconds: float) -> None:
        """Then time goes by for this server."""
        desk = self.desks[server]
        mine = [each for each in self.waiting if each[0] == server]
        for _, name, asked, expected in mine:
            assert self.gets(server, name, asked) >= expected
            desk.scheduler.finish(name)
        for _, name, asked, _ in mine:
            self.nobody_asks_twice(server, name, asked)
        self.waiting = [each for each in self.waiting if each[0] != server]
        self.note(server)
        desk.now += seconds
        desk.check_empty()

    @rule(server=_servers, requests=st.lists(_requests, min_size=2, max_size=6))
    def come_in_turn(self, server: int, requests: Sequence[Asked]) -> None:
        """Each when the one before has gone, within the time for which a "no" is believed."""
        for asked in requests:
            self.ask(server, [asked])
            self.all_get_theirs(server, 0.5)

    def nobody_asks_twice(self, server: int, name: str, asked: Asked) -> None:
        """The next with the same prompt, whom we may have to ask for; and the one after him."""
        first = self.gets(server, f"{name}, the next", asked)
        heads = self.store.num_heads
        assert self.gets(server, f"{name}, the one after", asked) == first
        assert self.store.num_heads == heads, "what was just asked was asked again"
        for each in ("next", "one after"):
            self.desks[server].scheduler.finish(f"{name}, the {each}")


class Askers(Servers):
    """They only ask, for what others wrote, whole or in part."""

    @rule(chain=_chains, start=st.integers(0, LENGTH), most=st.integers(1, MOST))
    def write(self, chain: Keys, start: int, most: int) -> None:
        """A third server has written a part of a chain."""
        going = chain[start:] if start < len(chain) else chain
        self.store.put(going, most)
        self.note(None)


class Writers(Servers):
    """They write what they compute themselves."""

    @rule(server=_servers, chain=_chains, pack=st.integers(1, MOST))
    def compute(self, server: int, chain: Keys, pack: int) -> None:
        """A server stores a whole chain, which is written through: others find it by itself."""
        desk = self.desks[server]
        self.store.serve(desk, pack)
        tier = desk.scheduler.lower.tiers[0]
        last = chain[len(chain) - 1 :]
        is_new = not (desk.pool.known(last) | tier.known(last, desk.now))[0]
        name = f"c{self.num_requests}"
        self.num_requests += 1
        self.store.keep(desk, name, chain, pack)
        self.note(server)
        if is_new:
            assert all(self.store.found(chain, np.zeros(len(chain), dtype=np.int64)))


TestAskers = Askers.TestCase
TestAskers.settings = settings(max_examples=100, stateful_step_count=15, deadline=None)
TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=100, stateful_step_count=15, deadline=None)
