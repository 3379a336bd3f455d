"""Random sequences over a pool whose policy learns: all that a scheduler may tell it, in any order.

After every step the pool proves itself, and the policy's tree must agree with the slots: each held
slot is in one node, in the order of its chain, and the nodes' words and positions fit together.

One-line breaks that were tried; each made this test fail.

- ``RequestTree.leave`` forgets one node; ``RequestTree.split`` leaves the slots in the lower node
- ``RequestTree._put`` does not sort what comes before others; ``RequestTree._hold`` moves no number
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.fakes.crafted_keys import key, keys

from kvferry.cache.policies.contract import Evidence
from kvferry.cache.policies.returns import Returns
from kvferry.cache.policies.returns_tree import WORD
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose

# A tree of conversations: all begin alike, some share more.
CHAINS = [
    [0, 1, *range(10 * branch, 10 * branch + 3), *range(100 * twig, 100 * twig + 4)]
    for branch in (1, 2)
    for twig in (3 * branch, 3 * branch + 1, 3 * branch + 2)
] + [[0, 900 + number] for number in range(3)]
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 9)


class ReturnsMachine(RuleBasedStateMachine):
    """A pool with the policy, its leases, and a clock that may do anything."""

    @initialize(num_slots=st.integers(1, 24), seed=st.integers(0, 3))
    def start(self, num_slots: int, seed: int) -> None:
        self.now = 0.0
        self.pool = Pool(num_slots, lambda each: Returns(each, seed), clock=lambda: self.now)
        self.open: list[Lease] = []

    @property
    def policy(self) -> Returns:
        policy = self.pool.eviction.policy
        assert isinstance(policy, Returns)
        return policy

    @rule(seconds=st.sampled_from([0.01, 1.0, 30.0, 1000.0, 1e7, -5.0, -1e9]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        chain=chains,
        length=lengths,
        tokens=st.integers(0, 10**9),
        store=st.booleans(),
        stay=st.booleans(),
        hinted=st.booleans(),
    )
    def request(
        self, chain: list[int], length: int, tokens: int, store: bool, stay: bool, hinted: bool
    ) -> None:
        """One that is told of, as the scheduler does."""
        asked = keys(chain[:length])
        evidence = Evidence(ended=True) if hinted else None
        self.pool.asked(asked, tokens, self.pool.lookup(asked), evidence)
        if store:
            lease = self.pool.reserve(asked, must_stay=stay)
            if lease is not None:
                lease.commit()

    @rule(chain=chains, length=lengths, first=st.integers(0, 4), chained=st.booleans())
    def reserve(self, chain: list[int], length: int, first: int, chained: bool) -> None:
        """One that nobody told of, or only of others."""
        part = chain[first : first + length]
        if part:
            parent = key(chain[first - 1]) if first and chained else None
            lease = self.pool.reserve(keys(part), parent=parent, chained=chained)
            if lease is not None:
                self.open.append(lease)

    @rule(chain=chains, length=lengths, copy=st.booleans())
    def pin(self, chain: list[int], length: int, copy: bool) -> None:
        purpose = Purpose.COPY if copy else Purpose.READ
        lease = self.pool.lease(keys(chain[:length]), purpose)
        if lease is not None:
            self.open.append(lease)

    @rule(which=st.integers(0, 5), well=st.booleans(), failed=st.booleans())
    def end(self, which: int, well: bool, failed: bool) -> None:
        if which < len(self.open):
            lease = self.open.pop(which)
            lost = [0] if failed else []
            if lease.purpose is Purpose.WRITE:
                lease.commit(lost) if well else lease.abort()
            else:
                lease.release(lost) if well else lease.spoil()

    @rule(chain=chains, length=lengths, ended=st.booleans(), within=st.sampled_from([None, 5.0]))
    def hint(self, chain: list[int], length: int, ended: bool, within: float | None) -> None:
        evidence = Evidence(ended, not ended, None if ended else within, "sender")
        self.pool.hint(keys(chain[:length]), evidence)

    @rule(chain=chains, length=lengths)
    def touch(self, chain: list[int], length: int) -> None:
        self.pool.touch(keys(chain[:length]))

    @rule()
    def reset(self) -> None:
        self.pool.reset()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_pool_proves_itself(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()

    @invariant()
    def the_tree_agrees_with_the_slots(self) -> None:
        if not hasattr(self, "pool"):
            return
        policy, tree = self.policy, self.policy._tree
        every = np.arange(self.pool.num_slots)
        held = every[tree.held].tolist()
        inside: list[int] = []
        for node in tree.nodes:
            assert tree.nodes[node.id] is node
            for first, child in node.children.items():
                assert child.words.startswith(first)
                assert child.parent is node
                assert child.start == node.end
            slots = node.slots.tolist()
            assert (node in tree.holding) == bool(slots)
            if slots:
                assert tree.last_slot[node.id] == slots[-1]
                places = tree._position[node.slots].tolist()
                assert places == sorted(places)
                assert node.start <= places[0]
                assert places[-1] < node.end
                words = self.pool.table.index.keys_of(node.slots).array[:, 0].tobytes()
                at = [WORD * (place - node.start) for place in places]
                assert words == b"".join(node.words[first : first + WORD] for first in at)
            assert all(tree.nodes_of(node.slots[at : at + 1]) == [node] for at in range(len(slots)))
            inside += slots
        assert sorted(inside) == held
        assert policy.holds(every).sum() == len(held)
        assert sorted(policy.peek(self.pool.num_slots + 1).tolist()) == sorted(held)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.open:
            lease.abort() if lease.purpose is Purpose.WRITE else lease.release()
        self.pool.check_integrity()
        assert self.pool.num_leases == 0
        held = self.policy.peek(self.pool.num_slots).tolist()
        assert len(held) == self.pool.counts.cached, "nothing is lost"


TestReturns = ReturnsMachine.TestCase
TestReturns.settings = settings(stateful_step_count=40)
