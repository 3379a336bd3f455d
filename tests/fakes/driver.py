"""A GPU driver without a GPU: every call of the real one, on real memory, with no mercy.

It refuses what a driver refuses (unknown handles, memory nobody registered, a copy across two
registrations, empty batches, the default stream), fails where it is told to, and counts everything
it gave out.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.fakes.timeline import FakeEvent, FakeStream, Timeline

from kvferry.errors import DriverError
from kvferry.transfer.driver import (
    Addresses,
    BatchForm,
    DeviceIdentity,
    Driver,
    Priority,
)

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
DEFAULT_STREAMS = (0, 1, 2)  # which the batch copy refuses
ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_SUPPORTED = 700, 712, 801


class FakeDriver(Driver):
    """Stands in for all of ``Driver``. ``timeline`` decides what runs when."""

    reads_early = False
    """Whether batches read their sources during the call, as some orders allow a driver to."""

    def __init__(
        self,
        *,
        seed: int = 0,
        batch_form: BatchForm = BatchForm.WITHOUT_FAIL_INDEX,
    ) -> None:
        self.batch_form = batch_form
        self.timeline = Timeline(seed)
        self.calls: list[str] = []
        self.batches: list[int] = []
        self.priorities: dict[int, Priority] = {}
        self._lock = self.timeline.lock
        self._handles = itertools.count(0x1000, 0x10)
        self._events: dict[int, FakeEvent] = {}
        self._device_memory: dict[int, Any] = {}  # address -> the memory, kept alive
        self._host: dict[int, Any] = {}
        self._ranges: dict[int, int] = {}  # reachable memory: start -> end
        self._registered: set[int] = set()
        self._failures: dict[tuple[str, int], int] = {}
        self._fail_at: dict[int, int] = {}
        self._dead: int | None = None
        self._seen: Counter[str] = Counter()
        self._inside = threading.local()

    def fail(self, name: str, nth: int = 1, code: int = ILLEGAL_ADDRESS) -> None:
        """The ``nth`` call of ``name`` from now on is refused with ``code``."""
        self._failures[(name, self._seen[name] + nth)] = code

    def fail_at(self, index: int, code: int = ILLEGAL_ADDRESS) -> None:
        """The call that would be ``calls[index]`` is refused with ``code``."""
        self._fail_at[index] = code

    def die(self, code: int = ILLEGAL_ADDRESS) -> None:
        """From now on every call is refused, as after a fault on the device."""
        self._dead = code

    def adopt(self, array: npt.NDArray[Any]) -> None:
        """Treat an array as device memory that someone else allocated."""
        self._ranges[array.ctypes.data] = array.ctypes.data + array.nbytes

    def enqueue_host_function(self, stream: int, function: Callable[[], None]) -> None:
        """Run ``function`` in stream order: a kernel, as far as ordering goes."""
        with self._entered("launch", stream=stream):
            self.timeline.put(stream, function)

    def leaks(self) -> dict[str, int]:
        """What was given out and not given back."""
        return {
            what: count
            for what, count in {
                "streams": len(self.timeline.streams) - 1,
                "events": len(self._events),
                "device memory": len(self._device_memory),
                "host memory": len(self._host),
                "registrations": len(self._registered),
            }.items()
            if count
        }

    @contextmanager
    def current(self) -> Iterator[None]:
        self._enter("current")
        depth = getattr(self._inside, "depth", 0)
        self._inside.depth = depth + 1
        try:
            yield
        finally:
            self._inside.depth = depth

    @contextmanager
    def allow_during_capture(self) -> Iterator[None]:
        yield

    def identity(self) -> DeviceIdentity:
        return DeviceIdentity("fake", 13000, "0000:00:00.0")

    def close(self) -> None:
        pass

    def bind(self, name: str, *argtypes: Any) -> Any:
        raise DriverError(f"a fake has no {name}", code=500, unsupported=True)

    def create_stream(self, priority: Priority) -> int:
        with self._entered("create_stream"):
            stream = next(self._handles)
            self.timeline.streams[stream] = FakeStream()
            self.priorities[stream] = priority
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._entered("destroy_stream", stream=stream):
            self.timeline.destroy(stream)

    def synchronize_stream(self, stream: int) -> None:
        with self._entered("synchronize_stream", stream=stream):
            self.timeline.run_until(lambda: not self.timeline.streams[stream].queue)

    def stream_wait_event(self, stream: int, event: int) -> None:
        with self._entered("stream_wait_event", stream=stream):
            self.timeline.put_wait(stream, self._event(event))

    def create_event(self, *, timing: bool) -> int:
        with self._entered("create_event"):
            event = next(self._handles)
            self._events[event] = FakeEvent(timing)
            return event

    def destroy_event(self, event: int) -> None:
        with self._entered("destroy_event"):
            self._event(event)
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        with self._entered("record_event", stream=stream):
            self.timeline.put_record(stream, self._event(event))

    def event_is_done(self, event: int) -> bool:
        with self._entered("event_is_done"):
            self.timeline.dawdle()
            return self._event(event).is_done

    def elapsed_seconds(self, start: int, end: int) -> float:
        with self._entered("elapsed_seconds"):
            first, last = self._event(start), self._event(end)
            if not (first.timing and last.timing and first.is_done and last.is_done):
                raise self._refusal("elapsed_seconds", INVALID_HANDLE)
            return (last.clock - first.clock) * 1e-6

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        with self._entered("copy_async", stream=stream):
            self._check_range("copy_async", dst, num_bytes)
            self._check_range("copy_async", src, num_bytes)
            self.timeline.put(stream, _copy(dst, src, num_bytes, None))

    def copy_batch_async(
        self,
        dsts: Addresses,
        srcs: Addresses,
        sizes: Addresses,
        stream: int,
    ) -> None:
        name = "copy_batch_async"
        with self._entered(name, stream=stream):
            if self.batch_form is BatchForm.ABSENT:
                raise self._refusal(name, NOT_SUPPORTED)
            if not len(sizes) or stream in DEFAULT_STREAMS:
                raise self._refusal(name, INVALID_VALUE)
            copies = list(zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True))
            for dst, src, size in copies:
                self._check_range(name, dst, size)
                self._check_range(name, src, size)
            self.batches.append(len(sizes))
            # A batch has no order of its own.
            self.timeline.rng.shuffle(copies)
            for dst, src, size in copies:
                early = ctypes.string_at(src, size) if self.reads_early else None
                self.timeline.put(stream, _copy(dst, src, size, early))

    def alloc_device(self, num_bytes: int) -> int:
        return self._alloc("alloc_device", self._device_memory, num_bytes)

    def free_device(self, address: int) -> None:
        self._free("free_device", self._device_memory, address)

    def alloc_host(self, num_bytes: int) -> int:
        return self._alloc("alloc_host", self._host, num_bytes)

    def free_host(self, address: int) -> None:
        self._free("free_host", self._host, address)

    def register_host(self, address: int, num_bytes: int) -> None:
        with self.current(), self._entered("register_host"):
            end = address + num_bytes
            if any(start < end and address < stop for start, stop in self._ranges.items()):
                raise self._refusal("register_host", ALREADY_REGISTERED)
            self._registered.add(address)
            self._ranges[address] = end

    def unregister_host(self, address: int) -> None:
        with self.current(), self._entered("unregister_host"):
            if address not in self._registered:
                raise self._refusal("unregister_host", INVALID_VALUE)
            self._registered.remove(address)
            del self._ranges[address]

    def _alloc(self, name: str, table: dict[int, Any], num_bytes: int) -> int:
        with self._entered(name):
            raw = np.full(num_bytes + 256, 0xA5, dtype=np.uint8)
            address = (raw.ctypes.data + 255) // 256 * 256
            table[address] = raw
            self._ranges[address] = address + num_bytes
            return address

    def _free(self, name: str, table: dict[int, Any], address: int) -> None:
        with self._entered(name):
            if address not in table:
                raise self._refusal(name, INVALID_VALUE)
            # The real call waits for the device before it gives memory back.
            self.timeline.run_all()
            del table[address]
            del self._ranges[address]

    @contextmanager
    def _entered(self, name: str, stream: int | None = None) -> Iterator[None]:
        with self._lock:
            self._enter(name)
            if not getattr(self._inside, "depth", 0):
                raise self._refusal(name, INVALID_CONTEXT)
            if stream is not None and stream not in self.timeline.streams:
                raise self._refusal(name, INVALID_HANDLE)
            yield

    def _enter(self, name: str) -> None:
        with self._lock:
            index = len(self.calls)
            self.calls.append(name)
            self._seen[name] += 1
            if self._dead is not None:
                raise self._refusal(name, self._dead)
            code = self._failures.pop((name, self._seen[name]), None)
            code = self._fail_at.get(index, code)
            if code is not None:
                raise self._refusal(name, code)

    def _refusal(self, name: str, code: int) -> DriverError:
        return DriverError(f"{name}: refused ({code})", code=code, unsupported=code == 801)

    def _event(self, event: int) -> FakeEvent:
        if event not in self._events:
            raise self._refusal("event", INVALID_HANDLE)
        return self._events[event]

    def _check_range(self, name: str, address: int, num_bytes: int) -> None:
        if num_bytes < 1 or not any(
            start <= address and address + num_bytes <= end for start, end in self._ranges.items()
        ):
            raise self._refusal(name, INVALID_VALUE)


def _copy(dst: int, src: int, size: int, early: bytes | None) -> Callable[[], None]:
    def run() -> None:
        ctypes.memmove(dst, src if early is None else early, size)

    return run
