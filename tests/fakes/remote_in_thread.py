"""The process beside the engine as a thread, with a say for the test before each block moves."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvferry.core.keys import Key
from kvferry.tiers.contract import Way
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import Channel
from kvferry.tiers.ipc.process import ChildProcess
from kvferry.tiers.remote import mooncake
from kvferry.tiers.remote.client import Fault, Fetched, Log, StoreClient, Unavailable
from kvferry.tiers.remote.process import StoreProcess

SayOf = Callable[[Way, Key], None]


class Watched:
    """A client that asks ``fault`` before each block: what it raises is the store's fault."""

    def __init__(self, inner: StoreClient) -> None:
        self.fault: SayOf | None = None
        self.num_calls = inner.num_calls
        self.staging = inner.staging
        self._inner = inner

    @property
    def library(self) -> Any:
        """The engine's own client."""
        return self._inner._store  # type: ignore[attr-defined]

    def names_per_call(self, way: Way) -> int:
        return 1  # so that blocks can be told apart

    async def probe(self, way: Way) -> Fault | None:
        return await self._inner.probe(way)

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        fault = await self._say(Way.FIND, names[0])
        return [fault] if fault else await self._inner.find(names, size)

    async def get(self, names: Sequence[str], size: int) -> list[Fetched]:
        fault = await self._say(Way.READ, names[0])
        return [fault] if fault else await self._inner.get(names, size)

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        try:
            fault = await self._say(Way.WRITE, names[0])
        except asyncio.CancelledError:
            self.staging.give_back(objects[0])
            raise
        if fault:
            self.staging.give_back(objects[0])
            return [fault]
        return await self._inner.put(names, objects, replace=replace)

    async def run_background(self, log: Log) -> None:
        await self._inner.run_background(log)

    async def forget(self, folder: str) -> None:
        await self._inner.forget(folder)

    def close(self) -> None:
        """The client is others' too; only its threads are this test's."""
        executors = getattr(self._inner, "_executors", {})
        for way in executors:
            executors[way].shutdown(wait=False)
            executors[way] = mooncake._executor(way)

    async def _say(self, way: Way, name: str) -> Fault | None:
        if self.fault is None:
            return None
        call: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()

        def ask(fault: SayOf, loop: asyncio.AbstractEventLoop) -> None:
            answer = None
            try:
                fault(way, Key(bytes.fromhex(name.rpartition("/")[2])))
            except Exception as error:
                answer = Fault(str(error))
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(_answer, call, answer)

        args = (self.fault, asyncio.get_running_loop())
        threading.Thread(target=ask, args=args, daemon=True).start()
        return await call


def _answer(call: asyncio.Future[Fault | None], answer: Fault | None) -> None:
    if not call.done():  # nobody may be waiting any more
        call.set_result(answer)


class InThread(ChildProcess):
    """Stands in for the process. Owns the thread."""

    def __init__(self, client: StoreClient, hello: Mapping[str, object]) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.pid = os.getpid()
        self._theirs = Channel(theirs)

        def open_client(*_: object) -> StoreClient:
            return client

        memory = EngineMemory(self.pid)
        self._store_process = StoreProcess(self._theirs, hello, memory, open_client)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._store_process.serve()
        self._store_process.close()

    @property
    def is_gone(self) -> bool:
        return not self._thread.is_alive()

    @property
    def ending(self) -> str:
        return "ended"

    def kill(self) -> None:
        """Its loop ends at once, and with it all that is under way."""
        self.channel.end()
        self._theirs.wake()
        self._thread.join()

    def end(self, timeout: float) -> bool:
        self.kill()
        return True

    def close(self) -> None:
        self.kill()
        self.channel.close()
        self._theirs.close()
