"""The child process that speaks with a shared store.

A process and not a thread: hashing and sending a block takes the interpreter lock only briefly, but
getting it back beside a thread that computes takes 5 ms each time. For blocks of 1 MiB that is 0.2
GB/s. It also means that a client that crashes or hangs can be ended, with the engine unharmed and
its memory untouched. The process ends when its channel to the engine does::

    write   engine ── process_vm ──> staging ── seal ──> put        sealing: a checksum, or AES
    read    get ── verify ── process_vm ──> engine
    where the engine's slots are mapped here: seal behind the slot ──> put; get into the slot

Where blocks are small, several of a chain go into one object, each one sealed. No block counts that
has not been verified here. A call without an answer at the deadline is given up: from then on it
does not touch the engine's memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvferry.core.keys import KEY_BYTES, Keys
from kvferry.settings.tiers import MOONCAKE, RemoteAddress, read_remote
from kvferry.tiers.contract import Way
from kvferry.tiers.ipc import child
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import (
    Channel,
    FrameKind,
    OrderMessage,
    ResultMessage,
    frame,
    pack_result,
    pack_says,
    pack_text,
    unpack_number,
    unpack_order,
)
from kvferry.tiers.remote.client import (
    Fault,
    Foreign,
    NotAttempted,
    SlotMapping,
    StoreClient,
    Unavailable,
    address_of,
)
from kvferry.tiers.remote.objects import (
    ObjectFormat,
    ObjectIndex,
    PackLookup,
    Sealer,
    StoreObject,
    best_in_one,
    open_sealer,
    pack_objects,
)

FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0
_BURST_SECONDS = 0.05
_MOST_SUSPECTS = 4096
_NOT_BEGUN = "not begun in time"
_NOT_ANSWERED = Fault("the store has not answered in time")
_NOT_GIVEN_BACK = Fault("a block that it was given it does not give back")

End = Unavailable | Fault | None
"""What became of one block; None: it moved, or is there."""


class Bandwidth:
    """A bound on bytes a second; ``None`` is no bound. Owns when the line is free again.

    Bytes count from the moment they go. Bytes that wait reserve nothing: a batch that is given up
    would have to return its reservation, or the line would seem taken for ever.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """Let these bytes go and return 0; or take nothing and return the seconds to wait."""
        if self._rate is None:
            return 0.0
        if self._free_at > now:
            return self._free_at - now
        # What was not used lately may be used at once, but not for longer than a burst.
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + num_bytes / self._rate
        return 0.0


class CircuitBreaker:
    """Owns whether the store may be called, why not, and when to probe it next.

    ::

        closed ── a whole batch failed by the store's fault ──> open ── a probe succeeded ──> closed
                                                                 └── it failed: the next one later

    A probe that succeeds does not yet make the next wait short again: only batches do, and of the
    way that failed. A store that serves probes or lookups, and no blocks, is called ever more
    seldom. ``now`` is ``time.monotonic``; ``jitter`` keeps a fleet's servers from probing in step.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.ailment = ""
        self.probe_at = 0.0
        self.wait = FIRST_WAIT
        """How long it is left alone when it fails next, at most."""
        self._failed: set[Way] = set()
        self._jitter = jitter

    def failed(self, reason: str, now: float, way: Way | None = None) -> None:
        """A whole batch of this way, or a probe (without a way), failed by the store's fault."""
        if way is not None:
            self._failed.add(way)
        self.ailment = reason or "out of order"
        self.probe_at = now + self.wait * (0.5 + 0.5 * self._jitter())
        self.wait = min(2 * self.wait, LONGEST_WAIT)

    def probed(self) -> None:
        """A probe succeeded."""
        self.ailment = ""

    def worked(self, way: Way) -> None:
        """Blocks moved this way, or were looked up."""
        self._failed.discard(way)
        if not self._failed:
            self.wait = FIRST_WAIT


