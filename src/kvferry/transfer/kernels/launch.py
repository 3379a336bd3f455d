"""Compiling, preparing and launching the copy kernel on a CUDA card.

Triton only compiles. The driver launches, which needs neither torch nor a C compiler.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvferry.errors import DriverError, InputError, install
from kvferry.transfer.driver import Driver, Handles, Priority
from kvferry.transfer.job import CopyJob
from kvferry.transfer.layout import NUM_PARTS, GroupLayout, Int64s

MIN_IDS = 8192
"""Least size of an id buffer: 4,096 blocks. Few transfers need a larger one (slow to allocate)."""


class IdBuffer(NamedTuple):
    """A buffer of block ids and slot numbers: its pinned host memory and its device memory."""

    host: int
    device: int
    ids: Int64s
    event: int
    """Reached when the last job that used the buffer has ended."""


class IdBuffers:
    """Owns the id buffers of a path; one thread at a time may use it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles = Handles()
        self._buffers: list[IdBuffer] = []  # the most recently used one is last

    def prepare(self) -> None:
        """Allocate enough buffers for all parts of a job."""
        while len(self._buffers) < NUM_PARTS:
            self._buffers.append(self._make(MIN_IDS))

    def fill(self, job: CopyJob) -> IdBuffer:
        """Return a buffer whose host memory has the job's block ids, then its slot numbers."""
        count = len(job.device_blocks)
        buffer = self._take(2 * count)
        buffer.ids[:count] = job.device_blocks
        buffer.ids[count : 2 * count] = job.host_slots
        return buffer

    def send(self, buffer: IdBuffer, job: CopyJob, stream: int) -> None:
        """Queue the copy of the job's ids to device memory."""
        self._driver.copy_async(buffer.device, buffer.host, 16 * len(job.device_blocks), stream)

    def take_back(self, buffer: IdBuffer, stream: int) -> None:
        """Make a buffer free once all work queued on ``stream`` so far has run.

        All work that reads the buffer must be queued. After an exception the buffer is not reused.
        """
        self._driver.record_event(buffer.event, stream)
        self._buffers.append(buffer)

    def close(self) -> None:
        """Release everything; call only when no copy is in flight. Safe to call twice."""
        self._buffers = []
        self._handles.close()

    def _take(self, count: int) -> IdBuffer:
        """Return the longest idle free buffer of at least ``count`` ids, or a new one."""
        for index, buffer in enumerate(self._buffers):
            if buffer.ids.size >= count and self._driver.event_is_done(buffer.event):
                return self._buffers.pop(index)
        return self._make(count)

    def _make(self, count: int) -> IdBuffer:
        size = max(MIN_IDS, 1 << (count - 1).bit_length())
        driver, take = self._driver, self._handles.take
        event = take(driver.create_event(timing=False), driver.destroy_event)
        host = take(driver.alloc_host(8 * size), driver.free_host)
        device = take(driver.alloc_device(8 * size), driver.free_device)
        ids = np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(host))
        return IdBuffer(host, device, ids, event)


LANES = 32
"""Threads that copy one row: a warp."""

MAX_STEPS = 8
"""The most accesses in flight per thread. Eight of 16 bytes fill a PCIe Gen5 link from two
multiprocessors (one NVIDIA H200); more would not fit the registers of 1024 threads."""


@dataclass(frozen=True)
class RowShape:
    """The width and number of a thread's accesses to a row; the kernel is compiled for them."""

    wide: bool
    """Whether an access has 16 bytes, as all addresses and lengths are multiples of 16; else 8."""
    steps: int
    """Accesses of one thread to a row."""

    @cached_property
    def row_bytes(self) -> int:
        return (16 if self.wide else 8) * LANES * self.steps


def common_alignment(layout: GroupLayout) -> int:
    """Return the largest number that divides every address, stride and size of ``layout``."""
    # Offsets are sums of sizes, so a divisor of all sizes divides them too.
    return math.gcd(*(int(np.gcd.reduce(a)) for a in (layout.bases, layout.strides, layout.sizes)))


