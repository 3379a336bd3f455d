"""The child process that serves a shared store, until its channel to the engine ends.

In a thread of the engine each call would get the GIL back only after 5 ms beside a thread that
computes: 0.2 GB/s with blocks of 1 MiB. And a client that crashes or hangs ends with its process::

    write   engine ── process_vm ──> staging ── seal ──> put        sealing: a checksum, or AES
    read    get ── verify ── process_vm ──> engine

A block counts only after it was verified here. A call without an answer at the deadline is
cancelled: from then on it does not touch the engine's memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import words_of
from kvferry.settings.tiers import MOONCAKE, RemoteAddress, read_remote
from kvferry.tiers.contract import Batch, Result, Way
from kvferry.tiers.ipc import child
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import (
    Channel,
    FrameKind,
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
    StoreClient,
    Unavailable,
    address_of,
    shown,
)
from kvferry.tiers.remote.health import End, StoreHealth
from kvferry.tiers.remote.objects import ObjectFormat, open_sealer

_LEAVE_SECONDS = 1.5
_MAX_FOREIGN = 4096
_NOT_BEGUN = "not begun in time"
_NOT_ANSWERED = Fault("the store has not answered in time")


@dataclass(eq=False)
class InFlightBatch:
    """A batch in flight. Owns the result of each block so far."""

    order: Batch
    names: list[str]
    keys: Sequence[bytes]
    began: float = field(default_factory=lambda: time.monotonic())
    ends: list[End] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [NotAttempted(_NOT_BEGUN)] * len(self.names)

    def end(self, positions: Iterable[int], end: End) -> None:
        for at in positions:
            self.ends[at] = end

    def names_of(self, positions: Iterable[int]) -> list[str]:
        return [self.names[at] for at in positions]

    @property
    def seconds_left(self) -> float:
        return self.order.deadline - time.monotonic()

    def result(self, block_bytes: int, seconds: float) -> Result:
        ok = np.array([end is None for end in self.ends], dtype=bool)
        reasons = {at: end.reason for at, end in enumerate(self.ends) if end is not None}
        moved = 0 if self.order.way is Way.FIND else int(ok.sum()) * block_bytes
        return Result(self.order.id, ok, reasons, moved, seconds)


_Step = Callable[[InFlightBatch, Sequence[int]], Awaitable[None]]
"""Looks up, reads or writes the blocks at some positions, and sets the result of each."""


class StoreTransfers:
    """Owns the limits on calls in flight, the store's health, and the names of foreign objects."""

    def __init__(
        self,
        client: StoreClient,
        objects: ObjectFormat,
        memory: EngineMemory,
        report: Callable[[Way, str], None],
        refuses: str = "",
    ) -> None:
        """``report`` and ``refuses`` are those of :class:`StoreHealth`."""
        self._client = client
        self._staging = client.staging
        self._objects = objects
        self._sealer = open_sealer(objects)
        self._memory = memory
        self.health = StoreHealth(client, report, refuses=refuses)
        # One more call is prepared or verified beside those that the client carries out.
        self._begun = {way: asyncio.Semaphore(client.num_calls + 1) for way in Way}
        self._calls = {way: asyncio.Semaphore(client.num_calls) for way in Way}
        self._foreign: dict[str, None] = {}  # names of foreign objects, oldest first

    def begin(self, order: Batch, generation: int) -> InFlightBatch:
        keys = list(order.keys)
        return InFlightBatch(order, self._objects.names(keys, generation), keys)

    async def carry(self, batch: InFlightBatch) -> Result:
        start, way = time.perf_counter(), batch.order.way
        step = {Way.FIND: self._find, Way.READ: self._read, Way.WRITE: self._write}[way]
        await self._run(batch, step)
        self.health.judge(way, batch.ends, batch.began)
        return batch.result(self._objects.block_bytes, time.perf_counter() - start)

    async def _run(self, batch: InFlightBatch, step: _Step) -> None:
        count, every = self._client.names_per_call(batch.order.way), range(len(batch.names))
        tasks = [
            asyncio.create_task(self._run_some(batch, every[at : at + count], step))
            for at in every[::count]
        ]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, batch.seconds_left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_some(self, batch: InFlightBatch, some: Sequence[int], step: _Step) -> None:
        async with self._begun[batch.order.way]:
            late = _NOT_BEGUN if batch.seconds_left <= 0 else ""
            if reason := self.health.ailment(batch.order.way) or late:
                batch.end(some, NotAttempted(reason))
                return
            try:
                await step(batch, some)
            except Exception as error:  # a bug here or in a client: these blocks have failed
                batch.end(some, Fault(words_of(error)))

    @asynccontextmanager
    async def _call(self, batch: InFlightBatch, some: Sequence[int]) -> AsyncIterator[None]:
        """Enter a call to the client; without an answer, its blocks fail by the store's fault."""
        async with self._calls[batch.order.way]:
            batch.end(some, _NOT_ANSWERED)
            yield

    async def _find(self, batch: InFlightBatch, some: Sequence[int]) -> None:
        names = batch.names_of(some)
        async with self._call(batch, some):
            ends = await self._client.find(names, self._objects.object_bytes)
        self.health.answered(Way.FIND, ends)
        for at, end in zip(some, ends, strict=True):
            if isinstance(end, Foreign):
                self._note_foreign(batch.names[at])
            # An object that is known to be foreign counts as missing, whatever the store says.
            is_foreign = end is None and batch.names[at] in self._foreign
            batch.ends[at] = Unavailable("it is not what it should be") if is_foreign else end

    def _note_foreign(self, name: str) -> None:
        """Note that an object is foreign: the next write replaces it."""
        while name not in self._foreign and len(self._foreign) >= _MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        self._foreign[name] = None

    async def _read(self, batch: InFlightBatch, some: Sequence[int]) -> None:
        names = batch.names_of(some)
        async with self._call(batch, some):
            fetched = await self._client.get(names, self._objects.object_bytes)
        self.health.answered(Way.READ, fetched)
        await asyncio.sleep(0)  # the next call begins, and runs while these are verified
        for at, content in zip(some, fetched, strict=True):
            if isinstance(content, memoryview):
                try:
                    batch.ends[at] = self._deliver(batch, at, content)
                finally:
                    self._staging.give_back(content)
            else:
                batch.ends[at] = content
            if isinstance(batch.ends[at], Foreign):
                self._note_foreign(batch.names[at])

    def _deliver(self, batch: InFlightBatch, at: int, content: memoryview) -> End:
        """Verify a block and copy it to the engine's memory."""
        block = self._sealer.unseal(content, batch.keys[at])
        if block is None:
            return Foreign("what is there is no block of ours: it fails its proof")
        if not self._copy(self._memory.deliver, batch.order, at, block):
            return Unavailable("the engine's memory cannot be written")
        return None

    async def _write(self, batch: InFlightBatch, some: Sequence[int]) -> None:
        rooms = self._staging.lend(len(some))
        if not rooms:
            batch.end(some, NotAttempted("too many calls to the store hang"))
            return
        for at, content in zip(some, rooms, strict=True):
            plain = self._sealer.plain(content)
            if not self._copy(self._memory.fetch, batch.order, at, plain):
                self._staging.give_back(*rooms)
                batch.end(some, Unavailable("the engine's memory cannot be read"))
                return
            self._sealer.seal(content, batch.keys[at])
        names = batch.names_of(some)
        replace = [name in self._foreign for name in names]
        is_ours = True
        try:
            async with self._call(batch, some):
                is_ours = False  # the client gives the rooms back
                ends = await self._client.put(names, rooms, replace=replace)
        finally:
            if is_ours:
                self._staging.give_back(*rooms)
        self.health.answered(Way.WRITE, ends)
        for at, end, is_new in zip(some, ends, replace, strict=True):
            batch.ends[at] = end
            if end is None and is_new:
                self._foreign.pop(batch.names[at], None)

    @staticmethod
    def _copy(move: Callable[..., Any], order: Batch, at: int, room: memoryview) -> bool:
        """Move one block's pieces between ``room`` and the engine; return whether all arrived."""
        offsets = np.cumsum(order.sizes) - order.sizes
        return bool(move(address_of(room) + offsets, order.addresses[at], order.sizes).all())