@dataclass(eq=False)
class InFlightBatch:
    """A batch under way. Owns what became of each block so far."""

    order: OrderMessage
    names: list[str]
    keys: Sequence[bytes]
    is_cancelled: bool = False
    began: float = field(default_factory=lambda: time.monotonic())
    ends: list[End] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [NotAttempted(_NOT_BEGUN)] * len(self.names)

    def end(self, objects: Sequence[StoreObject], end: End) -> None:
        """All blocks of these objects ended so."""
        for each in objects:
            for at in each.positions:
                self.ends[at] = end

    @property
    def seconds_left(self) -> float:
        """Seconds until its deadline."""
        return self.order.deadline - time.monotonic()

    def result(self, block_bytes: int, seconds: float) -> ResultMessage:
        """The message to the engine."""
        ok = np.array([end is None for end in self.ends], dtype=bool)
        reasons = {at: end.reason for at, end in enumerate(self.ends) if end is not None}
        moved = 0 if self.order.way is Way.FIND else int(ok.sum()) * block_bytes
        return ResultMessage(self.order.id, ok, reasons, moved, seconds)


class BlockProbe:
    """Writes, looks up and reads one block under a key that no prompt has. Owns that key."""

    def __init__(self, client: StoreClient, objects: ObjectFormat, sealer: Sealer) -> None:
        self._client = client
        self._objects = objects
        self._sealer = sealer
        self._key = secrets.token_bytes(KEY_BYTES)
        self._names = objects.names([self._key])

    async def run(self) -> Fault | None:
        """Do all that batches do; the store's fault if it has one."""
        size = self._objects.object_bytes
        rooms = self._client.staging.lend(1)
        if not rooms:  # calls that hang may have all rooms for a minute: nothing to probe with
            return None
        room = rooms[0][:size]
        self._sealer.plain(room)[:] = secrets.token_bytes(self._objects.block_bytes)
        self._sealer.seal(room, self._key)
        (end,) = await self._client.put(self._names, [room], replace=[True])
        if end is not None:  # without room for it there is nothing to be read
            return end if isinstance(end, Fault) else None
        (count,) = await self._client.find(self._names, size)
        if not isinstance(count, int):
            return count if isinstance(count, Fault) else _NOT_GIVEN_BACK
        (fetched,) = await self._client.get(self._names, size, [])
        if not isinstance(fetched, memoryview):
            return fetched if isinstance(fetched, Fault) else _NOT_GIVEN_BACK
        try:
            is_ours = self._sealer.unseal(fetched, self._key) is not None
        finally:
            self._client.staging.give_back(fetched)
        return None if is_ours else _NOT_GIVEN_BACK


_Step = Callable[[InFlightBatch, Sequence[StoreObject]], Awaitable[None]]
"""Looks up, reads or writes some objects, and ends each of their blocks."""


