"""Carries one order out: blocks between the engine's host slots and a store, each one proven.

::

    write   engine ── process_vm ──> staging ── seal ──> put        sealing: a checksum, or AES
    read    get ── is it whole, and ours? ── process_vm ──> engine
    where the engine's slots are mapped here: seal behind the slot ──> put
            get into the slot ── is it whole, and ours?

Where blocks are small, several of a chain go into one object (``packs.py``), each one sealed. No
block counts that has not been verified here. What has not come at the deadline is given up: from
then on nobody touches the memory it was for.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from kvferry.core.keys import Keys
from kvferry.tiers.contract import Way
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import OrderMessage, ResultMessage
from kvferry.tiers.remote.client import Fault, NotAsked, NotOurs, NotThere, StoreClient
from kvferry.tiers.remote.errand import NOT_BEGUN, End, Errand
from kvferry.tiers.remote.limits import Bandwidth, Breaker
from kvferry.tiers.remote.objects import (
    LookUp,
    Parcel,
    Sealing,
    Whereabouts,
    Whose,
    cut,
    open_sealing,
)
from kvferry.tiers.remote.window import Window, address_of
from kvferry.types import KEY_BYTES

_NOT_GIVEN = Fault("a block that it was given it does not give back")


class BlockTrial:
    """Owns the key of that block, which no prompt has."""

    def __init__(self, client: StoreClient, whose: Whose, sealing: Sealing) -> None:
        self._client = client
        self._whose = whose
        self._sealing = sealing
        self._key = secrets.token_bytes(KEY_BYTES)
        self._names = whose.names([self._key])

    async def make(self) -> Fault | None:
        """Write it, look it up, read it: all that orders do."""
        size = self._whose.object_bytes
        rooms = self._client.staging.lend(1)
        if not rooms:  # calls that hung may have them for a minute yet: nothing to try it with
            return None
        room = rooms[0][:size]
        self._sealing.plain(room)[:] = secrets.token_bytes(self._whose.block_bytes)
        self._sealing.seal(room, self._key)
        (end,) = await self._client.put(self._names, [room], replace=[True])
        if end is not None:  # without room for it there is nothing to be read
            return end if isinstance(end, Fault) else None
        (count,) = await self._client.find(self._names, size)
        if not isinstance(count, int):
            return count if isinstance(count, Fault) else _NOT_GIVEN
        (stored,) = await self._client.get(self._names, size, [])
        if not isinstance(stored, memoryview):
            return stored if isinstance(stored, Fault) else _NOT_GIVEN
        try:
            is_ours = self._sealing.unseal(stored, self._key) is not None
        finally:
            self._client.staging.give_back(stored)
        return None if is_ours else _NOT_GIVEN


# ------------------------------------------------------------------------------------------------
# Carries one order out: blocks between the engine's host slots and a store, each one proven.
#
# ::
#
#     write   engine ── process_vm ──> staging ── seal ──> put        sealing: a checksum, or AES
#     read    get ── is it whole, and ours? ── process_vm ──> engine
#     where the engine's slots are mapped here: seal behind the slot ──> put
#             get into the slot ── is it whole, and ours?
#
# Where blocks are small, several of a chain go into one object (``packs.py``), each one sealed. No
# block counts that has not been verified here. What has not come at the deadline is given up: from
# then on nobody touches the memory it was for.

_MOST_SUSPECTS = 4096
_NOT_COME = Fault("the store has not answered in time")

_Do = Callable[[Errand, Sequence[Parcel]], Awaitable[None]]
"""What is done with some objects; says of each block what became of it."""


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
        self._line = asyncio.Lock()  # who waits for the cap goes in the order of coming
        self._breaker = breaker
        self._tell = tell
        self._trial = BlockTrial(client, whose, self._sealing)
        # One more is made ready, or proven, beside those that are with the client.
        self._begun = {way: asyncio.Semaphore(client.num_calls + 1) for way in Way}
        self._calls = {way: asyncio.Semaphore(client.num_calls) for way in Way}
        self._suspects: dict[str, set[bytes]] = {}  # which blocks of an object are not ours
        self._whereabouts = Whereabouts()
        self._heard_at = dict.fromkeys(Way, float("-inf"))  # when it last answered anybody

    def errand(self, order: OrderMessage) -> Errand:
        keys = list(Keys(order.keys))
        return Errand(order, self._whose.names(keys, order.generation), keys)

    async def carry(self, errand: Errand) -> ResultMessage:
        """All of it, until its deadline."""
        start = time.perf_counter()
        if errand.order.way is Way.FIND:
            await self._look_up(errand)
        elif errand.order.way is Way.READ:
            await self._all(errand, self._whereabouts.parcels(errand.names), self._read)
        else:
            most = self._client.blocks_per_object
            await self._all(errand, cut(errand.names, errand.order.runs, most), self._write)
        self._judge(errand)
        return errand.result(self._whose.block_bytes, time.perf_counter() - start)

    async def _look_up(self, errand: Errand) -> None:
        names = errand.names
        look_up = LookUp(names, errand.order.runs, partial(self._is_doubted, errand))
        order = look_up.in_order(self._client.blocks_per_object)
        asked = [Parcel(names[at], (at,), (0,), 1) for at in order]
        await self._all(errand, asked, partial(self._find, look_up))
        for parcel in look_up.parcels():
            errand.end([parcel], None)
            self._whereabouts.note(parcel, names)

    async def _all(self, errand: Errand, parcels: Sequence[Parcel], does: _Do) -> None:
        step = self._client.names_per_call(errand.order.way)
        tasks = [
            asyncio.create_task(self._some(errand, parcels[at : at + step], does))
            for at in range(0, len(parcels), step)
        ]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, errand.left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _some(self, errand: Errand, parcels: Sequence[Parcel], does: _Do) -> None:
        async with self._begun[errand.order.way]:
            reason = await self._line_taken(errand, parcels)
            if reason:
                errand.end(parcels, NotAsked(reason))
                return
            try:
                await does(errand, parcels)
            except Exception as error:  # a bug of ours or of a client: these blocks have failed
                errand.end(parcels, Fault(f"{type(error).__name__}: {error}"))

    async def _line_taken(self, errand: Errand, parcels: Sequence[Parcel]) -> str:
        """Wait until the cap lets these through; else why they should not begin."""
        if errand.order.way is Way.FIND:
            return self._stopped(errand)
        num_bytes = sum(each.num_blocks for each in parcels) * self._whose.block_bytes
        async with self._line:
            while not (reason := self._stopped(errand)):
                wait = self._bandwidth.take(num_bytes, time.monotonic())
                if not wait:
                    return ""
                if wait >= errand.left:
                    return NOT_BEGUN
                await asyncio.sleep(wait)
            return reason

    @asynccontextmanager
    async def _turn(self, errand: Errand, parcels: Sequence[Parcel]) -> AsyncIterator[None]:
        """With the client: what does not come from here on is the store's fault."""
        async with self._calls[errand.order.way]:
            errand.end(parcels, _NOT_COME)
            yield

    def _stopped(self, errand: Errand) -> str:
        """Why no further block of it should begin; empty while they should."""
        if errand.is_cancelled:
            return "cancelled"
        return self._breaker.ailment or (NOT_BEGUN if errand.left <= 0 else "")

    async def _find(self, look_up: LookUp, errand: Errand, parcels: Sequence[Parcel]) -> None:
        # Some may have been found meanwhile, in an object that has them too.
        asked = [each for each in parcels if not look_up.is_told(each.positions[0])]
        names = [each.name for each in asked]
        if not names:
            return
        async with self._turn(errand, asked):
            counts = await self._client.find(names, self._whose.object_bytes)
        self._hear(errand.order.way, counts)
        for parcel, count in zip(asked, counts, strict=True):
            (at,) = parcel.positions
            if isinstance(count, int):
                # What we know to be no block of ours is not there, whatever the store says.
                errand.end([parcel], NotThere("it is not what it should be"))
                look_up.found(at, count)
                continue
            if isinstance(count, NotOurs):
                self._suspect(parcel.name, errand.keys[at])
            errand.end([parcel], count)

    def _is_doubted(self, errand: Errand, of: int, at: int) -> bool:
        return errand.keys[at] in self._suspects.get(errand.names[of], ())

    async def _read(self, errand: Errand, parcels: Sequence[Parcel]) -> None:
        names = [each.name for each in parcels]
        slots = self._in_place(errand.order, parcels)
        async with self._turn(errand, parcels):
            given = await self._client.get(names, self._whose.object_bytes, slots)
        self._hear(errand.order.way, given)
        await asyncio.sleep(0)  # whose turn it is now begins, and goes on beside our proofs
        for parcel, stored in zip(parcels, given, strict=True):
            if isinstance(stored, memoryview):
                try:
                    self._take_out(errand, parcel, stored, in_place=bool(slots))
                finally:
                    self._staging.give_back(stored)
            else:
                errand.end([parcel], stored)
            for at in parcel.positions:
                if isinstance(errand.ends[at], NotThere):
                    self._whereabouts.drop(errand.names[at])
                if isinstance(errand.ends[at], NotOurs):
                    self._suspect(parcel.name, errand.keys[at])

    def _take_out(
        self, errand: Errand, parcel: Parcel, stored: memoryview, *, in_place: bool
    ) -> None:
        """Bring those of an object's blocks that are wanted, and are proven, to where they go."""
        size = self._whose.object_bytes
        for at, behind in zip(parcel.positions, parcel.behind, strict=True):
            start = len(stored) - (behind + 1) * size
            if start < 0:
                errand.ends[at] = NotThere("the object has become shorter")
                continue
            block = self._sealing.unseal(stored[start : start + size], errand.keys[at])
            errand.ends[at] = self._end(errand, at, block, in_place=in_place)

    def _in_place(self, order: OrderMessage, parcels: Sequence[Parcel]) -> list[memoryview]:
        """The engine's own slots as rooms for these objects; none where they must be copied."""
        if self._window is None or len(order.sizes) != 1:
            return []
        there = order.addresses[[each.positions[0] for each in parcels], 0]
        return self._window.rooms(there, self._whose.object_bytes)

    def _end(self, errand: Errand, at: int, block: memoryview | None, *, in_place: bool) -> End:
        """Bring a block that was proven to where it should be, if it is not there yet."""
        if block is None:
            return NotOurs("what is there is no block of ours: it fails its proof")
        if not in_place:
            here, there, sizes = self._pieces(errand.order, at, block)
            if not self._memory.deliver(here, there, sizes).all():
                return NotThere("the engine's memory cannot be written")
        return None

    async def _write(self, errand: Errand, parcels: Sequence[Parcel]) -> None:
        slots = self._in_place(errand.order, parcels)
        rooms = slots or self._staging.lend(len(parcels))
        if not rooms:
            errand.end(parcels, NotAsked("too many calls to the store hang"))
            return
        objects = [
            room[: each.num_blocks * self._whose.object_bytes]
            for each, room in zip(parcels, rooms, strict=True)
        ]
        for parcel, room in zip(parcels, objects, strict=True):
            if not self._put_in(errand, parcel, room, in_place=bool(slots)):
                self._give_back(rooms)
                errand.end(parcels, NotThere("the engine's memory cannot be read"))
                return
        names = [each.name for each in parcels]
        replace = [self._mends(errand, each) for each in parcels]
        is_ours = True
        try:
            async with self._turn(errand, parcels):
                is_ours = False  # the client's, who gives them back
                ends = await self._client.put(names, objects, replace=replace)
        finally:
            if is_ours:
                self._give_back(rooms)
        self._hear(errand.order.way, ends)
        for parcel, end, is_new in zip(parcels, ends, replace, strict=True):
            errand.end([parcel], end)
            if end is None:
                if is_new:
                    self._suspects.pop(parcel.name, None)
                self._whereabouts.note(parcel, errand.names)

    def _mends(self, errand: Errand, parcel: Parcel) -> bool:
        """Whether it brings a block that is not ours in the object of its name.

        Only then may it take that object's place: one that brings none of them may be shorter, and
        what it lacks, which is good, would be lost for nothing.
        """
        suspects = self._suspects.get(parcel.name, set())
        return any(errand.keys[at] in suspects for at in parcel.positions)

    def _put_in(self, errand: Errand, parcel: Parcel, room: memoryview, *, in_place: bool) -> bool:
        """Make an object of blocks; False where they cannot be had."""
        size = self._whose.object_bytes
        for start, at in zip(range(0, len(room), size), parcel.positions, strict=True):
            piece = room[start : start + size]
            if not in_place and not self._fetch(errand, at, self._sealing.plain(piece)):
                return False
            self._sealing.seal(piece, errand.keys[at])
        return True

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

    def _suspect(self, name: str, key: bytes) -> None:
        """This block in the object is not ours. The next object that has it replaces that one."""
        while name not in self._suspects and len(self._suspects) >= _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects.setdefault(name, set()).add(key)

    # -- health -------------------------------------------------------------------------------

    def _hear(self, way: Way, said: Sequence[object]) -> None:
        if not all(isinstance(each, Fault) for each in said):
            self._heard_at[way] = time.monotonic()

    def _judge(self, errand: Errand) -> None:
        """What an order tells of the store: all faults and no answer, and it is left alone.

        A store that hangs takes as many blocks as are asked for at once; those that wait behind
        them were never asked for, and are no answer. But one that is merely busy may come to an
        order so late that nothing of it is answered: it has answered others meanwhile.
        """
        way = errand.order.way
        faults = [end for end in errand.ends if isinstance(end, Fault)]
        done = sum(end is None for end in errand.ends)
        said_no = sum(
            isinstance(end, NotThere) and not isinstance(end, NotAsked) for end in errand.ends
        )
        answers = done if way is Way.WRITE else done + said_no
        is_silent = self._heard_at[way] <= errand.came
        if faults and not answers and is_silent and not self._breaker.ailment:
            self._breaker.failed(faults[0].reason, time.monotonic(), way)
            self._tell(self._breaker.ailment)
        elif not faults and (answers if way is Way.FIND else done):
            self._breaker.worked(way)

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
        before = self._breaker.ailment
        fault = await _ended(self._client.probe(), within)
        if fault is None and before:
            await self._line_free(2 * self._whose.block_bytes)
            # The longer it has been away, the more time it is given: blocks may be large, and
            # lines slow.
            fault = await _ended(self._trial.make(), max(within, self._breaker.wait))
        if fault is not None:
            self._breaker.failed(fault.reason, time.monotonic())
        else:
            self._breaker.probed()
        if self._breaker.ailment != before:
            self._tell(self._breaker.ailment)

    async def _line_free(self, num_bytes: int) -> None:
        """The cap lets these through, which no order waits for."""
        while wait := self._bandwidth.take(num_bytes, time.monotonic()):
            await asyncio.sleep(wait)


async def _ended(trying: Awaitable[Fault | None], within: float) -> Fault | None:
    try:
        return await asyncio.wait_for(trying, within)
    except asyncio.TimeoutError:
        return Fault(f"the store has not answered for {within:g} s")
    except Exception as error:  # or nobody would ask the store again
        return Fault(f"{type(error).__name__}: {error}")
