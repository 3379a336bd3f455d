"""The client of Mooncake Store: objects in the memory of many servers, found through a master.

Its library is C++ that blocks its caller, for seconds if a master or a peer is gone. So calls run
on threads that can be abandoned, and their memory stays lent until the call returns, however late.
The memory of a block that failed stays lent for minutes: the library gives up a transfer that takes
too long, and does not say whether its bytes still arrive.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvferry.core.quantities import parse_size
from kvferry.settings.tiers import P2P, RemoteAddress
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import (
    Fault,
    Fetched,
    Foreign,
    Log,
    Staging,
    Unavailable,
    address_of,
)

T = TypeVar("T")

_CALLS = 2
"""Calls per direction: one in flight, and one that waits for it. Two in flight slow each other down
(0.8 of one, on two cores), and a thread for each call makes it nearly twice as long."""

_CALL_BYTES = 33 << 20
_MOST_NAMES = 512
_LOCAL_BUFFER = 16 << 20
_NUM_PROBES = 8
"""Objects per probe. They lie on random segments: eight reach most of a few servers."""

_KNOCK_SECONDS = 1.0
_LATE_SECONDS = 300.0
"""Seconds after a failed transfer until its bytes, if they come at all, have certainly come."""

_DEFAULTS = {
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    # Seconds without a byte until a connection is dropped; the next call makes another. With the
    # library's own 30 s a store stays away for long once a firewall or a cable failed.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Environment variables that configure the library, unless they are set already."""

_PORTS = {"http": "80", "https": "443"}

_RAISED = -1
_WRONG_SIZE, _NOT_READY, _NOT_FOUND = -600, -703, -704
_WORDS = {
    -101: "the segment is gone",
    -200: "there is no room; servers give it with ?segment=SIZE",
    -800: "a peer does not answer",
    -900: "the master does not answer",
}
_MISSES = {_NOT_FOUND: "holds nothing", _NOT_READY: "it is still being written"}


