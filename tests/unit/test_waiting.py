"""Waiting for copies: in a thread, for any of them, and in an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.rig import Rig

import kvferry
from kvferry.core.lifecycle import PunctualSleep, _find_prctl
from kvferry.errors import ClosedError, StateError
from kvferry.types import Outcome

BLOCKS, TOKENS = 64, 4
LONG = 30.0
Tensors = list[np.ndarray[Any, Any]]


@pytest.fixture
def kv() -> Tensors:
    rng = np.random.default_rng()
    return [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(2)]


@pytest.fixture
def ferry(kv: Tensors) -> Iterator[kvferry.Ferry]:
    with kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB") as ferry:
        yield ferry


class Held:
    """Keeps a ferry's stores from being carried out until they may."""

    def __init__(self, ferry: kvferry.Ferry) -> None:
        self.go_on = threading.Event()
        engine: Any = ferry._rank.engine
        engine._stores.run(lambda: self.go_on.wait(LONG))


def store(ferry: kvferry.Ferry, number: int = 0) -> kvferry.Ticket:
    return ferry.store(ferry.keys(range(1000 * number, 1000 * number + TOKENS)), [number])


# -- in an event loop ------------------------------------------------------------------------------


async def end_of(ticket: kvferry.Ticket) -> kvferry.Ticket:
    return await ticket


def test_every_task_gets_the_end_of_its_own(ferry: kvferry.Ferry) -> None:
    held = Held(ferry)

    async def life() -> None:
        tickets = [store(ferry, number) for number in range(BLOCKS)]
        tasks = [asyncio.ensure_future(end_of(ticket)) for ticket in tickets]
        await asyncio.sleep(0.01)
        held.go_on.set()
        assert await asyncio.wait_for(asyncio.gather(*tasks), LONG) == tickets
        assert all(ticket.num_blocks == 1 for ticket in tickets)

    asyncio.run(life())
    assert ferry.poll() == []


def test_a_cancelled_task_leaves_the_end_to_others(ferry: kvferry.Ferry) -> None:
    """Also where it was the one that looked for all of them."""
    held = Held(ferry)

    async def life() -> None:
        ticket = store(ferry)
        tasks = [asyncio.ensure_future(end_of(ticket)) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        held.go_on.set()
        assert await asyncio.wait_for(asyncio.gather(*tasks[1:]), LONG) == [ticket, ticket]
        assert await ticket is ticket, "a ticket remembers its end"
        assert ferry.wait(ticket) is ticket

    asyncio.run(life())


def test_a_wait_for_an_awaited_ticket_leaves_the_task_its_end(ferry: kvferry.Ferry) -> None:
    async def life() -> None:
        held = Held(ferry)
        ticket = store(ferry)
        task = asyncio.ensure_future(end_of(ticket))
        await asyncio.sleep(0)
        held.go_on.set()
        assert ferry.wait(ticket, LONG) is ticket
        assert await asyncio.wait_for(task, LONG) is ticket

    asyncio.run(life())


def test_a_loop_that_closes_loses_no_end(ferry: kvferry.Ferry) -> None:
    held, tickets = Held(ferry), [store(ferry, number) for number in range(3)]
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(end_of(ticket)) for ticket in tickets]
    loop.run_until_complete(asyncio.sleep(0.01))
    held.go_on.set()
    loop.close()
    told: list[kvferry.Ticket] = []
    give_up = time.monotonic() + LONG
    while len(told) < len(tickets) and time.monotonic() < give_up:
        told += ferry.poll(0.01)
    assert told == tickets
    assert not any(task.done() for task in tasks)


def test_what_is_awaited_when_the_ferry_closes_is_refused(ferry: kvferry.Ferry) -> None:
    held = Held(ferry)

    async def life() -> None:
        task = asyncio.ensure_future(end_of(store(ferry)))
        await asyncio.sleep(0)
        threading.Timer(0.05, held.go_on.set).start()
        ferry.close()
        with pytest.raises(ClosedError, match="is closed"):
            await asyncio.wait_for(task, LONG)

    asyncio.run(life())


