"""A store that is busy is not one that hangs: what orders tell of it that end without an answer.

The clock is the test's, also the event loop's, and the store answers when it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry.tiers.base import Way
from kvferry.tiers.disk.messages import OrderMessage, ResultMessage
from kvferry.tiers.remote import carrier
from kvferry.tiers.remote.bandwidth import Bandwidth
from kvferry.tiers.remote.breaker import Breaker
from kvferry.tiers.remote.client import Fault, NotThere
from kvferry.tiers.remote.names import Whose

NUM_CALLS = 2
SAYS_NO, REFUSES = NotThere(), Fault("refused")


class DrivenLoop(asyncio.SelectorEventLoop):
    """Time passes when the test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class TellableStore:
    """A client with look-ups only. Owns the calls that wait for an answer."""

    staging = None
    num_calls = NUM_CALLS
    blocks_per_object = 1

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[NotThere | Fault]] = []

    def names_per_call(self, way: Way) -> int:
        return 1

    async def find(self, names: Sequence[str], size: int) -> list[NotThere | Fault]:
        call: asyncio.Future[NotThere | Fault] = asyncio.get_running_loop().create_future()
        self.waiting.append(call)
        try:
            return [await call]
        finally:
            self.waiting.remove(call)

    async def get(self, names: Sequence[str], *_: object) -> list[NotThere | Fault]:
        return await self.find(names, 0)


class Busy:
    """Everything that carries orders to the store."""

    def __init__(self, loop: DrivenLoop) -> None:
        self.loop = loop
        self.store = TellableStore()
        self._breaker = Breaker()
        self._carrier = carrier.Carrier(
            cast(Any, self.store),
            Whose(bytes(32), 64),
            cast(Any, None),
            None,
            Bandwidth(None),
            self._breaker,
            lambda reason: None,
        )
        self._keys = np.random.default_rng()

    @property
    def ailment(self) -> str:
        return self._breaker.ailment

    def order(
        self, num_blocks: int, *, within: float, way: Way = Way.FIND
    ) -> asyncio.Task[ResultMessage]:
        message = OrderMessage(
            id=0,
            way=way,
            generation=0,
            deadline=self.loop.now + within,
            places=np.zeros(num_blocks, dtype=np.int64),
            keys=self._keys.integers(0, 1 << 63, (num_blocks, 4), dtype=np.uint64),
            sizes=np.array([64]),
            addresses=np.zeros((num_blocks, 1), dtype=np.int64),
        )
        return self.loop.create_task(self._carrier.carry(self._carrier.errand(message)))

    async def settle(self, seconds: float = 0.0) -> None:
        """Time passes, and whatever can go on by itself has gone on."""
        self.loop.now += seconds
        for _ in range(100):
            await asyncio.sleep(0)

    async def answer(self, answer: NotThere | Fault) -> None:
        """To all that is with the store now, a moment later."""
        self.loop.now += 0.001
        for call in self.store.waiting:
            call.set_result(answer)
        await self.settle()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    loop = DrivenLoop()
    clock = SimpleNamespace(monotonic=loop.time, perf_counter=loop.time)
    monkeypatch.setattr(carrier, "time", clock)
    yield Busy(loop)
    loop.close()


def run(busy: Busy, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    busy.loop.run_until_complete(story())


def test_a_busy_store_is_not_left_alone_for_who_had_his_turn_too_late(busy: Busy) -> None:
    """Seen red without a look at when the store last answered: it was left alone."""

    async def story() -> None:
        others = busy.order(NUM_CALLS, within=100.0)
        await busy.settle()
        late = busy.order(8, within=1.0)
        await busy.settle(0.5)
        assert not late.done()
        await busy.answer(SAYS_NO)
        assert len(busy.store.waiting) == NUM_CALLS, "now it is his turn"
        await busy.settle(1.0)
        reasons = set((await late).reasons.values())
        assert reasons == {"the store has not answered in time", "not begun in time"}
        assert not busy.ailment, "it answered others meanwhile"
        await others

    run(busy, story)


def test_a_store_that_hangs_is_left_alone_after_one_deadline(busy: Busy) -> None:
    """Whatever it answered before the order came."""

    async def story() -> None:
        before = busy.order(1, within=1.0)
        await busy.settle()
        await busy.answer(SAYS_NO)
        await before
        await busy.settle(0.1)
        order = busy.order(8, within=1.0)
        await busy.settle(0.5)
        assert not order.done()
        await busy.settle(1.0)
        await order
        assert busy.ailment == "the store has not answered in time"

    run(busy, story)


def test_so_is_one_that_refuses_everything(busy: Busy) -> None:
    """Seen red where any end of a call counted as an answer."""

    async def story() -> None:
        order = busy.order(NUM_CALLS, within=100.0)
        await busy.settle()
        await busy.answer(REFUSES)
        await order
        assert busy.ailment == "refused"

    run(busy, story)


def test_so_is_one_that_finds_objects_and_does_not_give_them(busy: Busy) -> None:
    """Seen red where an answer to a look-up counted for reads."""

    async def story() -> None:
        read = busy.order(1, within=1.0, way=Way.READ)
        await busy.settle()
        (reading,) = busy.store.waiting
        found = busy.order(1, within=100.0)
        await busy.settle(0.5)
        busy.store.waiting[-1].set_result(SAYS_NO)
        await found
        assert not reading.done()
        await busy.settle(1.0)
        await read
        assert busy.ailment == "the store has not answered in time"

    run(busy, story)
