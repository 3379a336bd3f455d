"""Loads of pending hits: the first blocks are on the device while the last are still read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.test_ferry_tiers import (
    CHAT_BLOCKS,
    Open,
    attach,
    chat,
    content,
    fill,
    settle,
    tier,
)

import kvferry
from kvferry.core.keys import Key
from kvferry.errors import InputError
from kvferry.tiers.contract import Way

__all__ = ["attach"]  # a fixture
DESTINATION = list(range(70, 70 + CHAT_BLOCKS))


def below(attach: Open, **settings: Any) -> tuple[kvferry.Ferry, list[bytes]]:
    """More conversations than the host holds; the first of them are only below."""
    ferry = attach(tier_write="through", **settings)
    ferry._scheduler.lower.piece_slots = 2
    wanted = fill(ferry)
    for tensor in ferry.kv:  # type: ignore[attr-defined]
        tensor[70:] = 0xEE
    return ferry, wanted


def until(ferry: kvferry.Ferry, holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not holds():
        ferry._advance()
        assert time.monotonic() < give_up
        time.sleep(0.0005)


def first_blocks(ferry: Any, count: int) -> bytes:
    return content(ferry, DESTINATION[:count])


def start_of(whole: bytes, count: int) -> bytes:
    rows = np.frombuffer(whole, dtype=np.uint8).reshape(3, CHAT_BLOCKS, -1)
    return rows[:, :count].tobytes()


def test_the_first_blocks_are_there_while_the_last_are_read(attach: Open) -> None:
    """Seen red with loads that begin when all is up: nothing is there while the reader hangs."""
    ferry, wanted = below(attach)
    keys = chat(ferry, 0)
    gate, last = threading.Event(), {keys[4], keys[5]}

    def hold(way: Way, key: Key) -> None:
        if way is Way.READ and key in last:
            gate.wait(20)

    tier().fault = hold
    hit = ferry.match(keys)
    assert hit.is_pending
    assert hit.coming == CHAT_BLOCKS
    ticket = ferry.load(hit, DESTINATION)
    try:
        until(ferry, lambda: first_blocks(ferry, 4) == start_of(wanted[0], 4))
        assert first_blocks(ferry, 6) != wanted[0]
        assert ticket in ferry._tickets._underway
    finally:
        gate.set()
    done = ferry.wait(ticket, 20)
    assert done.ok
    assert done.num_blocks == CHAT_BLOCKS
    assert first_blocks(ferry, 6) == wanted[0]
    assert ferry.stats().queries == 1
    settle(ferry)
    assert not ferry._promised
    assert not ferry._scheduler.requests
    ferry._scheduler.check_integrity()


def test_a_load_of_what_still_comes_up_is_awaited(attach: Open) -> None:
    """Nobody but the event loop serves the ferry meanwhile, and no copy ends for a long time."""
    ferry, wanted = below(attach)

    async def life() -> kvferry.Done:
        hit = ferry.match(chat(ferry, 0))
        assert hit.is_pending
        return await asyncio.wait_for(ferry.ended(ferry.load(hit, DESTINATION)), 20)

    assert asyncio.run(life()).num_blocks == CHAT_BLOCKS
    assert first_blocks(ferry, 6) == wanted[0]
    settle(ferry)


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_what_does_not_come_up_leaves_what_is_before_it(attach: Open, bad: int) -> None:
    ferry, wanted = below(attach)
    keys = chat(ferry, 0)

    def lose(way: Way, key: Key) -> None:
        if way is Way.READ and key == keys[bad]:
            raise OSError("bad sector")

    tier().fault = lose
    hit = ferry.match(keys)
    done = ferry.wait(ferry.load(hit, DESTINATION), 20)
    assert not done.ok
    assert done.num_blocks == bad
    assert "did not come" in done.reason
    assert first_blocks(ferry, bad) == start_of(wanted[0], bad)
    settle(ferry)
    assert not ferry._scheduler.requests
    ferry._scheduler.check_integrity()


def test_a_tier_that_hangs_ends_it_in_time(attach: Open) -> None:
    ferry, _ = below(attach, promote_deadline="200ms")
    gate = threading.Event()
    tier().fault = lambda way, key: gate.wait(20) if way is Way.READ else None
    hit = ferry.match(chat(ferry, 0))
    try:
        done = ferry.wait(ferry.load(hit, DESTINATION), 10)
        assert not done.ok
        assert done.num_blocks == 0
    finally:
        gate.set()
    settle(ferry)


def test_a_copy_that_fails_fails_from_there_on(
    attach: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ferry, wanted = below(attach)
    engine, sent = ferry._rank.engine, []
    submit, gate = engine.submit, threading.Event()

    def fail_the_second(transfer: Any) -> Any:
        if transfer.dst == "device":
            sent.append(transfer)
            gate.set()  # the rest comes up once the first blocks are on their way
            if len(sent) == 2:
                raise RuntimeError("no copies today")
        return submit(transfer)

    monkeypatch.setattr(engine, "submit", fail_the_second)
    slow = chat(ferry, 0)[2:]
    tier().fault = lambda way, key: gate.wait(20) if way is Way.READ and key in set(slow) else None
    done = ferry.wait(ferry.load(ferry.match(chat(ferry, 0)), DESTINATION), 20)
    assert not done.ok
    assert done.num_blocks < CHAT_BLOCKS
    assert first_blocks(ferry, done.num_blocks) == start_of(wanted[0], done.num_blocks)
    assert "no copies today" in done.reason
    settle(ferry)
    assert not ferry._scheduler.requests


def test_tables_that_do_not_fit_are_refused_and_nothing_is_lost(attach: Open) -> None:
    ferry, wanted = below(attach)
    hit = ferry.match(chat(ferry, 0))
    with pytest.raises(InputError, match="6 blocks of this hit are coming up, got 5"):
        ferry.load(hit, DESTINATION[:5])
    with pytest.raises(InputError, match="is given twice"):
        ferry.load(hit, [70] * 6)
    assert ferry.wait(ferry.load(hit, DESTINATION), 20).ok
    assert first_blocks(ferry, 6) == wanted[0]


def test_a_reset_or_the_end_under_it_leaves_nothing(attach: Open) -> None:
    ferry, _ = below(attach)
    ticket = ferry.load(ferry.match(chat(ferry, 0)), DESTINATION)
    ferry.reset()
    done = ferry.wait(ticket, 20)
    assert done.num_blocks <= CHAT_BLOCKS
    settle(ferry)
    assert not ferry._scheduler.requests
    fill(ferry)
    ferry.load(ferry.match(chat(ferry, 0)), DESTINATION)
    ferry.close()