class MooncakeClient:
    """The client of one Mooncake store. Owns it, and the memory segment that it contributes."""

    num_calls = _CALLS

    def __init__(
        self,
        address: RemoteAddress,
        object_bytes: int,
        folder: str,
        library: Callable[[], Any],
    ) -> None:
        """``library`` makes the library's own client (``MooncakeDistributedStore``)."""
        self._address = address
        self._folder = folder
        self._library = library
        self._executors = {way: _executor(way) for way in Way}
        self._store: Any = None
        self._names_per_call = max(1, min(_MOST_NAMES, _CALL_BYTES // object_bytes))
        # Both directions at once, and as much again for calls that hang.
        self.staging = Staging(object_bytes, 4 * _CALLS * self._names_per_call)

    def names_per_call(self, way: Way) -> int:
        return _MOST_NAMES if way is Way.FIND else self._names_per_call

    async def probe(self, way: Way) -> Fault | None:
        """Join the store if needed; look up a name, or write and read back a few objects."""
        return await asyncio.wrap_future(_in_thread(partial(self._probe, way)))

    def _probe(self, way: Way) -> Fault | None:
        if self._store is None:
            fault = self._join()
            if fault is not None:
                return fault
        if way is not Way.WRITE:
            (code,) = self._store.batch_is_exist([f"{self._folder}/probe"])
            return _fault(code) if code < 0 else None
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
        # With a dead master the setup holds the GIL for a minute and a half. With a dead metadata
        # server it fails without the reason.
        metadata = urlsplit(options.get("metadata", P2P))
        fault = _check_server(self._address.place)
        if fault is None and metadata.scheme in ("http", "https"):
            fault = _check_server(metadata.netloc, "metadata server", _PORTS[metadata.scheme])
        if fault is not None:
            return fault
        host = options.get("host") or _local_address(self._address.place)
        # With a metadata server, other servers find its memory by this alone. If unset, the library
        # picks an interface of the machine.
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        store = self._library()
        code = store.setup(
            host,
            options.get("metadata", P2P),
            parse_size(options.get("segment", "0"), minimum=0),
            _LOCAL_BUFFER,
            options.get("protocol", "tcp"),
            options.get("device", ""),
            self._address.place,
        )
        if code:
            hint = (
                f"; has this machine {options['segment']} to give?" if "segment" in options else ""
            )
            return Fault(
                f"the store at {self._address.place} cannot be joined (error {code}){hint}"
            )
        # For TCP this only records the range: memory without pages stays without.
        code = store.register_buffer(self.staging.address, self.staging.num_bytes)
        if code:
            return Fault(f"memory cannot be registered with the store (error {code})")
        self._store = store
        return None

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        codes = await self._run_call(
            Way.FIND, lambda: self._store.batch_is_exist(list(names)), len(names), lambda _: None
        )
        return [None if code == 1 else _fault(code) if code else Unavailable() for code in codes]

    async def get(self, names: Sequence[str], size: int) -> list[Fetched]:
        rooms = self.staging.lend(len(names))
        if not rooms:
            return [Fault("too many calls to the store hang")] * len(names)
        places, sizes = [address_of(room) for room in rooms], [size] * len(rooms)

        def read() -> Sequence[int]:
            return list(self._store.batch_get_into(list(names), places, sizes))

        codes = await self._run_call(Way.READ, read, len(names), partial(self._ended, rooms))
        given: list[Fetched] = []
        for room, code in zip(rooms, codes, strict=True):
            if code == size:
                given.append(room)
                continue
            self._ended([room], [code])
            if code >= 0 or code == _WRONG_SIZE:
                given.append(Foreign("it has another size than it should"))
            else:
                given.append(Unavailable(_MISSES[code]) if code in _MISSES else _fault(code))
        return given

    def _ended(self, rooms: Sequence[memoryview], codes: Sequence[int]) -> None:
        """Give back the rooms of a read; those of transfers that may go on, only later."""
        loop = asyncio.get_running_loop()
        for room, code in zip(rooms, codes, strict=True):
            if code >= 0 or code == _WRONG_SIZE or code in _MISSES:
                self.staging.give_back(room)
            else:
                loop.call_later(_LATE_SECONDS, self.staging.give_back, room)

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        places, sizes = [address_of(each) for each in objects], [len(each) for each in objects]

        def write() -> Sequence[int]:
            for name, is_bad in zip(names, replace, strict=True):
                if is_bad:
                    self._store.remove(name, True)
            return list(self._store.batch_put_from(list(names), places, sizes))

        codes = await self._run_call(
            Way.WRITE, write, len(names), lambda _: self.staging.give_back(*objects)
        )
        self.staging.give_back(*objects)
        return [_fault(code) if code else None for code in codes]

    async def run_background(self, log: Log) -> None:
        """Do nothing: the master evicts by itself."""

    async def forget(self, folder: str) -> None:
        # By force: recently read objects are leased for some seconds.
        call = _in_thread(lambda: self._store.remove_by_regex(f"^{folder}/.*", True))
        await asyncio.wrap_future(call)

    def close(self) -> None:
        """Take our segment out of the store. A call that hangs is abandoned."""
        for executor in self._executors.values():
            executor.shutdown(wait=False)
        if self._store is not None:
            self._store.close()

    async def _run_call(
        self,
        way: Way,
        function: Callable[[], Sequence[int]],
        count: int,
        late: Callable[[Sequence[int]], None],
    ) -> Sequence[int]:
        """Return a call's code for each block; if cancelled or failed, pass codes to ``late``."""
        executor = self._executors[way]
        call = executor.submit(function)
        try:
            return await asyncio.shield(asyncio.wrap_future(call))
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()

            def over(done: Future[Sequence[int]]) -> None:
                codes = [_NOT_FOUND if done.cancelled() else _RAISED] * count
                if not done.cancelled() and done.exception() is None:
                    codes = list(done.result())
                loop.call_soon_threadsafe(late, codes)

            if not call.cancel() and not call.done() and executor is self._executors[way]:
                # It hangs: abandon it with its thread; later calls get another thread.
                executor.shutdown(wait=False)
                self._executors[way] = _executor(way)
            call.add_done_callback(over)
            raise
        except Exception:
            late([_RAISED] * count)
            raise


def _executor(way: Way) -> ThreadPoolExecutor:
    """Return one thread for calls in sequence, without a turn of the event loop between them."""
    return ThreadPoolExecutor(1, f"kvferry-mooncake-{way.value}")


def open_mooncake(address: RemoteAddress, object_bytes: int, folder: str) -> MooncakeClient:
    """Return a client that joins its store when it is first probed."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    return MooncakeClient(address, object_bytes, folder, MooncakeDistributedStore)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own, for rare calls."""
    call: Future[T] = Future()
    call.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, name="kvferry-mooncake", daemon=True).start()
    return call


def _fault(code: int) -> Fault:
    return Fault(_WORDS.get(code, f"error {code}"))


def _check_server(place: str, server: str = "master", usual_port: str = "") -> Fault | None:
    """Return a fault unless a server listens at ``place`` and answers."""
    host, _, port = place.rpartition(":")
    try:
        host, port = (host, port) if port.isdigit() else (place, usual_port)
        at = (host.strip("[]"), int(port))
        with socket.create_connection(at, timeout=_KNOCK_SECONDS) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            sock.recv(1)  # the kernel accepts connections even if the server hangs
    except ConnectionResetError:
        pass  # the server rejects the request, so it listens
    except OSError as error:
        return Fault(f"the {server} at {place} cannot be reached: {error}")
    return None


def _local_address(place: str) -> str:
    """Return this machine's address on the network that leads to the master."""
    host, _, port = place.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # connects, and sends nothing
        sock.connect((host.strip("[]"), int(port)))
        return str(sock.getsockname()[0])