def row_shape(layout: GroupLayout, alignment: int) -> RowShape:
    """Return the widest accesses that ``alignment`` allows, in rows that fit the segments."""
    shapes = [RowShape(alignment % 16 == 0, 2**power) for power in range(MAX_STEPS.bit_length())]
    # The fewest rows, as a row's bytes are in flight together; then the shortest, as others idle.
    return min(shapes, key=lambda shape: (-(-layout.sizes // shape.row_bytes)).sum())


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of one block: each is at most ``row_bytes`` contiguous bytes of one segment."""

    layout: GroupLayout
    shape: RowShape

    @cached_property
    def rows_per_segment(self) -> Int64s:
        return -(-self.layout.sizes // self.shape.row_bytes)

    @cached_property
    def rows_per_block(self) -> int:
        return int(self.rows_per_segment.sum())

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all segments have equal length, so that rows need no table."""
        return bool((self.layout.sizes == self.layout.sizes[0]).all())

    @cached_property
    def segments(self) -> Int64s:
        """The segment number of each row of a block."""
        return np.repeat(np.arange(self.layout.num_segments), self.rows_per_segment)

    @cached_property
    def starts(self) -> Int64s:
        """Byte of its segment at which each row starts."""
        first = np.cumsum(self.rows_per_segment) - self.rows_per_segment
        return (np.arange(self.rows_per_block) - first[self.segments]) * self.shape.row_bytes

    @cached_property
    def places(self) -> Int64s:
        """Byte of the packed block at which each row starts."""
        return self.layout.offsets[self.segments] + self.starts

    def tables(self) -> Int64s:
        """Return the kernel's tables as an array: 4 numbers per segment, 2 per row if mixed."""
        layout = self.layout
        parts = [layout.bases, layout.strides, layout.sizes, layout.offsets]
        if not self.is_uniform:
            parts += [self.segments, self.starts]
        return np.concatenate(parts).astype(np.int64)

    def row_at(self, position: int) -> int:
        """Return the last row that starts at or before byte ``position`` of the packed blocks."""
        block, within = divmod(position, self.layout.block_bytes)
        return block * self.rows_per_block + int(self.places.searchsorted(within, "right")) - 1

    def position_of(self, row: int) -> int:
        """Return the byte of the packed blocks at which ``row`` starts."""
        block, within = divmod(row, self.rows_per_block)
        return block * self.layout.block_bytes + int(self.places[within])


ARGUMENTS: dict[str, str] = {
    "null_address": "i64",
    "ids": "i64",
    "num_blocks": "i32",
    "tables": "i64",
    "num_segments": "i32",
    "segment_bytes": "i64",
    "packed_base": "i64",
    "packed_pitch": "i64",
    "rows_per_block": "i32",
    "rows_per_segment": "i32",
    "first_row": "i32",
    "last_row": "i32",
}
"""The run-time arguments of the copy kernel and their types, in order."""


class CopyArguments(ctypes.Structure):
    """The arguments of a launch; reusable, as the driver reads them only during the launch call."""

    _fields_ = tuple(
        (name, c_int64 if kind == "i64" else c_int32) for name, kind in ARGUMENTS.items()
    )

    def __init__(self, **values: int) -> None:
        super().__init__(**values)
        addresses = [
            ctypes.addressof(self) + getattr(CopyArguments, name).offset for name in ARGUMENTS
        ]
        # Triton's kernels take up to two scratch pointers more; here they are null, never read.
        self._scratch = c_void_p()
        addresses += [ctypes.addressof(self._scratch)] * 2
        self.pointers = (c_void_p * len(addresses))(*addresses)


@dataclass(frozen=True)
class Variant:
    """Compile-time choices that select one compiled form of the copy kernel."""

    to_packed: bool
    uniform: bool
    wide: bool
    steps: int
    warps: int

    def constants(self) -> dict[str, Any]:
        """Return the kernel's compile-time arguments; ``ROWS`` makes each warp copy one row."""
        return {
            "TO_PACKED": self.to_packed,
            "UNIFORM": self.uniform,
            "WIDE": self.wide,
            "ROWS": self.warps,
            "STEPS": self.steps,
        }


def widest(*, to_packed: bool, warps: int) -> Variant:
    """Return the variant for equal segments of multiples of 4 KiB, as most engines have."""
    return Variant(to_packed, uniform=True, wide=True, steps=8, warps=warps)


Launch = Callable[[int, CopyArguments, int], None]
"""Queues a number of programs of one kernel on a stream; DriverError on refusal."""


class Launcher(Protocol):
    """Compiles the copy kernel and loads it."""

    def prepare(self, variant: Variant) -> Launch:
        """Compile and load ``variant``; the first call may take a second."""

    def close(self) -> None:
        """Unload all kernels. Safe to call twice."""


_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class CudaLauncher:
    """Owns the compiled kernels of one device."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._launches: dict[Variant, Launch] = {}
        self._modules: list[int] = []

    def prepare(self, variant: Variant) -> Launch:
        with self._lock:
            if variant not in self._launches:
                code = compile_for(variant, self._capability())
                self._launches[variant] = self._load(variant, *code)
            return self._launches[variant]

    def close(self) -> None:
        with self._lock, self._driver.current():
            while self._modules:
                self._driver.bind("cuModuleUnload", c_void_p)(self._modules.pop())
            self._launches.clear()

    def _load(self, variant: Variant, image: bytes, name: bytes) -> Launch:
        driver, module, function = self._driver, c_void_p(), c_void_p()
        load = driver.bind("cuModuleLoadData", c_void_p, c_char_p)
        driver.check(load(byref(module), image), "cuModuleLoadData()")
        self._modules.append(module.value or 0)
        find = driver.bind("cuModuleGetFunction", c_void_p, c_void_p, c_char_p)
        driver.check(find(byref(function), module, name), f"cuModuleGetFunction({name!r})")
        # Bound without a signature, as applying one takes as long as the call. So every address
        # must be a c_void_p, or ctypes cuts it to 32 bits.
        call, check, threads = driver.bind("cuLaunchKernel"), driver.check, variant.warps * LANES

        def launch(programs: int, arguments: CopyArguments, stream: int) -> None:
            on, pointers = c_void_p(stream), arguments.pointers
            code = call(function, programs, 1, 1, threads, 1, 1, 0, on, pointers, None)
            if code:
                check(code, f"cuLaunchKernel({programs} x {threads} threads)")

        return launch

    def _capability(self) -> int:
        device, value, version = c_int(), c_int(), 0
        current = self._driver.bind("cuCtxGetDevice", c_void_p)
        self._driver.check(current(byref(device)), "cuCtxGetDevice()")
        ask = self._driver.bind("cuDeviceGetAttribute", c_void_p, c_int, c_int)
        for attribute in (_MAJOR, _MINOR):
            self._driver.check(ask(byref(value), attribute, device), "cuDeviceGetAttribute()")
            version = 10 * version + value.value
        return version


def compile_for(variant: Variant, capability: int) -> tuple[bytes, bytes]:
    """Return machine code and entry name of ``variant`` for sm_``capability``."""
    compiled = compile_kernel(variant, capability)
    return compiled.asm["cubin"], compiled.metadata.name.encode()


def compile_kernel(variant: Variant, capability: int) -> Any:
    """Compile ``variant`` for sm_``capability`` with Triton; needs no GPU."""
    # Imported here: Triton is heavy, and only kernels need it.
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from kvferry.transfer.kernels import triton_copy
    except ImportError as error:
        raise DriverError(
            f"copy kernels need Triton ({error}): {install('gpu')}",
            unsupported=True,
        ) from error
    constants = variant.constants()
    signature = {**ARGUMENTS, **dict.fromkeys(constants, "constexpr")}
    try:
        return triton.compile(
            ASTSource(triton_copy.copy_rows, signature, constexprs=constants),
            target=GPUTarget("cuda", capability, LANES),
            options={"num_warps": variant.warps, "num_stages": 1},
        )
    except Exception as error:
        raise DriverError(
            f"Triton {triton.__version__} could not compile {variant} for sm_{capability}: {error}",
            unsupported=True,
        ) from error


MAX_ROWS = 2**31 - 1
MOST_PROGRAMS = 16
"""The most programs of a kernel for short rows: an eighth of an H200."""


@dataclass(frozen=True)
class Grid:
    """The part of the GPU that a kernel takes: programs, and warps per program.

    Every warp has one row in flight. If rows are so short that fewer than ``min_bytes`` would be in
    flight, the kernel gets more programs.
    """

    programs: int
    warps: int
    min_bytes: int = 0

    def programs_for(self, rows: RowTable) -> int:
        """Return the number of programs that copy these rows."""
        row_bytes = rows.layout.block_bytes / rows.rows_per_block
        needed = math.ceil(self.min_bytes / (self.warps * row_bytes))
        return max(self.programs, min(needed, MOST_PROGRAMS))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch prepared for one layout; each job changes only some ``arguments``."""

    rows: RowTable
    launch: Launch
    programs: int
    arguments: CopyArguments

    def begin(self, job: CopyJob, ids: int) -> CopyArguments:
        """Return the arguments for all rows of ``job``; the caller sets ``packed_base``."""
        arguments = self.arguments
        num_blocks = len(job.device_blocks)
        num_rows = num_blocks * self.rows.rows_per_block
        if num_rows > MAX_ROWS:
            raise InputError(f"a transfer of {num_rows} rows is too large for one kernel; split it")
        arguments.ids = ids
        arguments.num_blocks = num_blocks
        arguments.first_row = 0
        arguments.last_row = num_rows
        return arguments


def _key(job: CopyJob) -> tuple[int, int, int]:
    return id(job.layout), job.host_base, job.host_pitch


class Kernels:
    """Owns the prepared launches and device tables of layouts; leaves the launcher to its owner.

    ``to_packed`` is for stores, which gather blocks into a ring; loads read host slots. A layout's
    tables are uploaded once, never per transfer.
    """

    def __init__(self, driver: Driver, launcher: Launcher, grid: Grid, *, to_packed: bool) -> None:
        self._launcher = launcher
        self._grid = grid
        self._to_packed = to_packed
        self._driver = driver
        self._handles = Handles()
        # A value keeps its layout alive, so that no other layout gets the same id().
        self._prepared: dict[tuple[int, int, int], Prepared] = {}

    def find(self, job: CopyJob) -> Prepared | None:
        """Return the prepared launch for ``job``; None if ``get`` would have to prepare it."""
        return self._prepared.get(_key(job))

    def get(self, job: CopyJob) -> Prepared:
        """Return the launch for ``job``; its first call uploads and compiles, up to a second."""
        prepared = self.find(job)
        if prepared is None:
            prepared = self._prepared[_key(job)] = self._prepare(job)
        return prepared

    def launch(self, prepared: Prepared, stream: int) -> None:
        """Queue the kernel for rows ``first_row`` to ``last_row`` of its arguments."""
        arguments = prepared.arguments
        tiles = -(-(arguments.last_row - arguments.first_row) // self._grid.warps)
        prepared.launch(min(prepared.programs, tiles), arguments, stream)

    def close(self) -> None:
        """Free the tables; call only when no copy is in flight. Safe to call twice."""
        self._prepared.clear()
        self._handles.close()

    def _prepare(self, job: CopyJob) -> Prepared:
        # The packed side's alignment (0: any) limits the width of accesses, too. Host slots may be
        # aligned worse than the layout; a ring never is.
        alignment = 0 if self._to_packed else math.gcd(job.host_base, job.host_pitch)
        rows = RowTable(
            job.layout, row_shape(job.layout, math.gcd(common_alignment(job.layout), alignment))
        )
        variant = Variant(
            to_packed=self._to_packed,
            uniform=rows.is_uniform,
            wide=rows.shape.wide,
            steps=rows.shape.steps,
            warps=self._grid.warps,
        )
        arguments = CopyArguments(
            tables=self._upload(rows),
            num_segments=job.layout.num_segments,
            segment_bytes=int(job.layout.sizes[0]),
            packed_pitch=job.layout.block_bytes,
            rows_per_block=rows.rows_per_block,
            rows_per_segment=int(rows.rows_per_segment[0]),
        )
        programs = self._grid.programs_for(rows)
        return Prepared(rows, self._launcher.prepare(variant), programs, arguments)

    def _upload(self, rows: RowTable) -> int:
        """Copy a layout's tables to the device; waits, as any stream may read them next."""
        table = rows.tables()
        driver, meanwhile = self._driver, Handles()
        address = self._handles.take(driver.alloc_device(table.nbytes), driver.free_device)
        try:
            pinned = meanwhile.take(driver.alloc_host(table.nbytes), driver.free_host)
            ctypes.memmove(pinned, table.ctypes.data, table.nbytes)
            stream = meanwhile.take(driver.create_stream(Priority.HIGH), driver.destroy_stream)
            driver.copy_async(address, pinned, table.nbytes, stream)
            driver.synchronize_stream(stream)
        finally:
            meanwhile.close()
        return address
