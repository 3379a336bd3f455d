"""The process beside the engine that speaks with a shared store.

A process and not a thread: hashing and sending a block takes no interpreter lock for long, but to
get it back beside a thread that computes takes 5 ms each time, which for blocks of 1 MiB is 0.2
GB/s. Here nobody else wants it. It also means that a client that crashes, or hangs, is a process
that can be ended, with the engine unharmed and its memory untouched.

It ends when the line to the engine does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
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
from kvferry.tiers.remote.carrier import Carrier
from kvferry.tiers.remote.client import StoreClient
from kvferry.tiers.remote.errand import Errand
from kvferry.tiers.remote.limits import Bandwidth, Breaker
from kvferry.tiers.remote.objects import Whose, best_in_one
from kvferry.tiers.remote.window import Window

PROBE_SECONDS = 2.0


def open_client(
    address: RemoteAddress, whose: Whose, env: Mapping[str, str], window: Window | None
) -> StoreClient:
    """The client of one engine; nothing of another is imported."""
    if address.kind == MOONCAKE:
        from kvferry.tiers.remote.mooncake import open_mooncake

        return open_mooncake(address, whose.object_bytes, whose.folder(), window)
    from kvferry.tiers.remote.s3 import S3Client

    in_one = best_in_one(whose.block_bytes, whose.object_bytes, address.pack)
    return S3Client(address, whose.object_bytes, whose.folder(), env, in_one)


OpenClient = Callable[[RemoteAddress, Whose, Mapping[str, str], Window | None], StoreClient]


class StoreProcess:
    """Takes orders from the line and answers them. Owns the line's end, the client and the loop."""

    def __init__(
        self,
        channel: Channel,
        hello: Mapping[str, Any],
        memory: EngineMemory,
        open_client: OpenClient = open_client,
        window: Window | None = None,
    ) -> None:
        self._channel = channel
        self._errands: dict[int, Errand] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        address = read_remote("remote", hello["address"])
        whose = Whose(
            bytes.fromhex(hello["namespace"]),
            hello["block_bytes"],
            hello["rank"],
            hello["num_ranks"],
        ).with_key(bytes.fromhex(hello["key"]) if hello.get("key") else None)
        self._client = open_client(address, whose, os.environ, window)
        self._whose = whose
        self._carrier = Carrier(
            self._client,
            whose,
            memory,
            window,
            Bandwidth(hello["bandwidth"]),
            Breaker(),
            lambda ailment: channel.send(pack_text(FrameKind.AILS, ailment)),
        )

    def serve(self) -> None:
        """Take orders until the engine hangs up or is gone."""
        self._thread.start()
        self._call(self._begin)
        while not self._channel.is_ended:
            for kind, body in self._channel.receive():
                self._take(kind, body)
            self._channel.wait(1.0)

    def _call(self, function: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _take(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            errand = self._carrier.errand(unpack_order(body))
            self._errands[errand.order.id] = errand
            self._call(self._spawn, self._carry(errand))
        elif kind is FrameKind.CANCEL:
            errand_or_none = self._errands.get(unpack_number(body))
            if errand_or_none is not None:
                errand_or_none.is_cancelled = True
        elif kind is FrameKind.FORGET:
            folder = self._whose.folder(unpack_number(body))
            self._call(self._spawn, self._client.forget(folder))

    def _begin(self) -> None:
        ready = frame(FrameKind.READY)
        self._spawn(self._carrier.watch(PROBE_SECONDS, lambda: self._channel.send(ready)))

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            text = f"{type(error).__name__}: {error}"
            self._channel.send(pack_says(logging.ERROR, text))

    async def _carry(self, errand: Errand) -> None:
        result = await self._carrier.carry(errand)
        del self._errands[errand.order.id]
        self._channel.send(pack_result(result))

    def close(self) -> None:
        """What is still under way is given up."""
        self._call(self._loop.stop)
        self._thread.join()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()
        self._client.close()


def _serve(engine: child.EngineLink) -> None:
    hello = json.loads(engine.hello)
    window = Window.of(hello.get("host_file"))
    process = StoreProcess(engine.channel, hello, engine.memory, window=window)
    process.serve()
    process.close()


def main() -> None:
    """Run the process of a shared store."""
    child.main(_serve)