class StoreTransfers:
    """Owns the limits on what is in flight, which objects were found to be foreign, and health."""

    def __init__(
        self,
        client: StoreClient,
        objects: ObjectFormat,
        memory: EngineMemory,
        mapping: SlotMapping | None,
        bandwidth: Bandwidth,
        breaker: CircuitBreaker,
        report: Callable[[str], None],
    ) -> None:
        """``report`` receives why the store cannot be used, whenever that changes."""
        self._client = client
        self._staging = client.staging
        self._objects = objects
        self._sealer = open_sealer(objects)
        self._memory = memory
        self._mapping = mapping
        self._bandwidth = bandwidth
        self._line = asyncio.Lock()  # callers that wait for bandwidth go in order
        self._breaker = breaker
        self._report = report
        self._block_probe = BlockProbe(client, objects, self._sealer)
        # One more is prepared, or verified, beside those that are with the client.
        self._begun = {way: asyncio.Semaphore(client.num_calls + 1) for way in Way}
        self._calls = {way: asyncio.Semaphore(client.num_calls) for way in Way}
        self._suspects: dict[str, set[bytes]] = {}  # object -> keys of its foreign blocks
        self._index = ObjectIndex()
        self._answered_at = dict.fromkeys(Way, float("-inf"))

    def begin(self, order: OrderMessage) -> InFlightBatch:
        """The batch of an order, before it is carried out."""
        keys = list(Keys(order.keys))
        return InFlightBatch(order, self._objects.names(keys, order.generation), keys)

    async def carry(self, batch: InFlightBatch) -> ResultMessage:
        """Carry a batch out, until its deadline."""
        start = time.perf_counter()
        if batch.order.way is Way.FIND:
            await self._look_up(batch)
        elif batch.order.way is Way.READ:
            await self._run(batch, self._index.objects_of(batch.names), self._read)
        else:
            most = self._client.blocks_per_object
            await self._run(batch, pack_objects(batch.names, batch.order.runs, most), self._write)
        self._judge(batch)
        return batch.result(self._objects.block_bytes, time.perf_counter() - start)

    async def _look_up(self, batch: InFlightBatch) -> None:
        names = batch.names
        lookup = PackLookup(names, batch.order.runs, partial(self._is_suspect, batch))
        order = lookup.order(self._client.blocks_per_object)
        asked = [StoreObject(names[at], (at,), (0,), 1) for at in order]
        await self._run(batch, asked, partial(self._find, lookup))
        for found in lookup.objects():
            batch.end([found], None)
            self._index.note(found, names)

    async def _run(self, batch: InFlightBatch, objects: Sequence[StoreObject], step: _Step) -> None:
        count = self._client.names_per_call(batch.order.way)
        tasks = [
            asyncio.create_task(self._run_some(batch, objects[at : at + count], step))
            for at in range(0, len(objects), count)
        ]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, batch.seconds_left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_some(
        self, batch: InFlightBatch, objects: Sequence[StoreObject], step: _Step
    ) -> None:
        async with self._begun[batch.order.way]:
            reason = await self._wait_for_line(batch, objects)
            if reason:
                batch.end(objects, NotAttempted(reason))
                return
            try:
                await step(batch, objects)
            except Exception as error:  # a bug here or in a client: these blocks have failed
                batch.end(objects, Fault(f"{type(error).__name__}: {error}"))

    async def _wait_for_line(self, batch: InFlightBatch, objects: Sequence[StoreObject]) -> str:
        """Wait for bandwidth; return why the objects should not begin, or nothing."""
        if batch.order.way is Way.FIND:
            return self._stopped(batch)
        num_bytes = sum(each.num_blocks for each in objects) * self._objects.block_bytes
        async with self._line:
            while not (reason := self._stopped(batch)):
                wait = self._bandwidth.take(num_bytes, time.monotonic())
                if not wait:
                    return ""
                if wait >= batch.seconds_left:
                    return _NOT_BEGUN
                await asyncio.sleep(wait)
            return reason

    def _stopped(self, batch: InFlightBatch) -> str:
        """Why no further block of it should begin; empty while they should."""
        if batch.is_cancelled:
            return "cancelled"
        return self._breaker.ailment or (_NOT_BEGUN if batch.seconds_left <= 0 else "")

    @asynccontextmanager
    async def _call(
        self, batch: InFlightBatch, objects: Sequence[StoreObject]
    ) -> AsyncIterator[None]:
        """Around a call to the client: without an answer, its blocks end by the store's fault."""
        async with self._calls[batch.order.way]:
            batch.end(objects, _NOT_ANSWERED)
            yield

    async def _find(
        self, lookup: PackLookup, batch: InFlightBatch, objects: Sequence[StoreObject]
    ) -> None:
        # Some may have been found meanwhile, in an object that has them too.
        asked = [each for each in objects if not lookup.is_answered(each.positions[0])]
        names = [each.name for each in asked]
        if not names:
            return
        async with self._call(batch, asked):
            counts = await self._client.find(names, self._objects.object_bytes)
        self._note_answers(batch.order.way, counts)
        for each, count in zip(asked, counts, strict=True):
            (at,) = each.positions
            if isinstance(count, int):
                # A block that is known to be foreign is missing, whatever the store says.
                batch.end([each], Unavailable("it is not what it should be"))
                lookup.found(at, count)
                continue
            if isinstance(count, Foreign):
                self._suspect(each.name, batch.keys[at])
            batch.end([each], count)

    def _is_suspect(self, batch: InFlightBatch, of: int, at: int) -> bool:
        return batch.keys[at] in self._suspects.get(batch.names[of], ())

    def _suspect(self, name: str, key: bytes) -> None:
        """This block in the object is foreign. The next object that has it replaces that one."""
        while name not in self._suspects and len(self._suspects) >= _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects.setdefault(name, set()).add(key)

    async def _read(self, batch: InFlightBatch, objects: Sequence[StoreObject]) -> None:
        names = [each.name for each in objects]
        slots = self._slots(batch.order, objects)
        async with self._call(batch, objects):
            fetched = await self._client.get(names, self._objects.object_bytes, slots)
        self._note_answers(batch.order.way, fetched)
        await asyncio.sleep(0)  # the next call begins, and goes on while these are verified
        for each, content in zip(objects, fetched, strict=True):
            if isinstance(content, memoryview):
                try:
                    self._take_out(batch, each, content, in_place=bool(slots))
                finally:
                    self._staging.give_back(content)
            else:
                batch.end([each], content)
            for at in each.positions:
                if isinstance(batch.ends[at], Unavailable):
                    self._index.drop(batch.names[at])
                if isinstance(batch.ends[at], Foreign):
                    self._suspect(each.name, batch.keys[at])

    def _take_out(
        self, batch: InFlightBatch, source: StoreObject, content: memoryview, *, in_place: bool
    ) -> None:
        """Verify the wanted blocks of an object and bring them to the engine's memory."""
        size = self._objects.object_bytes
        for at, behind in zip(source.positions, source.behind, strict=True):
            start = len(content) - (behind + 1) * size
            if start < 0:
                batch.ends[at] = Unavailable("the object has become shorter")
                continue
            block = self._sealer.unseal(content[start : start + size], batch.keys[at])
            batch.ends[at] = None
            if block is None:
                batch.ends[at] = Foreign("what is there is no block of ours: it fails its proof")
            elif not in_place and not self._copy(self._memory.deliver, batch.order, at, block):
                batch.ends[at] = Unavailable("the engine's memory cannot be written")

    def _slots(self, order: OrderMessage, objects: Sequence[StoreObject]) -> list[memoryview]:
        """The engine's slots as rooms for these objects; none where they must be copied."""
        if self._mapping is None or len(order.sizes) != 1:
            return []
        there = order.addresses[[each.positions[0] for each in objects], 0]
        return self._mapping.rooms(there, self._objects.object_bytes)

    async def _write(self, batch: InFlightBatch, objects: Sequence[StoreObject]) -> None:
        slots = self._slots(batch.order, objects)
        rooms = slots or self._staging.lend(len(objects))
        if not rooms:
            batch.end(objects, NotAttempted("too many calls to the store hang"))
            return
        size = self._objects.object_bytes
        contents = [
            room[: each.num_blocks * size] for each, room in zip(objects, rooms, strict=True)
        ]
        for each, content in zip(objects, contents, strict=True):
            if not self._put_in(batch, each, content, in_place=bool(slots)):
                self._give_back(rooms)
                batch.end(objects, Unavailable("the engine's memory cannot be read"))
                return
        names = [each.name for each in objects]
        replace = [self._replaces(batch, each) for each in objects]
        is_ours = True
        try:
            async with self._call(batch, objects):
                is_ours = False  # the client gives them back
                ends = await self._client.put(names, contents, replace=replace)
        finally:
            if is_ours:
                self._give_back(rooms)
        self._note_answers(batch.order.way, ends)
        for each, end, is_new in zip(objects, ends, replace, strict=True):
            batch.end([each], end)
            if end is None:
                if is_new:
                    self._suspects.pop(each.name, None)
                self._index.note(each, batch.names)

    def _replaces(self, batch: InFlightBatch, source: StoreObject) -> bool:
        """Whether it has a block that is foreign in the present object of its name.

        Only then may it replace that object: one that has none of them may be shorter, and good
        blocks would be lost for nothing.
        """
        suspects = self._suspects.get(source.name, set())
        return any(batch.keys[at] in suspects for at in source.positions)

    def _put_in(
        self, batch: InFlightBatch, target: StoreObject, room: memoryview, *, in_place: bool
    ) -> bool:
        """Make an object of blocks; False where the engine's memory cannot be read."""
        size = self._objects.object_bytes
        for start, at in zip(range(0, len(room), size), target.positions, strict=True):
            piece = room[start : start + size]
            plain = self._sealer.plain(piece)
            if not in_place and not self._copy(self._memory.fetch, batch.order, at, plain):
                return False
            self._sealer.seal(piece, batch.keys[at])
        return True

    def _give_back(self, rooms: Sequence[memoryview]) -> None:
        for each in rooms:
            self._staging.give_back(each)

    @staticmethod
    def _copy(move: Callable[..., Any], order: OrderMessage, at: int, room: memoryview) -> bool:
        """Move one block's pieces between ``room`` and the engine; whether all are whole."""
        offsets = np.cumsum(order.sizes) - order.sizes
        return bool(move(address_of(room) + offsets, order.addresses[at], order.sizes).all())

    # -- health -----------------------------------------------------------------------------------

    def _note_answers(self, way: Way, answers: Sequence[object]) -> None:
        if not all(isinstance(each, Fault) for each in answers):
            self._answered_at[way] = time.monotonic()

    def _judge(self, batch: InFlightBatch) -> None:
        """Open the circuit breaker after a batch with faults and no answer.

        A store that hangs takes as many blocks as are asked for at once; those that wait behind
        them were not attempted, which is no answer. But a store that is merely busy may come to a
        batch too late to answer any of it: it has answered others meanwhile.
        """
        way = batch.order.way
        faults = [end for end in batch.ends if isinstance(end, Fault)]
        done = sum(end is None for end in batch.ends)
        missing = sum(
            isinstance(end, Unavailable) and not isinstance(end, NotAttempted) for end in batch.ends
        )
        answers = done if way is Way.WRITE else done + missing
        is_silent = self._answered_at[way] <= batch.began
        if faults and not answers and is_silent and not self._breaker.ailment:
            self._breaker.failed(faults[0].reason, time.monotonic(), way)
            self._report(self._breaker.ailment)
        elif not faults and (answers if way is Way.FIND else done):
            self._breaker.worked(way)

    async def watch(self, within: float, first: Callable[[], None]) -> None:
        """Probe the store once, and then for ever whenever it is out of order.

        ``first`` is called when the first probe has ended, however it did.
        """
        await self.probe(within)
        first()
        while True:
            await asyncio.sleep(0.02)
            if self._breaker.ailment and time.monotonic() >= self._breaker.probe_at:
                await self.probe(within)

    async def probe(self, within: float) -> None:
        """Probe the store once; after a failure with a whole block, which may take longer."""
        before = self._breaker.ailment
        fault = await _fault_of(self._client.probe(), within)
        if fault is None and before:
            while wait := self._bandwidth.take(2 * self._objects.block_bytes, time.monotonic()):
                await asyncio.sleep(wait)
            # The longer it was away, the more time it has: blocks may be large, and lines slow.
            fault = await _fault_of(self._block_probe.run(), max(within, self._breaker.wait))
        if fault is not None:
            self._breaker.failed(fault.reason, time.monotonic())
        else:
            self._breaker.probed()
        if self._breaker.ailment != before:
            self._report(self._breaker.ailment)


