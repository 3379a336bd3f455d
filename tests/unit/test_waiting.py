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
from kvferry.errors import ClosedError, InputError, StateError
from kvferry.tickets import Ticket
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


def store(ferry: kvferry.Ferry, number: int = 0) -> Ticket:
    return ferry.store(ferry.keys(range(1000 * number, 1000 * number + TOKENS)), [number])


def watchers() -> list[str]:
    return [each.name for each in threading.enumerate() if "kvferry-await" in each.name]


# -- in an event loop ------------------------------------------------------------------------------


def test_many_are_awaited_with_one_thread(ferry: kvferry.Ferry) -> None:
    held = Held(ferry)

    async def one(number: int) -> kvferry.Done:
        return await store(ferry, number)

    async def life() -> None:
        tasks = [asyncio.ensure_future(one(number)) for number in range(BLOCKS)]
        await asyncio.sleep(0.01)
        assert len(watchers()) == 1
        held.go_on.set()
        ended = await asyncio.wait_for(asyncio.gather(*tasks), LONG)
        assert len({done.ticket for done in ended}) == BLOCKS
        assert all(done.num_blocks == 1 for done in ended)

    asyncio.run(life())
    assert ferry.poll() == []
    ferry.close()
    assert watchers() == []


def test_who_is_cancelled_leaves_the_end_to_others(ferry: kvferry.Ferry) -> None:
    held = Held(ferry)

    async def life() -> None:
        ticket = store(ferry)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ferry.ended(ticket), 0.01)
        held.go_on.set()
        assert (await ticket).num_blocks == 1
        assert await ticket == await ferry.ended(ticket), "a ticket remembers its end"
        with pytest.raises(InputError, match="already told"):
            await ferry.ended(int(ticket))

    asyncio.run(life())


def test_an_end_that_was_told_to_a_task_that_never_heard_it_stays(ferry: kvferry.Ferry) -> None:
    """The future has its result, and before the task runs again it is cancelled."""

    async def life() -> None:
        held = Held(ferry)
        ticket = store(ferry)
        task = asyncio.ensure_future(ferry.ended(ticket))
        await asyncio.sleep(0)
        held.go_on.set()
        while not all(each.done() for futures in _futures(ferry) for each in futures):
            ferry._tickets._tell(asyncio.Future())  # as the loop would, but without its turn
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [done.ticket for done in ferry.poll()] == [ticket]

    asyncio.run(life())


def test_a_wait_for_an_awaited_ticket_leaves_the_task_its_end(ferry: kvferry.Ferry) -> None:
    async def life() -> None:
        held = Held(ferry)
        ticket = store(ferry)
        task = asyncio.ensure_future(ferry.ended(ticket))
        await asyncio.sleep(0)
        held.go_on.set()
        assert ferry.wait(ticket, LONG).ticket == ticket
        assert (await asyncio.wait_for(task, LONG)).ticket == ticket
        with pytest.raises(InputError, match="already told"):
            ferry.wait(ticket)

    asyncio.run(life())


@pytest.mark.parametrize("is_told", [False, True])
def test_a_loop_that_closes_loses_no_end(ferry: kvferry.Ferry, is_told: bool) -> None:
    """Seen red: where the task had been told and did not run any more, its end was lost."""
    held, tickets = Held(ferry), [store(ferry, number) for number in range(3)]
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(_await(ferry, ticket)) for ticket in tickets]
    loop.run_until_complete(asyncio.sleep(0.01))
    held.go_on.set()
    if is_told:
        while not all(each.done() for futures in _futures(ferry) for each in futures):
            ferry._tickets._tell(loop.create_future())
    loop.close()
    told: list[kvferry.Done] = []
    give_up = time.monotonic() + LONG
    while len(told) < len(tickets) and time.monotonic() < give_up:
        told += ferry.poll(0.01)
    assert sorted(done.ticket for done in told) == tickets
    assert not any(task.done() for task in tasks)


def _futures(ferry: kvferry.Ferry) -> list[list[asyncio.Future[kvferry.Done]]]:
    return list(ferry._tickets._futures.values())


async def _await(ferry: kvferry.Ferry, ticket: Ticket) -> kvferry.Done:
    return await ferry.ended(ticket)


def test_what_is_awaited_when_the_ferry_closes_is_refused(ferry: kvferry.Ferry) -> None:
    held = Held(ferry)

    async def life() -> None:
        task = asyncio.ensure_future(ferry.ended(store(ferry)))
        await asyncio.sleep(0)
        threading.Timer(0.05, held.go_on.set).start()
        ferry.close()
        with pytest.raises(ClosedError, match="is closed"):
            await asyncio.wait_for(task, LONG)

    asyncio.run(life())
    assert watchers() == []


def test_one_loop_after_the_other(ferry: kvferry.Ferry) -> None:
    for number in range(3):

        async def life(number: int = number) -> None:
            assert (await store(ferry, number)).num_blocks == 1

        asyncio.run(life())
    held = Held(ferry)

    async def left() -> None:
        waiting = asyncio.ensure_future(ferry.ended(store(ferry, 5)))
        await asyncio.sleep(0.01)
        assert not waiting.done()  # and the loop is closed while it waits

    asyncio.run(left())
    held.go_on.set()

    async def last() -> None:
        assert (await asyncio.wait_for(ferry.ended(store(ferry, 6)), LONG)).num_blocks == 1

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
    assert [done.ticket for done in ended] == tickets


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
