"""Mooncake Store: objects in the memory of many servers, found through a master.

Its client is C++ that blocks its caller, for seconds where a master or a peer is gone. So each call
has a thread of its own, and memory that stays lent until the call comes back, however long after
its batch was given up.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.quantities import parse_size
from kvferry.remote_settings import RemoteAddress
from kvferry.tiers.base import Way
from kvferry.tiers.remote.client import Fault, NotThere, Stored
from kvferry.tiers.remote.staging import Staging, address_of

T = TypeVar("T")

_CALLS = 2
_CALL_BYTES = 33 << 20
_MOST_NAMES = 512
_LOCAL_BUFFER = 16 << 20
_NUM_PROBES = 8
"""Objects lie on segments at random: so many warm the connections to most of a few."""

_KNOCK_SECONDS = 1.0

_NO_ROOM, _WRONG_SIZE, _NOT_READY, _NOT_FOUND = -200, -600, -703, -704
_WORDS = {
    -101: "the segment is gone",
    _NO_ROOM: "there is no room; servers give it with ?segment=SIZE",
    -800: "a peer does not answer",
    -900: "the master does not answer",
}
_MISSES = {_NOT_FOUND: "holds nothing", _NOT_READY: "it is still being written"}


class MooncakeClient:
    """One client of a store. Owns it, and the segment that it gives."""

    num_calls = _CALLS

    def __init__(
        self,
        address: RemoteAddress,
        object_bytes: int,
        folder: str,
        library: Callable[[], Any],
    ) -> None:
        """``library`` makes the engine's own client (``MooncakeDistributedStore``)."""
        self._address = address
        self._folder = folder
        self._library = library
        self._store: Any = None
        self._names_per_call = max(1, min(_MOST_NAMES, _CALL_BYTES // object_bytes))
        # Both ways at once, and as much again for calls that hang.
        self.staging = Staging(object_bytes, 4 * _CALLS * self._names_per_call)

    def names_per_call(self, way: Way) -> int:
        return _MOST_NAMES if way is Way.FIND else self._names_per_call

    async def probe(self) -> Fault | None:
        """Join the store if we have not yet; write a few objects and read them back."""
        return await self._call(self._probe, ())

    def _probe(self) -> Fault | None:
        if self._store is None:
            fault = self._join()
            if fault is not None:
                return fault
        names = [f"{self._folder}/probe/{secrets.token_hex(8)}" for _ in range(_NUM_PROBES)]
        content = secrets.token_bytes(64)
        for name in names:
            code = self._store.put(name, content)
            if code:
                return _fault(code)
        for name in names:
            if self._store.get(name) != content:
                return Fault("what it was given it does not give back")
            self._store.remove(name, True)
        return None

    def _join(self) -> Fault | None:
        options = self._address.options
        # Against a dead master the setup holds the interpreter's lock for a minute and a half.
        fault = _knock(self._address.place)
        if fault is not None:
            return fault
        store = self._library()
        code = store.setup(
            options.get("host") or _host_towards(self._address.place),
            options.get("metadata", "P2PHANDSHAKE"),
            parse_size(options.get("segment", "0"), minimum=0),
            _LOCAL_BUFFER,
            options.get("protocol", "tcp"),
            options.get("device", ""),
            self._address.place,
        )
        if code:
            return Fault(f"the store at {self._address.place} cannot be joined (error {code})")
        code = store.register_buffer(self.staging.address, self.staging.num_bytes)
        if code:
            return Fault(f"memory cannot be registered with the store (error {code})")
        self._store = store
        return None

    async def find(self, names: Sequence[str], size: int) -> list[NotThere | Fault | None]:
        codes = await self._call(lambda: self._store.batch_is_exist(list(names)), ())
        return [None if code == 1 else _fault(code) if code else NotThere() for code in codes]

    async def get(self, names: Sequence[str], size: int) -> list[Stored]:
        rooms = self.staging.lend(len(names))
        if not rooms:
            return [Fault("too many calls to the store hang")] * len(names)
        places, sizes = [address_of(room) for room in rooms], [size] * len(rooms)
        codes = await self._call(
            lambda: self._store.batch_get_into(list(names), places, sizes), rooms
        )
        given: list[Stored] = []
        for room, code in zip(rooms, codes, strict=True):
            if code == size:
                given.append(room)
                continue
            self.staging.give_back(room)
            if code >= 0 or code == _WRONG_SIZE:
                given.append(NotThere("it has another size than it should"))
            else:
                given.append(NotThere(_MISSES[code]) if code in _MISSES else _fault(code))
        return given

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[NotThere | Fault | None]:
        places, sizes = [address_of(each) for each in objects], [len(each) for each in objects]

        def write() -> list[int]:
            for name, is_bad in zip(names, replace, strict=True):
                if is_bad:
                    self._store.remove(name, True)
            return list(self._store.batch_put_from(list(names), places, sizes))

        codes = await self._call(write, objects)
        for each in objects:
            self.staging.give_back(each)
        return [
            None if not code else NotThere(_WORDS[code]) if code == _NO_ROOM else _fault(code)
            for code in codes
        ]

    async def forget(self, folder: str) -> None:
        # By force: what was read lately is leased for some seconds.
        await self._call(lambda: self._store.remove_by_regex(f"^{folder}/.*", True), ())

    def close(self) -> None:
        """Take our segment out of the store. A call that hangs is left behind."""
        if self._store is not None:
            self._store.close()

    async def _call(self, function: Callable[[], T], lent: Sequence[memoryview]) -> T:
        """In a thread; if nobody waits for it any more, ``lent`` comes back when the call does."""
        call = _in_thread(function)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            call.add_done_callback(lambda _: loop.call_soon_threadsafe(self._give_back, lent))
            raise

    def _give_back(self, lent: Sequence[memoryview]) -> None:
        for each in lent:
            self.staging.give_back(each)


def open_mooncake(
    address: RemoteAddress, object_bytes: int, folder: str, env: Mapping[str, str]
) -> MooncakeClient:
    """A client that joins its store when it is first probed."""
    for name, level in (("GLOG_minloglevel", "2"), ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)
    from mooncake.store import MooncakeDistributedStore

    return MooncakeClient(address, object_bytes, folder, MooncakeDistributedStore)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """A thread for each call: one that hangs must not stand in the way of others."""
    call: Future[T] = Future()
    call.set_running_or_notify_cancel()  # it cannot be taken back

    def run() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, name="kvferry-mooncake", daemon=True).start()
    return call


def _fault(code: int) -> Fault:
    return Fault(_WORDS.get(code, f"error {code}"))


def _knock(place: str) -> Fault | None:
    """Whether somebody is there."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError as error:
        return Fault(f"the master at {place} cannot be reached: {error}")
    return None


def _host_towards(place: str) -> str:
    """The address of this machine that the master's network sees."""
    host, _, port = place.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # connects, and sends nothing
        sock.connect((host.strip("[]"), int(port)))
        return str(sock.getsockname()[0])
