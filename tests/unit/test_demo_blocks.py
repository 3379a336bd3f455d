"""Device blocks: holders, the prefix cache over free blocks, and its bookkeeping."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import InputError, StateError
from kvferry.tools.demo.blocks import BlockPool
from kvferry.types import KEY_BYTES, Key


def key(number: int) -> Key:
    return Key(number.to_bytes(KEY_BYTES, "little"))


def test_the_first_block_with_a_content_keeps_the_key() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, key(0))
    pool.publish(second, key(0))
    assert pool.acquire([key(0)]) == [first]
    pool.check_integrity(num_held=2)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="at least 1 block, got 0"):
        BlockPool(0)
    pool = BlockPool(1)
    with pytest.raises(StateError, match="2 device blocks asked for, 1 are free"):
        pool.allocate(2)
    with pytest.raises(StateError, match="released, but has no holder"):
        pool.release([0])
    with pytest.raises(StateError, match="has no holder"):
        pool.publish(0, key(0))


class Holders(RuleBasedStateMachine):
    """Random holders against a plain list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            taken = {block for holder in self.held for block in holder}
            assert not taken & set(blocks)
            self.held.append(blocks)

    @rule(start=st.integers(0, 5), count=st.integers(1, 4))
    def acquire(self, start: int, count: int) -> None:
        keys = [key(number) for number in range(start, start + count)]
        self.held.append(self.pool.acquire([k for k in keys if k in self.pool]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(at))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 8))
    def publish(self, data: st.DataObject, number: int) -> None:
        blocks = sorted({block for holder in self.held for block in holder})
        self.pool.publish(data.draw(st.sampled_from(blocks)), key(number))

    @invariant()
    def agrees(self) -> None:
        blocks = {block for holder in self.held for block in holder}
        self.pool.check_integrity(num_held=len(blocks))


TestHolders = Holders.TestCase
