"""A card that is only a clock: libcuda's functions in Python, for time that is the host's own.

No byte is moved. A copy ends when one at the speed of a link would, those of one direction one
after the other; a kernel takes a few microseconds; events and waits are times. Every call lets go
of the interpreter once, as a call into the real library does, and takes no time of its own, so what
is measured on it is the host's part and the least of it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import kvferry.transfer.kernels.launch as launching
from kvferry.transfer.driver import BATCH_WITHOUT_FAIL_INDEX, Driver
from kvferry.transfer.kernels.launch import ARGUMENTS, MOST_PROGRAMS

BYTES_PER_SECOND = 55e9
"""What one large pinned copy takes on an H200."""
KERNEL_SECONDS = 5e-6
ROW_BYTES = 4096
"""What a kernel's row moves, with pages of several KiB."""
NOT_READY = 600
_ROWS = [list(ARGUMENTS).index(name) for name in ("first_row", "last_row")]

now = time.perf_counter


class StandInLibcuda:
    """The functions of libcuda that kvferry binds."""

    def __init__(self) -> None:
        self.first: float | None = None
        """When the first copy or kernel was queued since ``watch``."""
        self.last = 0.0
        """When the last of them ends."""
        self.num_calls = 0
        self._streams: dict[int | None, float] = {}
        self._events: dict[int, float] = {}
        self._links = [0.0, 0.0]
        self._handles = 0x1000
        self._memory: dict[int, Any] = {}
        self._batch = BATCH_WITHOUT_FAIL_INDEX(self._copy_batch)
        self._functions: dict[str, Callable[..., int]] = {
            "cuDriverGetVersion": lambda out: _put(out, 13000),
            "cuDeviceGet": lambda out, device: _put(out, 0),
            "cuDevicePrimaryCtxRetain": lambda out, device: _put(out, 0xC0),
            "cuCtxGetStreamPriorityRange": lambda least, most: _put(least, 0) or _put(most, -5),
            "cuStreamCreateWithPriority": lambda out, *_: self._new(out, self._streams),
            "cuEventCreate": lambda out, *_: self._new(out, self._events),
            "cuStreamQuery": lambda stream: self._asked(self._streams.get(stream, 0.0)),
            "cuEventQuery": lambda event: self._asked(self._events[event]),
            "cuEventRecord": self._record,
            "cuStreamWaitEvent": self._wait,
            "cuStreamSynchronize": self._synchronize,
            "cuEventElapsedTime": self._elapsed,
            "cuMemcpyAsync": self._copy,
            "cuLaunchKernel": self._launch,
            "cuMemAlloc_v2": lambda out, size: self._alloc(out, size),
            "cuMemHostAlloc": lambda out, size, _: self._alloc(out, size),
            "cuGetProcAddress_v2": self._look_up,
            "cuModuleLoadData": lambda out, image: _put(out, 0xB0),
            "cuModuleGetFunction": lambda out, module, name: _put(out, 0xF0),
            "cuDeviceGetAttribute": lambda out, *_: _put(out, 9),
        }
        # Any call into C will do: ctypes lets go of the interpreter around it.
        self._let_go: Any = ctypes.CDLL(None).getppid

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in ("cuMemcpy2DAsync_v2",):
            raise AttributeError(name)
        function: Callable[..., int] = self._functions.get(name, _well)

        def call(*arguments: Any) -> int:
            self.num_calls += 1
            self._let_go()
            return function(*arguments)

        return call

    def watch(self) -> None:
        """Note the first copy from now on, and the last one."""
        self.first, self.last = None, 0.0

    # -- what ends when --------------------------------------------------------------------------

    def _queued(self, stream: int | None, seconds: float, link: int | None = None) -> int:
        began = now()
        if self.first is None:
            self.first = began
        start = max(began, self._streams.get(stream, 0.0))
        if link is not None:
            start = max(start, self._links[link])
        end = self._streams[stream] = start + seconds
        if link is not None:
            self._links[link] = end
        self.last = max(self.last, end)
        return 0

    def _copy(self, dst: int, src: int, size: int, stream: int) -> int:
        return self._queued(stream, size / BYTES_PER_SECOND, dst not in self._memory)

    def _copy_batch(self, dsts: int, srcs: int, sizes: int, count: int, *rest: Any) -> int:
        total = sum((ctypes.c_uint64 * count).from_address(sizes))
        return self._queued(rest[-1], total / BYTES_PER_SECOND, 0)

    def _launch(self, *arguments: Any) -> int:
        programs, stream, pointers = arguments[1], arguments[8].value, arguments[9]
        if programs > MOST_PROGRAMS:
            return self._queued(stream, KERNEL_SECONDS)
        first, last = (ctypes.c_int32.from_address(pointers[at]).value for at in _ROWS)
        return self._queued(stream, (last - first) * ROW_BYTES / BYTES_PER_SECOND, 0)

    def _record(self, event: int, stream: int) -> int:
        self._events[event] = self._streams.get(stream, 0.0)
        return 0

    def _wait(self, stream: int, event: int, _: int) -> int:
        self._streams[stream] = max(self._streams.get(stream, 0.0), self._events[event])
        return 0

    def _asked(self, end: float) -> int:
        return 0 if now() >= end else NOT_READY

    def _synchronize(self, stream: int) -> int:
        time.sleep(max(0.0, self._streams.get(stream, 0.0) - now()))
        return 0

    def _elapsed(self, out: Any, start: int, end: int) -> int:
        return _put(out, 1e3 * (self._events[end] - self._events[start]))

    # -- handles and memory ----------------------------------------------------------------------

    def _new(self, out: Any, table: dict[Any, float]) -> int:
        self._handles += 0x10
        table[self._handles] = 0.0
        return _put(out, self._handles)

    def _alloc(self, out: Any, size: int) -> int:
        memory = ctypes.create_string_buffer(size + 4096)
        address = -(-ctypes.addressof(memory) // 4096) * 4096
        self._memory[address] = memory
        return _put(out, address)

    def _look_up(self, name: bytes, out: Any, *_: Any) -> int:
        return _put(out, ctypes.cast(self._batch, ctypes.c_void_p).value)


def _well(*_: Any) -> int:
    return 0


def _put(out: Any, value: Any) -> int:
    out._obj.value = value
    return 0


def stand_in() -> tuple[StandInLibcuda, Driver]:
    """The library, and the driver of CUDA on it.

    Kernels are not compiled, and nothing runs them.
    """
    library = StandInLibcuda()
    launching.compile_for = lambda *_: (b"", b"copy_rows")
    return library, Driver(library)
