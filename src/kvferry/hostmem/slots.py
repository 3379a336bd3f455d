"""The slots of host memory: their mapping, their layout in chunks, and sharing between ranks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.quantities import format_size
from kvferry.errors import ClosedError, ConfigError, InputError
from kvferry.hostmem.limits import Machine, size_for
from kvferry.settings.kinds import Auto

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


class PrivateMemory:
    """Anonymous memory of this process alone, in huge pages if the machine allows them.

    A crash leaves nothing behind. A forked child does not inherit the memory: the fork would have
    to copy all pages of a pinned pool.
    """

    def __init__(self, num_bytes: int) -> None:
        # One huge page more, to align the start: kernels before 6.7 do not.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = map_memory(-1, num_bytes + HUGE_PAGE, flags)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE
        self.bytes: Bytes = whole[skip : skip + num_bytes]
        ask_huge(self.bytes)
        advise(self.bytes, _MADV_DONTFORK)


def ask_huge(memory: Bytes) -> None:
    """Ask the kernel for huge pages, and to leave this memory out of core dumps."""
    advise(memory, _MADV_HUGEPAGE)
    advise(memory, _MADV_DONTDUMP)


def map_memory(fd: int, num_bytes: int, flags: int) -> mmap.mmap:
    """Call ``mmap.mmap``; ConfigError, with the size and the remedy, if the kernel refuses."""
    try:
        return mmap.mmap(fd, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"host: {format_size(num_bytes)} of memory cannot be mapped: {error}; ask for less, "
            "or raise the address space limit (ulimit -v) or vm.overcommit_memory"
        ) from error


def advise(memory: Bytes, advice: int) -> bool:
    """Call madvise; return whether the kernel accepted. Older kernels do not know every advice."""
    return _libc.madvise(memory.ctypes.data, memory.nbytes, advice) == 0


def populate(memory: Bytes) -> None:
    """Back every page of ``memory`` now. It must not be in use: old kernels need a write of zeros.

    OSError if the machine has no memory left.
    """
    # One call per huge page: where a hypervisor had yet to back the memory, several threads got
    # 5.5 GB/s with calls of 64 MiB, and 8 GB/s with calls of 2 MiB. (16 vCPU, Linux 6.18.)
    for start in range(0, memory.nbytes, HUGE_PAGE):
        _populate_page(memory[start : start + HUGE_PAGE])


def _populate_page(memory: Bytes) -> None:
    while not advise(memory, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14
            memory[:: mmap.PAGESIZE] = 0
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, f"{memory.nbytes} bytes got no pages: {os.strerror(code)}")


CHUNK_BYTES = 64 << 20
"""8 threads made 16 GiB ready in 0.6 s, with 1 GiB chunks in 2 s (H200 host, driver 580)."""


@dataclass(frozen=True)
class Chunk:
    """Bytes mapped and pinned at once; ``slots_after`` is the number of slots up to its end."""

    start: int
    num_bytes: int
    slots_after: int


@dataclass(frozen=True)
class Chunks:
    """The layout of slots in chunks: one slot of ``slot_bytes`` every ``pitch`` bytes."""

    num_slots: int
    slot_bytes: int
    pitch: int
    slots_per_chunk: int

    @classmethod
    def lay_out(cls, num_slots: int, slot_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Chunks:
        """Return chunks of at most ``chunk_bytes``, or of one slot and whole pages if larger."""
        pitch = _pitch(slot_bytes, chunk_bytes)
        unit = math.lcm(pitch, mmap.PAGESIZE)
        size = unit * max(1, chunk_bytes // unit)
        return cls(num_slots, slot_bytes, pitch, size // pitch)

    @property
    def chunk_bytes(self) -> int:
        """Bytes from one chunk's start to the next chunk's."""
        return self.slots_per_chunk * self.pitch

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks, in whole pages."""
        return _round_up(self.num_slots * self.pitch, mmap.PAGESIZE)

    def __len__(self) -> int:
        return (self.num_slots + self.slots_per_chunk - 1) // self.slots_per_chunk

    def __getitem__(self, index: int) -> Chunk:
        before = index * self.slots_per_chunk
        after = min(before + self.slots_per_chunk, self.num_slots)
        start = before * self.pitch
        end = _round_up(after * self.pitch, mmap.PAGESIZE)
        return Chunk(start, end - start, after)


