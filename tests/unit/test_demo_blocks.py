"""Device blocks: holders, the prefix cache over free blocks, and its bookkeeping."""

from __future__ import annotations

import pytest

from kvferry.core.keys import KEY_BYTES, Key
from kvferry.errors import InputError, StateError
from kvferry.tools.demo.blocks import BlockPool


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
