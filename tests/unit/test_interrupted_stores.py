"""A store that raises in the midst of its bookkeeping: the pool stays whole, no ticket ends.

Seen red where ``Transfers.launch`` forgot its orders after they were in flight, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.core.keys import Keys
from kvferry.errors import StateError
from kvferry.scheduler.transfers import Transfers

SLOTS, BLOCKS, TOKENS = 256, 80, 4
LONG = 30.0


@pytest.fixture
def ferry() -> Iterator[kvferry.Ferry]:
    kv = [np.zeros((BLOCKS, 2, TOKENS, 8), np.uint8)]
    settings: dict[str, Any] = {"policy": "lru", "load_policy": "always"}
    host = f"{SLOTS * kv[0][0].nbytes}B"
    with kvferry.attach(kv, model="m", block_tokens=TOKENS, host=host, **settings) as ferry:
        yield ferry


def keys_of(ferry: kvferry.Ferry, number: int, count: int) -> Keys:
    return ferry.keys(range(10_000 * number, 10_000 * number + count * TOKENS))


def fill(ferry: kvferry.Ferry) -> None:
    """Until room has to be made."""
    for number in range(SLOTS // 32 + 1):
        done = ferry.wait(ferry.store(keys_of(ferry, number, 32), range(32)), LONG)
        assert done.num_blocks == 32


def is_well(ferry: kvferry.Ferry) -> None:
    """Everything agrees, and stores go on: all slots are given out once more, and again."""
    ferry._scheduler.check_integrity()
    for number in range(200, 200 + 3 * SLOTS // 20):
        assert ferry.wait(ferry.store(keys_of(ferry, number, 20), range(20)), LONG).ok
    ferry._scheduler.check_integrity()


def fails_once(ferry: kvferry.Ferry, patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The policy raises this when it next hears that blocks were used."""
    policy: Any = ferry._scheduler.pool.eviction.policy
    real = policy.use

    def use(slots: Any) -> None:
        patch.setattr(policy, "use", real)
        raise error

    patch.setattr(policy, "use", use)


def begun(ferry: kvferry.Ferry) -> Any:
    """Keys of a request whose first three blocks are kept."""
    fill(ferry)
    keys = keys_of(ferry, 100, 30)
    ferry.wait(ferry.store(keys[:3], range(3)), LONG)
    ferry.poll()
    return keys


def test_an_interrupt_while_a_policy_is_told_leaves_no_slot_without_its_key(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = begun(ferry)
    fails_once(ferry, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):  # the kept beginning is used, the rest would be stored
        ferry.store(keys, range(3, 30), first=3)
    assert len(ferry.match(keys)) == 3
    is_well(ferry)


def test_an_interrupt_once_a_store_is_in_flight_ends_its_lease_once(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ferry)
    fly = Transfers._fly

    def interrupted(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(Transfers, "_fly", fly)
        fly(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Transfers, "_fly", interrupted)
    keys = keys_of(ferry, 100, 20)
    with pytest.raises(KeyboardInterrupt):
        ferry.store(keys, range(20))
    with pytest.raises(StateError, match="close it and attach again"):  # no rank has its order
        ferry.match(keys)
    ferry._scheduler.check_integrity()
    ferry.close()
