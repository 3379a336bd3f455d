"""Mooncake's client that reads and writes when its call was given up: never memory lent again.

The client is ours, its library a dict that hangs, fails and writes late, as the real one may.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from kvferry.settings.tiers import RemoteAddress
from kvferry.tiers.remote.client import Fault
from kvferry.tiers.remote.mooncake import MooncakeClient

LONG = 30.0
SIZE = 4096
PEER_GONE = -800
SENTINEL, CONTENT = b"\x5a" * SIZE, b"\x01" * SIZE


class Library:
    """Mooncake's client: objects in a dict, bytes by address, behind a gate."""

    def __init__(self) -> None:
        self.objects = {"there": CONTENT}
        self.fails_but_writes_late = False
        self.gate, self.is_called, self.is_done = (threading.Event() for _ in range(3))

    def batch_put_from(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
        self._pass()
        for name, place, size in zip(names, places, sizes, strict=True):
            self.objects[name] = ctypes.string_at(place, size)
        self.is_done.set()
        return [0] * len(names)

    def batch_get_into(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
        if self.fails_but_writes_late:
            threading.Thread(target=self._write, args=(names, places)).start()
            return [PEER_GONE] * len(names)
        self._write(names, places)
        return sizes

    def _write(self, names: Sequence[str], places: Sequence[int]) -> None:
        self._pass()
        for name, place in zip(names, places, strict=True):
            ctypes.memmove(place, self.objects[name], SIZE)
        self.is_done.set()

    def _pass(self) -> None:
        self.is_called.set()
        self.gate.wait(LONG)


@pytest.mark.parametrize("has_barrier", [True, False])
@pytest.mark.parametrize("how", ["late get", "failed get", "late put"])
def test_memory_of_a_call_that_was_given_up_is_not_lent_again(how: str, has_barrier: bool) -> None:
    """Checks itself: where the memory is lent again at once, it must be changed or read."""
    library = Library()
    library.fails_but_writes_late = how == "failed get"
    client = MooncakeClient(RemoteAddress("mooncake", "127.0.0.1:1"), SIZE, "tests", lambda: None)
    client._store = library
    staging = client.staging
    if not has_barrier:
        lend = staging.lend

        def lend_and_forget(count: int) -> list[memoryview]:
            rooms = lend(count)
            staging.give_back(*rooms)
            return rooms

        staging.lend = lend_and_forget  # type: ignore[method-assign]

    async def story() -> None:
        if how == "late put":
            (room,) = staging.lend(1)
            room[:] = CONTENT
            call = asyncio.ensure_future(client.put(["new"], [room], replace=[False]))
        else:
            call = asyncio.ensure_future(client.get(["there"], SIZE))  # type: ignore[arg-type]
        while not library.is_called.is_set():
            await asyncio.sleep(0.01)
        if how == "failed get":
            assert isinstance((await call)[0], Fault)
        else:
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
        others = staging.lend(len(staging._free))
        for room in others:
            room[:] = SENTINEL
        library.gate.set()
        assert await asyncio.to_thread(library.is_done.wait, LONG)
        is_kept = library.objects.get("new", CONTENT) == CONTENT
        assert (is_kept and all(room == SENTINEL for room in others)) == has_barrier

    asyncio.run(story())
    for executor in client._executors.values():
        executor.shutdown()