def open_client(
    address: RemoteAddress,
    objects: ObjectFormat,
    hello: Mapping[str, Any],
) -> StoreClient:
    """Return the client of one store; the modules of other stores are not imported."""
    if address.kind == MOONCAKE:
        from kvferry.tiers.remote.mooncake import open_mooncake

        return open_mooncake(address, objects.object_bytes, objects.folder())
    from kvferry.tiers.remote.bucket import BucketClient

    return BucketClient(
        address,
        objects.object_bytes,
        objects.folder(),
        os.environ,
        label=hello.get("label", "") if objects.secret is None else "",
        ttl=hello.get("ttl"),
    )


class StoreProcess:
    """Carries out the engine's orders. Owns the client, the event loop and the batches."""

    def __init__(
        self,
        channel: Channel,
        hello: Mapping[str, Any],
        memory: EngineMemory,
        open_client: Callable[..., StoreClient] = open_client,
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
        self._client = open_client(address, self._objects, hello)
        self._transfers = StoreTransfers(
            self._client,
            self._objects,
            memory,
            self._report,
            READ_ONLY if hello.get("read_only") else "",
        )

    def _report(self, way: Way, ailment: str) -> None:
        kind = FrameKind.WRITES_REFUSED if way is Way.WRITE else FrameKind.UNAVAILABLE
        self._channel.send(pack(kind, ailment))

    def serve(self) -> None:
        self._thread.start()
        ready = frame(FrameKind.READY)
        self._spawn(self._transfers.health.watch(lambda: self._channel.send(ready)))
        self._spawn(self._client.run_background(self._log))
        while True:
            for kind, body in self._channel.receive():
                self._take(kind, body)
            if self._channel.is_ended:
                return
            self._channel.wait(1.0)

    def _take(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            batch = self._transfers.begin(*unpack_order(body))
            self._spawn(self._carry(batch))
        elif kind is FrameKind.FORGET:
            self._spawn(self._client.forget(self._objects.folder(unpack(body))))

    async def _carry(self, batch: InFlightBatch) -> None:
        result = await self._transfers.carry(batch)
        self._channel.send(pack_result(result))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        self._loop.call_soon_threadsafe(start)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(logging.ERROR, words_of(error))

    def _log(self, level: int, text: str) -> None:
        self._channel.send(pack(FrameKind.LOG, level, shown(text)))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()
        self._client.close()


def _serve(engine: child.EngineLink) -> None:
    process = StoreProcess(engine.channel, json.loads(engine.hello), engine.memory)
    process.serve()
    # Leaving a store may hold the GIL for a minute; the kernel's timer ends it all the same.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_SECONDS)
    process.close()


def main() -> None:
    child.main(_serve)