def _pitch(slot_bytes: int, chunk_bytes: int) -> int:
    """Return the smallest distance of slots at which chunks can end with a slot and a page."""
    step = 1
    while step < mmap.PAGESIZE:
        pitch = _round_up(slot_bytes, step)
        if math.lcm(pitch, mmap.PAGESIZE) <= chunk_bytes:
            return pitch
        step *= 2
    return _round_up(slot_bytes, mmap.PAGESIZE)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""File seals. Without them any process could truncate the file: a SIGBUS in every rank."""


@dataclass(frozen=True)
class SlotLayout:
    """The layout of slots in host memory; ranks that share the memory must have equal ones.

    ``block_bytes`` are by group; ``pitch`` is the distance of slots in bytes. ``formats`` are the
    ``GroupLayout.format`` of each group: the order of the bytes within a block.
    """

    block_bytes: tuple[int, ...]
    pitch: int
    formats: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        block_bytes: Sequence[int],
        formats: Sequence[str] = (),
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> SlotLayout:
        pitch = Chunks.lay_out(1, max(block_bytes), chunk_bytes).pitch
        return cls(tuple(block_bytes), pitch, tuple(formats))

    @property
    def slot_bytes(self) -> int:
        return max(self.block_bytes)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.block_bytes))
        order = f", in the order {' | '.join(self.formats)}" if any(self.formats) else ""
        return f"blocks of {sizes} bytes every {self.pitch}{order}"


@dataclass(frozen=True)
class SharedHandle:
    """Plain data by which another process of this host opens the shared memory."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int
    slots: SlotLayout


class SharedMemory:
    """Host memory that several processes of one host map; it lives as long as any of them.

    It is a memfd, which has no name, so nothing is left when the last process ends. The first rank
    creates it and sends a :class:`SharedHandle` to the others. Pinning it is slower than private
    memory, unless ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``advise``.
    """

    def __init__(self, fd: int, num_bytes: int, slots: SlotLayout, *, is_creator: bool) -> None:
        """Map ``fd`` and take ownership of it."""
        self.is_creator = is_creator
        self.slots = slots
        self.fd: int | None = fd
        """File descriptor of the memfd, for a child process; None once it is closed."""
        try:
            mapping = map_memory(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        ask_huge(self.bytes)

    @classmethod
    def create(cls, asked: int | Auto, slots: SlotLayout) -> SharedMemory:
        """Create the memory; send :attr:`handle` to the other ranks while this object is open."""
        num_bytes = size_for(asked, Machine())
        fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"host: {num_bytes} bytes of shared memory cannot be had: {error}; ask for less"
            ) from error
        return cls(fd, num_bytes, slots, is_creator=True)

    @classmethod
    def open(cls, handle: SharedHandle, slots: SlotLayout) -> SharedMemory:
        """Open the memory that another process of this host and user has created.

        ``slots`` is the layout of this rank's blocks; ConfigError if the creator's differs.
        """
        if handle.slots != slots:
            raise ConfigError(
                f"shared host memory of process {handle.pid} has {handle.slots}. This rank has "
                f"{slots}. All ranks that share it must serve one model with one layout"
            )
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"shared host memory of process {handle.pid} cannot be opened ({path}): {error}. "
                "All ranks of a host must run as one user and see each other's processes. The rank "
                "that made it must still run"
            ) from error
        found = os.fstat(fd)
        # The process may have ended, and its pid or file descriptor be used again.
        same = (found.st_dev, found.st_ino, found.st_size) == (
            handle.device,
            handle.inode,
            handle.num_bytes,
        )
        if not same or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            os.close(fd)
            raise ConfigError(f"{path} is not the shared host memory it was; start the ranks anew")
        return cls(fd, handle.num_bytes, slots, is_creator=False)

    @property
    def handle(self) -> SharedHandle:
        if self.fd is None:
            raise InputError("the shared memory is closed: no other rank can open it any more")
        found = os.fstat(self.fd)
        size = found.st_size
        return SharedHandle(os.getpid(), self.fd, found.st_dev, found.st_ino, size, self.slots)

    def close(self) -> None:
        """Close the memfd: no more ranks can open it; mappings stay. Safe to call twice."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class HostTier:
    """The slots of host memory, contiguous in one mapping, which it owns.

    The kernel backs pages when they are touched, or when a ``HostMemory`` makes them ready. Copy
    engines and tiers read and write the slots in place, by ``rows`` or ``address``.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        chunks: Chunks | None = None,
        memory: PrivateMemory | SharedMemory | None = None,
    ) -> None:
        """Map the slots into ``memory`` (default: private), in the layout ``chunks``."""
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.chunks = chunks if chunks is not None else Chunks.lay_out(num_slots, slot_bytes)
        memory = memory if memory is not None else PrivateMemory(self.chunks.num_bytes)
        self._rows: Bytes | None = np.lib.stride_tricks.as_strided(
            memory.bytes[: self.chunks.num_bytes],
            shape=(num_slots, slot_bytes),
            strides=(self.pitch, 1),
        )

    @property
    def pitch(self) -> int:
        """Bytes from one slot's start to the next slot's."""
        return self.chunks.pitch

    @property
    def rows(self) -> Bytes:
        """All slots, one row of bytes per slot; writing to a row writes the slot."""
        if self._rows is None:
            raise ClosedError("the host memory is closed")
        return self._rows

    @property
    def address(self) -> int:
        """Address of slot 0; slot ``i`` begins ``i * pitch`` bytes later."""
        return int(self.rows.ctypes.data)

    def close(self) -> None:
        # The mapping ends with the last array over it; an engine may still hold one.
        self._rows = None
