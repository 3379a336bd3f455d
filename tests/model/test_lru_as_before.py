"""LRU evicts exactly as it did when it knew only touches: random lives against the old order.

One-line breaks that were tried; each made this test fail.

- ``Lru.use`` appends in the order of the chain, not in reverse; so does ``keep``
- ``Lru.put_back`` puts the slots back in reverse, or at the end
- ``Lru.insert`` puts new blocks first to go
- ``Pool.reserve`` does not use what is there already, or uses it before room is made
- ``Pool.end`` uses what was only copied
- ``victims`` puts parents back whose children stay, or keeps them in the order they were met; keeps
  what it did not need; looks only as far as it needs at first
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.pool_events import Evictions
from tests.model.lru_before import PoolBefore
from tests.model.pool_lives import Disown, End, Event, Grow, Pin, Reserve, Reset, Touch, life

from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose


class Twins:
    """A pool and the old one, told the same."""

    def __init__(self, num_slots: int, num_ready: int) -> None:
        self.new = Pool(num_slots, num_ready=num_ready)
        self.old = PoolBefore(num_slots, num_ready)
        self.open: list[tuple[Lease, Lease]] = []
        self.gone = Evictions(self.new)

    def tell(self, event: Event) -> None:
        match event:
            case Reserve(_, _, chained):
                keys, parent = event.keys, event.parent_key
                self.gone.clear()
                self.old.evicted.clear()
                new = self.new.reserve(keys, parent=parent, chained=chained)
                self.claim(new, self.old.reserve(keys, parent, chained))
                assert self.gone.read() == self.old.evicted
            case Pin(_, purpose):
                self.claim(self.new.lease(event.keys, purpose), self.old.pin(event.keys, purpose))
            case Touch():
                self.new.touch(event.keys)
                self.old.touch(event.keys)
            case End(at, well):
                for lease in self.open.pop(at) if at < len(self.open) else ():
                    if lease.purpose is Purpose.WRITE:
                        lease.commit() if well else lease.abort()
                    else:
                        lease.release() if well else lease.spoil()
            case Disown(at):
                for lease in self.open[at] if at < len(self.open) else ():
                    lease.disown()
            case Reset():
                self.new.reset()
                self.old.reset()
            case Grow(num_ready):
                self.new.grow(num_ready)
                self.old.grow(num_ready)
        self.compare()

    def claim(self, new: Lease | None, old: Lease | None) -> None:
        assert (new is None) == (old is None)
        if new is not None and old is not None:
            assert new.slots.tolist() == old.slots.tolist()
            assert new.positions.tolist() == old.positions.tolist()
            self.open.append((new, old))

    def compare(self) -> None:
        order = self.new.eviction.policy.peek(self.new.num_slots).tolist()
        assert order == list(self.old.order.slots)
        assert self.new.table.free.slots.tolist() == self.old.free
        self.new.check_integrity()


@given(st.integers(0, 1 << 32), st.integers(1, 24), st.data())
@settings(max_examples=100)
def test_the_same_blocks_go_in_the_same_order(seed: int, num_slots: int, data) -> None:
    twins = Twins(num_slots, data.draw(st.integers(0, num_slots)))
    for event in life(seed, num_slots, 60):
        twins.tell(event)


@pytest.mark.parametrize("seed", range(6))
def test_also_in_long_lives(seed: int) -> None:
    num_slots = (3, 8, 16, 24, 40, 64)[seed]
    twins = Twins(num_slots, num_slots)
    for event in life(seed, num_slots, 800):
        twins.tell(event)
    assert twins.new.counts.evicted > 40