def test_one_loop_after_the_other(ferry: kvferry.Ferry) -> None:
    for number in range(3):

        async def life(number: int = number) -> None:
            assert (await store(ferry, number)).num_blocks == 1

        asyncio.run(life())
    held = Held(ferry)

    async def left() -> None:
        waiting = asyncio.ensure_future(end_of(store(ferry, 5)))
        await asyncio.sleep(0.01)
        assert not waiting.done()  # and the loop is closed while it waits

    asyncio.run(left())
    held.go_on.set()

    async def last() -> None:
        assert (await asyncio.wait_for(end_of(store(ferry, 6)), LONG)).num_blocks == 1

    asyncio.run(last())
    assert [done.num_blocks for done in ferry.poll(LONG)] == [1]


def test_a_ferry_of_another_thread_says_so(ferry: kvferry.Ferry) -> None:
    ticket = store(ferry)
    raised: list[BaseException] = []

    async def life() -> None:
        await ticket

    def other() -> None:
        try:
            asyncio.run(life())
        except StateError as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "belongs to thread" in str(raised[0])
    assert ferry.wait(ticket).num_blocks == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_ticket_does_not_keep_its_ferry(kv: Tensors) -> None:
    ferry = kvferry.attach(kv, model="m", block_tokens=TOKENS, host="64KiB")
    ticket = store(ferry)

    async def life() -> None:
        await ticket

    asyncio.run(life())
    gone = weakref.ref(ferry)
    del ferry
    gc.collect()
    assert gone() is None
    with pytest.raises(ClosedError):
        asyncio.run(life())


# -- in a thread -----------------------------------------------------------------------------------


def test_poll_waits_for_the_first_end(ferry: kvferry.Ferry) -> None:
    assert ferry.poll(0.01) == []
    held = Held(ferry)
    tickets = [store(ferry, number) for number in range(2)]
    threading.Timer(0.02, held.go_on.set).start()
    ended = ferry.poll(LONG)
    while len(ended) < 2:
        ended += ferry.poll(LONG)
    assert ended == tickets


def test_who_waits_is_woken_not_timed_out(
    ferry: kvferry.Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the wait is the copy's end, not the time to look again."""
    engine: Any = ferry._rank.engine
    wait_for_end, woken = engine.wait_for_end, []

    def noting(seconds: float) -> None:
        wait_for_end(LONG)
        woken.append(bool(engine._done))

    monkeypatch.setattr(engine, "wait_for_end", noting)
    held = Held(ferry)
    ticket = store(ferry)
    threading.Timer(0.02, held.go_on.set).start()
    assert ferry.wait(ticket).num_blocks == 1
    assert woken == [True]


def test_sleeps_are_punctual_only_within() -> None:
    prctl = _find_prctl()
    if prctl is None:
        pytest.skip("no prctl here")
    before = prctl(30, 0, 0, 0, 0)
    with PunctualSleep():
        assert prctl(30, 0, 0, 0, 0) <= before
        assert prctl(30, 0, 0, 0, 0) == min(before, 1000)
    assert prctl(30, 0, 0, 0, 0) == before


# -- on a card -------------------------------------------------------------------------------------


def test_news_is_when_the_first_copy_has_ended() -> None:
    rig = Rig()
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: None)
    rig.store([0], [0])
    rig.wait_until_queued()
    assert not any(queues_have_ended(rig))
    rig.engine.wait_for_end(0.01)
    assert not any(queues_have_ended(rig))
    rig.driver.timeline.frozen = set()
    rig.engine.wait_for_end(LONG)
    assert any(queues_have_ended(rig))
    rig.drain_ok()
    assert not any(queues_have_ended(rig))


def queues_have_ended(rig: Rig) -> list[bool]:
    with rig.driver.current():
        return [queue.has_ended() for queue in rig.engine._queues.values()]


def test_a_copy_the_driver_will_not_speak_of_has_failed() -> None:
    rig = Rig()
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: None)
    transfer = rig.store([0], [0])
    rig.wait_until_queued()
    rig.driver.fail("event_is_done")
    rig.engine.wait_for_end(0.01)
    rig.driver.timeline.frozen = set()
    assert rig.drain()[transfer].outcome is Outcome.FAILED


def test_a_card_that_is_lost_is_not_waited_for_in_vain() -> None:
    rig = Rig()
    rig.store([0], [0])
    rig.wait_until_queued()
    rig.driver.die()
    rig.engine.wait_for_end(LONG)
    rig.driver._dead = None
    rig.drain()
