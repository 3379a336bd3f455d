"""The child process that speaks with a shared store.

A process and not a thread: hashing and sending a block takes the interpreter lock only briefly, but
getting it back beside a thread that computes takes 5 ms each time. For blocks of 1 MiB that is 0.2
GB/s. It also means that a client that crashes or hangs can be ended, with the engine unharmed and
its memory untouched. The process ends when its channel to the engine does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvferry.settings.remote import MOONCAKE, RemoteAddress, read_remote
from kvferry.tiers.ipc import child
from kvferry.tiers.ipc.channel import Channel, FrameKind, frame
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import (
    pack_result,
    pack_says,
    pack_text,
    unpack_number,
    unpack_order,
)
from kvferry.tiers.remote.client import StoreClient
from kvferry.tiers.remote.objects import ObjectFormat, best_in_one
from kvferry.tiers.remote.slot_mapping import SlotMapping
from kvferry.tiers.remote.transfers import (
    Bandwidth,
    CircuitBreaker,
    InFlightBatch,
    StoreTransfers,
)

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
