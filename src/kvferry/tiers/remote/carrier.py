"""Carries one order out: blocks between the engine's host slots and a store, each one proven.

::

    write   engine ── process_vm ──> staging ── seal ──> put        sealing: a checksum, or AES
    read    get ── is it whole, and ours? ── process_vm ──> engine
    where the engine's slots are mapped here: seal behind the slot ──> put
            get into the slot ── is it whole, and ours?

No block counts that has not been verified here. What has not come at the deadline is given up: from
then on nobody touches the memory it was for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.keys import Keys
from kvferry.tiers.base import Way
from kvferry.tiers.disk.engine_memory import EngineMemory
from kvferry.tiers.disk.messages import OrderMessage, ResultMessage
from kvferry.tiers.remote.bandwidth import Bandwidth
from kvferry.tiers.remote.breaker import Breaker
from kvferry.tiers.remote.client import Fault, NotThere, StoreClient
from kvferry.tiers.remote.names import Whose
from kvferry.tiers.remote.sealing import open_sealing
from kvferry.tiers.remote.staging import address_of
from kvferry.tiers.remote.window import Window

_MOST_SUSPECTS = 4096
_NOT_BEGUN = "not begun in time"
_NOT_COME = Fault("the store has not answered in time")

_End = NotThere | Fault | None
"""What became of one block; None: it moved, or is there."""


@dataclass(eq=False)
class Errand:
    """An order under way. Owns what became of each block so far."""

    order: OrderMessage
    names: list[str]
    keys: Sequence[bytes]
    is_cancelled: bool = False
    ends: list[_End] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [NotThere(_NOT_BEGUN)] * len(self.names)

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return self.order.deadline - time.monotonic()


class Carrier:
    """Owns the limits on what is under way, and which objects turned out not to be ours."""

    def __init__(
        self,
        client: StoreClient,
        whose: Whose,
        memory: EngineMemory,
        window: Window | None,
        bandwidth: Bandwidth,
        breaker: Breaker,
        tell: Callable[[str], None],
    ) -> None:
        """``tell`` hears why the store cannot be used, whenever that changes."""
        self._client = client
        self._staging = client.staging
        self._whose = whose
        self._sealing = open_sealing(whose)
        self._memory = memory
        self._window = window
        self._bandwidth = bandwidth
        self._breaker = breaker
        self._tell = tell
        # One more is made ready, or proven, beside those that are with the client.
        self._begun = {way: asyncio.Semaphore(client.num_calls + 1) for way in Way}
        self._calls = {way: asyncio.Semaphore(client.num_calls) for way in Way}
        self._suspects: dict[str, None] = {}
        self._does = {Way.FIND: self._find, Way.READ: self._read, Way.WRITE: self._write}

    def errand(self, order: OrderMessage) -> Errand:
        keys = list(Keys(order.keys))
        return Errand(order, self._whose.names(keys, order.generation), keys)

    async def carry(self, errand: Errand) -> ResultMessage:
        """All of it, until its deadline."""
        start = time.perf_counter()
        step, count = self._client.names_per_call(errand.order.way), len(errand.names)
        tasks = [
            asyncio.create_task(self._some(errand, range(at, min(at + step, count))))
            for at in range(0, count, step)
        ]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, errand.left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._judge(errand)
        return _result(errand, self._whose.block_bytes, time.perf_counter() - start)

    async def _some(self, errand: Errand, positions: range) -> None:
        way = errand.order.way
        async with self._begun[way]:
            if way is not Way.FIND:
                num_bytes = len(positions) * self._whose.block_bytes
                await asyncio.sleep(self._bandwidth.wait(num_bytes, time.monotonic()))
            reason = self._stopped(errand)
            if reason:
                errand.ends[positions.start : positions.stop] = [NotThere(reason)] * len(positions)
                return
            try:
                ends = await self._does[way](errand, positions)
            except Exception as error:  # a bug of ours or of a client: these blocks have failed
                ends = [Fault(f"{type(error).__name__}: {error}")] * len(positions)
            errand.ends[positions.start : positions.stop] = ends

    @asynccontextmanager
    async def _turn(self, errand: Errand, positions: range) -> AsyncIterator[None]:
        """With the client: what does not come from here on is the store's fault."""
        async with self._calls[errand.order.way]:
            errand.ends[positions.start : positions.stop] = [_NOT_COME] * len(positions)
            yield

    def _stopped(self, errand: Errand) -> str:
        """Why no further block of it should begin; empty while they should."""
        if errand.is_cancelled:
            return "cancelled"
        return self._breaker.ailment or (_NOT_BEGUN if errand.left <= 0 else "")

    async def _find(self, errand: Errand, positions: range) -> list[_End]:
        names = errand.names[positions.start : positions.stop]
        async with self._turn(errand, positions):
            ends = await self._client.find(names, self._whose.object_bytes)
        for name, end in zip(names, ends, strict=True):
            if isinstance(end, NotThere) and end.reason != NotThere.reason:
                self._suspect(name)
        # What we know to be no block of ours is not there, whatever the store says.
        return [
            NotThere("it is not what it should be")
            if end is None and name in self._suspects
            else end
            for name, end in zip(names, ends, strict=True)
        ]

    async def _read(self, errand: Errand, positions: range) -> list[_End]:
        names = errand.names[positions.start : positions.stop]
        ends: list[_End] = []
        slots = self._in_place(errand.order, positions)
        async with self._turn(errand, positions):
            given = await self._client.get(names, self._whose.object_bytes, slots)
        await asyncio.sleep(0)  # whose turn it is now begins, and goes on beside our proofs
        for at, name, stored in zip(positions, names, given, strict=True):
            if not isinstance(stored, memoryview):
                ends.append(stored)
                continue
            try:
                block = self._sealing.unseal(stored, errand.keys[at])
                ends.append(self._end(errand, at, block, in_place=bool(slots)))
            finally:
                self._staging.give_back(stored)
            if block is None:
                self._suspect(name)
        return ends

    def _in_place(self, order: OrderMessage, positions: range) -> list[memoryview]:
        """The engine's own slots as rooms for these objects; none where they must be copied."""
        if self._window is None or len(order.sizes) != 1:
            return []
        there = order.addresses[positions.start : positions.stop, 0]
        return self._window.rooms(there, self._whose.object_bytes)

    def _end(self, errand: Errand, at: int, block: memoryview | None, *, in_place: bool) -> _End:
        """Bring a block that was proven to where it should be, if it is not there yet."""
        if block is None:
            return NotThere("what is there is no block of ours: it fails its proof")
        if not in_place:
            here, there, sizes = self._pieces(errand.order, at, block)
            if not self._memory.deliver(here, there, sizes).all():
                return NotThere("the engine's memory cannot be written")
        return None

    async def _write(self, errand: Errand, positions: range) -> list[_End]:
        slots = self._in_place(errand.order, positions)
        rooms = slots or self._staging.lend(len(positions))
        if not rooms:
            return [Fault("too many calls to the store hang")] * len(positions)
        for at, room in zip(positions, rooms, strict=True):
            if not slots and not self._fetch(errand, at, self._sealing.plain(room)):
                self._give_back(rooms)
                return [NotThere("the engine's memory cannot be read")] * len(positions)
            self._sealing.seal(room, errand.keys[at])
        names = errand.names[positions.start : positions.stop]
        replace = [name in self._suspects for name in names]
        is_ours = True
        try:
            async with self._turn(errand, positions):
                is_ours = False  # the client's, who gives them back
                ends = await self._client.put(names, rooms, replace=replace)
        finally:
            if is_ours:
                self._give_back(rooms)
        for name, end in zip(names, ends, strict=True):
            if end is None:
                self._suspects.pop(name, None)
        return list(ends)

    def _give_back(self, rooms: Sequence[memoryview]) -> None:
        for each in rooms:
            self._staging.give_back(each)

    def _fetch(self, errand: Errand, at: int, room: memoryview) -> bool:
        here, there, sizes = self._pieces(errand.order, at, room)
        return bool(self._memory.fetch(here, there, sizes).all())

    @staticmethod
    def _pieces(order: OrderMessage, at: int, room: memoryview) -> tuple[Any, Any, Any]:
        """A block's pieces: where they are here, where in the engine, and their sizes."""
        offsets = np.cumsum(order.sizes) - order.sizes
        return address_of(room) + offsets, order.addresses[at], order.sizes

    def _suspect(self, name: str) -> None:
        """What lies under this name is not ours. The next write replaces it, where it may."""
        while len(self._suspects) >= _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects[name] = None

    # -- health -------------------------------------------------------------------------------

    def _judge(self, errand: Errand) -> None:
        """What an order tells of the store: all faults and no answer, and it is left alone."""
        faults = [end for end in errand.ends if isinstance(end, Fault)]
        answers = sum(end is None for end in errand.ends)
        if errand.order.way is not Way.WRITE:
            answers += sum(isinstance(end, NotThere) for end in errand.ends)
        if faults and not answers and not self._breaker.ailment:
            self._breaker.failed(faults[0].reason, time.monotonic())
            self._tell(self._breaker.ailment)
        elif answers and not faults:
            self._breaker.worked()

    async def watch(self, within: float, first: Callable[[], None]) -> None:
        """For ever: probe the store once, and then whenever it is out of order.

        ``first`` is called when the first probe has ended, however it did.
        """
        await self._probe(within)
        first()
        while True:
            await asyncio.sleep(0.02)
            if self._breaker.ailment and time.monotonic() >= self._breaker.probe_at:
                await self._probe(within)

    async def _probe(self, within: float) -> None:
        probing: Coroutine[Any, Any, Fault | None] = self._client.probe()
        try:
            fault = await asyncio.wait_for(probing, within)
        except asyncio.TimeoutError:
            fault = Fault(f"the store has not answered for {within:g} s")
        before = self._breaker.ailment
        if fault is not None:
            self._breaker.failed(fault.reason, time.monotonic())
        else:
            self._breaker.probed()
        if self._breaker.ailment != before:
            self._tell(self._breaker.ailment)


def _result(errand: Errand, block_bytes: int, seconds: float) -> ResultMessage:
    ok = np.array([end is None for end in errand.ends], dtype=bool)
    reasons = {at: end.reason for at, end in enumerate(errand.ends) if end is not None}
    moved = 0 if errand.order.way is Way.FIND else int(ok.sum()) * block_bytes
    return ResultMessage(errand.order.id, ok, reasons, moved, seconds)