async def _fault_of(probe: Awaitable[Fault | None], within: float) -> Fault | None:
    try:
        return await asyncio.wait_for(probe, within)
    except asyncio.TimeoutError:
        return Fault(f"the store has not answered for {within:g} s")
    except Exception as error:  # or the store would never be probed again
        return Fault(f"{type(error).__name__}: {error}")


PROBE_SECONDS = 2.0


def open_client(
    address: RemoteAddress, objects: ObjectFormat, mapping: SlotMapping | None
) -> StoreClient:
    """The client of one store; the modules of other stores are not imported."""
    if address.kind == MOONCAKE:
        from kvferry.tiers.remote.mooncake import open_mooncake

        return open_mooncake(address, objects.object_bytes, objects.folder(), mapping)
    from kvferry.tiers.remote.s3 import S3Client

    in_one = best_in_one(objects.block_bytes, objects.object_bytes, address.pack)
    return S3Client(address, objects.object_bytes, objects.folder(), os.environ, in_one)


OpenClient = Callable[[RemoteAddress, ObjectFormat, SlotMapping | None], StoreClient]


class StoreProcess:
    """Carries out the engine's orders. Owns the client, the event loop and the batches."""

    def __init__(
        self,
        channel: Channel,
        hello: Mapping[str, Any],
        memory: EngineMemory,
        open_client: OpenClient = open_client,
        mapping: SlotMapping | None = None,
    ) -> None:
        self._channel = channel
        self._batches: dict[int, InFlightBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._objects = ObjectFormat(
            bytes.fromhex(hello["namespace"]),
            hello["block_bytes"],
            hello["rank"],
            hello["num_ranks"],
        ).with_key(bytes.fromhex(hello["key"]) if hello.get("key") else None)
        self._client = open_client(read_remote("remote", hello["address"]), self._objects, mapping)
        self._transfers = StoreTransfers(
            self._client,
            self._objects,
            memory,
            mapping,
            Bandwidth(hello["bandwidth"]),
            CircuitBreaker(),
            lambda ailment: channel.send(pack_text(FrameKind.AILS, ailment)),
        )

    def serve(self) -> None:
        """Take orders until the engine hangs up or is gone."""
        self._thread.start()
        ready = frame(FrameKind.READY)
        self._spawn(self._transfers.watch(PROBE_SECONDS, lambda: self._channel.send(ready)))
        while not self._channel.is_ended:
            for kind, body in self._channel.receive():
                self._take(kind, body)
            self._channel.wait(1.0)

    def _take(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            batch = self._transfers.begin(unpack_order(body))
            self._batches[batch.order.id] = batch
            self._spawn(self._carry(batch))
        elif kind is FrameKind.CANCEL:
            cancelled = self._batches.get(unpack_number(body))
            if cancelled is not None:
                cancelled.is_cancelled = True
        elif kind is FrameKind.FORGET:
            self._spawn(self._client.forget(self._objects.folder(unpack_number(body))))

    async def _carry(self, batch: InFlightBatch) -> None:
        result = await self._transfers.carry(batch)
        del self._batches[batch.order.id]
        self._channel.send(pack_result(result))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the loop; an exception is logged by the engine."""

        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        self._loop.call_soon_threadsafe(start)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            text = f"{type(error).__name__}: {error}"
            self._channel.send(pack_says(logging.ERROR, text))

    def close(self) -> None:
        """Give up what is still under way."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()
        self._client.close()


def _serve(engine: child.EngineLink) -> None:
    hello = json.loads(engine.hello)
    mapping = SlotMapping.of(hello.get("host_file"))
    process = StoreProcess(engine.channel, hello, engine.memory, mapping=mapping)
    process.serve()
    process.close()


def main() -> None:
    """Run the process of a shared store."""
    child.main(_serve)
