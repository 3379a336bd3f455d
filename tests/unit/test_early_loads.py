"""Loads that begin while the last blocks are still read: the library's side of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tests.unit.test_ferry_tiers import CHAT_BLOCKS, Open, attach, chat, content, fill, settle, tier

import kvferry
from kvferry.core.keys import Key
from kvferry.tiers.contract import Way
from kvferry.types import HOST, TierName

__all__ = ["attach"]  # a fixture
DESTINATION = list(range(70, 70 + CHAT_BLOCKS))


class Below:
    """A ferry whose first conversation is only below; its last two blocks wait for the gate."""

    def __init__(self, attach: Open, bad: int | None = None) -> None:
        self.ferry: Any = attach(tier_write="through")
        self.ferry._scheduler.lower.piece_slots = 2
        self.wanted = np.frombuffer(fill(self.ferry)[0], np.uint8).reshape(3, CHAT_BLOCKS, -1)
        for tensor in self.ferry.kv:  # type: ignore[attr-defined]
            tensor[70:] = 0xEE
        for link in (HOST, TierName("tiers")):  # of two links as fast as each other
            self.ferry._scheduler.hits.worth.note_load(1 << 30, 1e-9, link)
        self.gate, keys = threading.Event(), chat(self.ferry, 0)

        def hold(way: Way, key: Key) -> None:
            if way is Way.READ and key in (keys[4], keys[5]):
                self.gate.wait(20)
            if way is Way.READ and bad is not None and key == keys[bad]:
                raise OSError("bad sector")

        tier().fault = hold

    def load(self) -> kvferry.Ticket:
        """Begin the load while the last blocks wait."""
        hit = self.ferry.match(chat(self.ferry, 0))
        assert hit.is_pending
        assert self.ferry.await_hit(hit, 0.2).is_pending, "without early all of it is awaited"
        hit = self.ferry.await_hit(hit, 20, early=True)
        assert len(hit) == CHAT_BLOCKS
        ticket: kvferry.Ticket = self.ferry.load(hit, DESTINATION)
        assert self.ferry.poll(0.05) == []
        assert not ticket.has_ended
        return ticket

    def has(self, count: int) -> bool:
        """Whether so many of the first blocks are there."""
        found = np.frombuffer(content(self.ferry, DESTINATION), np.uint8)
        found = found.reshape(self.wanted.shape)
        return np.array_equal(found[:, :count], self.wanted[:, :count])

    def end(self) -> None:
        settle(self.ferry)
        assert not self.ferry._in_pieces
        assert not self.ferry._pending
        assert not self.ferry._scheduler.requests
        self.ferry._scheduler.check_integrity()


@pytest.mark.parametrize("awaited", [False, True])
def test_the_first_blocks_are_there_while_the_last_are_read(attach: Open, awaited: bool) -> None:
    """Seen red with loads that begin when all is up: nothing is there while the reader hangs."""
    below = Below(attach)
    ticket = below.load()
    assert below.has(4)
    assert not below.has(6)
    below.gate.set()

    async def end() -> kvferry.Ticket:
        return await asyncio.wait_for(ticket.owner.ended(ticket), 20)

    assert (asyncio.run(end()) if awaited else below.ferry.wait(ticket, 20)) is ticket
    assert (ticket.ok, ticket.num_blocks) == (True, CHAT_BLOCKS)
    assert below.has(6)
    assert below.ferry.stats().queries == 1
    below.end()


def test_what_does_not_come_up_leaves_what_is_before_it(attach: Open) -> None:
    below = Below(attach, bad=5)
    ticket = below.load()
    below.gate.set()
    below.ferry.wait(ticket, 20)
    assert (ticket.ok, ticket.num_blocks) == (False, 5)
    assert "did not come" in ticket.reason
    assert below.has(5)
    below.end()


def test_a_copy_that_fails_fails_from_there_on(
    attach: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Below(attach)
    ticket = below.load()

    def broken(transfer: object) -> int:
        raise OSError("no copies today")

    monkeypatch.setattr(below.ferry._rank.engine, "_move", broken)
    below.gate.set()
    below.ferry.wait(ticket, 20)
    assert (ticket.ok, ticket.num_blocks, below.has(4)) == (False, 4, True)
    assert "no copies today" in ticket.reason
    below.end()


def test_a_reset_or_a_release_under_it_leaves_nothing(attach: Open) -> None:
    below = Below(attach)
    ticket = below.load()
    below.ferry.reset()
    below.gate.set()
    below.ferry.wait(ticket, 20)
    fill(below.ferry)
    hit = below.ferry.match(chat(below.ferry, 0))
    below.ferry.release(below.ferry.await_hit(hit, 20, early=True))
    below.end()
