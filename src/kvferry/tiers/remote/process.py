"""The child process that speaks with a shared store. It ends when its channel to the engine does.

A thread would get the interpreter back only after 5 ms beside one that computes, for each call: 0.2
GB/s with blocks of 1 MiB. And a client that crashes or hangs is ended with its process::

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
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvferry.core.keys import Keys
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
    pack,
    pack_result,
    unpack,
    unpack_order,
)
from kvferry.tiers.remote.client import (
    READ_ONLY,
    Fault,
    Foreign,
    NotAttempted,
    SlotMapping,
    StoreClient,
    Unavailable,
    address_of,
    shown,
)
from kvferry.tiers.remote.health import End, StoreHealth
from kvferry.tiers.remote.objects import (
    ObjectFormat,
    ObjectIndex,
    PackLookup,
    StoreObject,
    best_in_one,
    open_sealer,
    pack_objects,
)

_LEAVE_SECONDS = 1.5
_MOST_SUSPECTS = 4096
_NOT_BEGUN = "not begun in time"
_NOT_ANSWERED = Fault("the store has not answered in time")


@dataclass(eq=False)
class InFlightBatch:
    """A batch under way. Owns what became of each block so far."""

    order: OrderMessage
    names: list[str]
    keys: Sequence[bytes]
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


_Step = Callable[[InFlightBatch, Sequence[StoreObject]], Awaitable[None]]
"""Looks up, reads or writes some objects, and ends each of their blocks."""


class StoreTransfers:
    """Owns the limits on what is in flight, the health, and which objects are foreign."""

    def __init__(
        self,
        client: StoreClient,
        objects: ObjectFormat,
        memory: EngineMemory,
        mapping: SlotMapping | None,
        report: Callable[[Way, str], None],
        refuses: str = "",
    ) -> None:
        """``report`` and ``refuses`` are those of the health."""
        self._client = client
        self._staging = client.staging
        self._objects = objects
        self._sealer = open_sealer(objects)
        self._memory = memory
        self._mapping = mapping
        self.health = StoreHealth(client, report, refuses=refuses)
        # One more is prepared, or verified, beside those that are with the client.
        self._begun = {way: asyncio.Semaphore(client.num_calls + 1) for way in Way}
        self._calls = {way: asyncio.Semaphore(client.num_calls) for way in Way}
        self._suspects: dict[str, set[bytes]] = {}  # object -> keys of its foreign blocks
        self._index = ObjectIndex()

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
        self.health.judge(batch.order.way, batch.ends, batch.began)
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
            reason = self._stopped(batch)
            if reason:
                batch.end(objects, NotAttempted(reason))
                return
            try:
                await step(batch, objects)
            except Exception as error:  # a bug here or in a client: these blocks have failed
                batch.end(objects, Fault(f"{type(error).__name__}: {error}"))

    def _stopped(self, batch: InFlightBatch) -> str:
        """Why no further block of it should begin; empty while they should."""
        is_late = batch.seconds_left <= 0
        return self.health.ailment(batch.order.way) or (_NOT_BEGUN if is_late else "")

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
        self.health.answered(Way.FIND, counts)
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
        self.health.answered(Way.READ, fetched)
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
                self._staging.give_back(*rooms)
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
                self._staging.give_back(*rooms)
        self.health.answered(Way.WRITE, ends)
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

    @staticmethod
    def _copy(move: Callable[..., Any], order: OrderMessage, at: int, room: memoryview) -> bool:
        """Move one block's pieces between ``room`` and the engine; whether all are whole."""
        offsets = np.cumsum(order.sizes) - order.sizes
        return bool(move(address_of(room) + offsets, order.addresses[at], order.sizes).all())


def open_client(
    address: RemoteAddress,
    objects: ObjectFormat,
    mapping: SlotMapping | None,
    hello: Mapping[str, Any],
) -> StoreClient:
    """The client of one store; the modules of other stores are not imported."""
    if address.kind == MOONCAKE:
        from kvferry.tiers.remote.mooncake import open_mooncake

        return open_mooncake(address, objects.object_bytes, objects.folder(), mapping)
    from kvferry.tiers.remote.bucket import BucketClient

    return BucketClient(
        address,
        objects.object_bytes,
        objects.folder(),
        os.environ,
        best_in_one(objects.block_bytes, objects.object_bytes, address.pack),
        label=hello.get("label", "") if objects.secret is None else "",
    )


class StoreProcess:
    """Carries out the engine's orders. Owns the client, the event loop and the batches."""

    def __init__(
        self,
        channel: Channel,
        hello: Mapping[str, Any],
        memory: EngineMemory,
        open_client: Callable[..., StoreClient] = open_client,
        mapping: SlotMapping | None = None,
    ) -> None:
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._objects = ObjectFormat(
            bytes.fromhex(hello["namespace"]),
            hello["block_bytes"],
            hello["rank"],
            hello["num_ranks"],
        ).with_key(bytes.fromhex(hello["key"]) if hello.get("key") else None)
        address = read_remote("remote", hello["address"])
        self._client = open_client(address, self._objects, mapping, hello)
        self._transfers = StoreTransfers(
            self._client,
            self._objects,
            memory,
            mapping,
            self._report,
            READ_ONLY if hello.get("read_only") else "",
        )

    def _report(self, way: Way, ailment: str) -> None:
        kind = FrameKind.FULL if way is Way.WRITE else FrameKind.AILS
        self._channel.send(pack(kind, ailment))

    def serve(self) -> None:
        """Take orders until the engine hangs up or is gone."""
        self._thread.start()
        ready = frame(FrameKind.READY)
        self._spawn(self._transfers.health.watch(lambda: self._channel.send(ready)))
        self._spawn(self._client.tend(self._log))
        while True:
            for kind, body in self._channel.receive():
                self._take(kind, body)
            if self._channel.is_ended:
                return
            self._channel.wait(1.0)

    def _take(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            batch = self._transfers.begin(unpack_order(body))
            self._spawn(self._carry(batch))
        elif kind is FrameKind.FORGET:
            self._spawn(self._client.forget(self._objects.folder(unpack(body))))

    async def _carry(self, batch: InFlightBatch) -> None:
        result = await self._transfers.carry(batch)
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
            self._log(logging.ERROR, f"{type(error).__name__}: {error}")

    def _log(self, level: int, text: str) -> None:
        self._channel.send(pack(FrameKind.SAYS, level, shown(text)))

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
    # Leaving a store may take a minute and hold the interpreter for as long. The kernel does not.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_SECONDS)
    process.close()


def main() -> None:
    """Run the process of a shared store."""
    child.main(_serve)
