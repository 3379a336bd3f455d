"""What carries orders to a store that answers when told to, on a clock that is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Batch, BatchId, Result, Way
from kvferry.tiers.remote import health, process
from kvferry.tiers.remote.client import Fault, Unavailable
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.process import InFlightBatch

NUM_CALLS, BLOCK_BYTES = 2, 64
OBJECTS = ObjectFormat(bytes(32), BLOCK_BYTES)
Answer = Unavailable | Fault | memoryview
SAYS_NO, REFUSES = Unavailable(), Fault("refused")


class DrivenLoop(asyncio.SelectorEventLoop):
    """Time passes when the test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class TellableStore:
    """A client with look-ups only. Owns the calls that wait for an answer."""

    staging = SimpleNamespace(give_back=lambda *rooms: None)
    num_calls = NUM_CALLS

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Answer]] = []

    def names_per_call(self, way: Way) -> int:
        return 1

    async def find(self, names: Sequence[str], size: int) -> list[Answer]:
        call: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting.append(call)
        try:
            return [await call]
        finally:
            self.waiting.remove(call)

    async def get(self, names: Sequence[str], *_: object) -> list[Answer]:
        return await self.find(names, 0)


class Busy:
    """Everything that carries orders to the store."""

    def __init__(self, loop: DrivenLoop) -> None:
        self.loop = loop
        self.store = TellableStore()
        self.transfers = process.StoreTransfers(
            cast(Any, self.store),
            OBJECTS,
            cast(Any, SimpleNamespace(deliver=lambda *_: np.ones(1, dtype=bool))),
            lambda way, reason: None,
        )
        self.breaker = self.transfers.health.reads
        self._keys = np.random.default_rng()

    @property
    def ailment(self) -> str:
        return self.breaker.ailment

    def order(self, num_blocks: int, *, within: float, way: Way = Way.FIND) -> asyncio.Task[Result]:
        return self.carry(self.batch(num_blocks, within, way))

    def carry(self, batch: InFlightBatch) -> asyncio.Task[Result]:
        return self.loop.create_task(self.transfers.carry(batch))

    def batch(self, num_blocks: int, within: float, way: Way) -> InFlightBatch:
        message = Batch(
            BatchId(0),
            way,
            Keys(self._keys.integers(0, 1 << 63, (num_blocks, 4), dtype=np.uint64)),
            self.loop.now + within,
            np.zeros((num_blocks, 1), dtype=np.int64),
            np.array([BLOCK_BYTES]),
        )
        return self.transfers.begin(message, 0)

    async def settle(self, seconds: float = 0.0) -> None:
        """Time passes, and whatever can go on by itself has gone on."""
        self.loop.now += seconds
        for _ in range(100):
            await asyncio.sleep(0)

    async def answer(self, answer: Answer) -> None:
        """To all that is with the store now, a moment later."""
        self.loop.now += 0.001
        for call in self.store.waiting:
            call.set_result(answer)
        await self.settle()


@contextmanager
def driven() -> Iterator[Busy]:
    loop = DrivenLoop()
    clock = SimpleNamespace(monotonic=loop.time, perf_counter=loop.time)
    with patch.object(process, "time", clock), patch.object(health, "time", clock):
        yield Busy(loop)
    loop.close()


def run(busy: Busy, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    busy.loop.run_until_complete(story())
