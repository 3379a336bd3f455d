"""Random lives of a pool whose blocks people pin, keep, rank, hint at and drop.

After every step the pool proves itself and agrees with a model of plain dicts: what is held, until
when and how firmly; that never more is held than the bound allows; that what is firm stays; that
what was dropped is gone; and that a store always finds the room that nobody holds.

One-line breaks that were seen to make this fail:

- ``Holds.add`` does not look at the bound; lets firm holds give way; forgets the times of slots
  that were held already
- ``Holds.expire`` never finds anything; ``PoolRoom._make_room`` does not ask it
- ``PoolRoom._unclaim`` does not put slots back; ``PoolRoom._doom`` leaves a hold behind
- ``PoolWishes.let_go`` lets go of what others that are held follow
- ``PoolWishes.drop`` takes what another conversation goes on from; frees slots that are written
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.fakes.crafted_keys import key
from tests.fakes.policies import Fifo
from tests.fakes.pools import cached_slots

from kvferry.cache.eviction import CONTINUES_SECONDS
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT

CHAINS = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7, 8), (0, 9, 10, 11), (12, 13, 14, 15, 16))
EVERY = sorted({number for chain in CHAINS for number in chain})
PARENT = {b: a for chain in CHAINS for a, b in itertools.pairwise(chain)}

NUMBERS = {key(number): number for number in EVERY}
ALL_KEYS = Keys.from_bytes([key(number) for number in EVERY])

chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 6)
times = st.sampled_from((0.5, 2.0, 10.0, float("inf")))


class Wishes(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(4, 16),
        share=st.sampled_from((0.0, 0.25, 0.5, 0.8)),
        make=st.sampled_from((Lru, Fifo)),
    )
    def start(self, num_slots, share, make):
        self.now = 100.0
        self.pool = Pool(num_slots, make, pin_share=share, clock=lambda: self.now)
        self.most = int(num_slots * share)
        self.firm: dict[int, float] = {}  # by block, as we asked for it
        self.leases: list[Lease] = []
        self.writes: list[Lease] = []

    def keys(self, numbers):
        return Keys.from_bytes([key(number) for number in numbers])

    def slots(self, chain, length):
        return self.pool.lookup(self.keys(chain[:length]))

    def places(self):
        """The cached blocks and their slots."""
        found = cached_slots(self.pool, ALL_KEYS).tolist()
        return {n: slot for n, slot in zip(EVERY, found, strict=True) if slot >= 0}

    def cached(self):
        return set(self.places())

    def known(self):
        """Those as well that are still being written."""
        return {n for n, known in zip(EVERY, self.pool.known(ALL_KEYS), strict=True) if known}

    def links(self):
        """Which block each is known to follow; of one that was lost, and came back, none is."""
        found = {}
        for number in self.known():
            table = self.pool.table
            parent = table.chains._parent[table.index.find_few(key(number))[0]]
            if parent != NO_SLOT:
                found[number] = NUMBERS[table.index.key_of(parent)]
                assert found[number] == PARENT[number]
        return found

    # -- ordinary life --------------------------------------------------------------------------

    @rule(chain=chains, length=lengths, is_quick=st.booleans())
    def store(self, chain, length, is_quick):
        """All of it is stored that the room nobody firmly holds or reads can take."""
        numbers = chain[:length]
        pool, before = self.pool, self.pool.counts
        missing = [n for n in numbers if n not in self.known()]
        firm = {n for n in self.cached() if self.is_firm(n)}
        written = self.known() - self.cached()
        stays = self.claimed() | firm | set(numbers) | written
        links = self.links()
        for number in list(stays):
            while number in links:
                number = links[number]
                stays.add(number)
        can_go = self.cached() - stays
        lease = pool.reserve(self.keys(numbers))
        stored = len(lease) if lease is not None else 0
        assert stored == min(len(missing), before.free + len(can_go)), "a store found no room"
        assert firm <= self.cached()
        if lease is not None and is_quick:
            lease.commit()
        elif lease is not None:
            self.writes.append(lease)

    @rule(data=st.data())
    def end_write(self, data):
        """What was dropped meanwhile is free by then, and not found."""
        if self.writes:
            lease = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
            before = self.known()
            if data.draw(st.booleans()):
                lease.commit()
                assert self.known() == before
            else:
                lease.abort()

    def claimed(self):
        claimed = {slot for lease in self.leases for slot in lease.slots.tolist()}
        return {number for number, slot in self.places().items() if slot in claimed}

    @rule(chain=chains, length=lengths)
    def read(self, chain, length):
        lease = self.pool.lease(self.keys(chain[:length]))
        if lease is not None:
            self.leases.append(lease)

    @rule(data=st.data())
    def end_read(self, data):
        if self.leases:
            lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            if data.draw(st.booleans()):
                lease.release()
            else:
                lost = self.pool.keys_of(lease)
                lease.spoil()
                for number in EVERY:
                    if key(number) in list(lost):
                        self.firm.pop(number, None)

    @rule(seconds=st.sampled_from((0.1, 1.0, 5.0)))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def reset(self):
        self.pool.reset()
        self.firm.clear()
        assert self.pool.counts.pinned == 0

    # -- wishes ---------------------------------------------------------------------------------

    @rule(chain=chains, length=lengths, seconds=times)
    def pin(self, chain, length, seconds):
        slots = self.slots(chain, length)
        until = self.now + seconds
        count = self.pool.eviction.pin(slots, seconds)
        assert count <= len(slots)
        firmly = self.pool.eviction.pins.firmly(slots)
        for number, slot_is_firm in zip(chain, firmly, strict=False):
            if slot_is_firm:
                self.firm[number] = max(self.firm.get(number, 0.0), until)
        if count < len(slots):  # nothing soft was left to give way
            every = self.pool.eviction.pins.all_pinned()
            others = every[~self.pool.eviction.pins.firmly(every)]
            assert not set(others.tolist()) - set(slots.tolist())

    @rule(chain=chains, length=lengths, seconds=times, priority=st.integers(36, 100))
    def rank_high(self, chain, length, seconds, priority):
        slots = self.slots(chain, length)
        assert self.pool.eviction.pin(slots, seconds, priority) <= len(slots)

    @rule(chain=chains, length=lengths, priority=st.integers(0, 34))
    def rank_low(self, chain, length, priority):
        self.pool.eviction.evict_first(self.slots(chain, length), priority)

    @rule(chain=chains, length=lengths, ended=st.booleans(), within=st.none() | times)
    def hint(self, chain, length, ended, within):
        slots = self.slots(chain, length)
        self.pool.hint(
            self.keys(chain[:length]), Evidence(ended=ended, continues=not ended, within=within)
        )
        if not ended and self.most >= len(slots):  # firm ones may leave too little room
            until = self.now + (CONTINUES_SECONDS if within is None else within)
            held = self.pool.eviction.pins.until(slots)
            assert (held[held > 0] >= until).all()

    @rule(chain=chains, length=lengths)
    def unpin(self, chain, length):
        slots = self.slots(chain, length)
        self.pool.eviction.unpin(slots)
        for number, held in zip(chain, self.pool.eviction.pins.pinned(slots), strict=False):
            if not held:
                self.firm.pop(number, None)

    @rule(chain=chains, length=lengths)
    def drop(self, chain, length):
        slots = self.pool.find(self.keys(chain[:length]))
        before, leased = self.known(), self.pool.counts.leased
        num_written, links = len(before - self.cached()), self.links()
        count = self.pool.drop(slots[slots >= 0])
        gone = before - self.known()
        assert len(gone) == count
        assert gone <= set(chain[:length])
        assert self.pool.counts.leased >= max(num_written, leased - count), "a rank may write there"
        for number in self.known():
            assert links.get(number) not in gone, "a follower was left without what it follows"
            assert number not in gone
        for number in gone:
            self.firm.pop(number, None)

    # -- what always holds ----------------------------------------------------------------------

    def is_firm(self, number):
        return self.firm.get(number, 0.0) > self.now

    @invariant()
    def holds_within_bounds(self):
        self.pool.check_integrity()
        assert self.pool.counts.pinned <= self.most
        held = self.pool.eviction.pins.all_pinned()
        assert len(held) == self.pool.counts.pinned
        firm = {n for n in EVERY if self.is_firm(n)}
        assert firm <= self.cached(), "what is firm is gone"
        places, is_held, links = self.places(), set(held.tolist()), self.links()
        for number, slot in places.items():  # what is held is a beginning of its chain
            if slot in is_held and number in links:
                assert places[links[number]] in is_held

    def teardown(self):
        for lease in getattr(self, "leases", ()):
            lease.release()
        for lease in getattr(self, "writes", ()):
            lease.commit()
        if hasattr(self, "pool"):
            self.pool.check_integrity()


TestWishes = pytest.mark.timeout(120)(Wishes.TestCase)
