"""Host memory: pages from the kernel, in one run of bytes, a slot per block; shared by ranks."""

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
    """Anonymous memory of this process alone, in huge pages where the machine allows them.

    A crash leaves nothing behind. A forked child does not inherit it: the fork would have to copy
    all pages of a pinned pool.
    """

    def __init__(self, num_bytes: int) -> None:
        # Room to begin on a huge page: kernels before 6.7 do not align by themselves.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = map_memory(-1, num_bytes + HUGE_PAGE, flags)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE
        self.bytes: Bytes = whole[skip : skip + num_bytes]
        ask_huge(self.bytes)
        advise(self.bytes, _MADV_DONTFORK)


def ask_huge(memory: Bytes) -> None:
    """Ask for huge pages, and for core dumps without this memory."""
    advise(memory, _MADV_HUGEPAGE)
    advise(memory, _MADV_DONTDUMP)


def map_memory(fd: int, num_bytes: int, flags: int) -> mmap.mmap:
    """As ``mmap.mmap``; a refusal says what was asked and what to do."""
    try:
        return mmap.mmap(fd, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"host: {format_size(num_bytes)} of memory cannot be mapped: {error}; ask for less, "
            "or raise the address space limit (ulimit -v) or vm.overcommit_memory"
        ) from error


def advise(memory: Bytes, advice: int) -> bool:
    """Whether the kernel took the advice; it may be older than the advice, and need not."""
    return _libc.madvise(memory.ctypes.data, memory.nbytes, advice) == 0


def populate(memory: Bytes) -> None:
    """Back every page of ``memory`` now; it must not be in use yet.

    OSError where the machine has no memory left.
    """
    # A call for each huge page: several threads that each ask for 64 MiB at once get 5.5 GB/s of
    # memory that a hypervisor has yet to back, with 2 MiB at a time 8. (16 vCPU, Linux 6.18.)
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
"""16 GiB were ready in 0.6 s with 8 threads; 1 GiB chunks took 2 s (H200 host, driver 580)."""


@dataclass(frozen=True)
class Chunk:
    """A run of memory from ``start`` on; ``slots_after`` slots are ready when it is."""

    start: int
    num_bytes: int
    slots_after: int


@dataclass(frozen=True)
class Chunks:
    """Slots of ``slot_bytes``, one every ``pitch`` bytes, ``slots_per_chunk`` in every chunk."""

    num_slots: int
    slot_bytes: int
    pitch: int
    slots_per_chunk: int

    @classmethod
    def lay_out(cls, num_slots: int, slot_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Chunks:
        """Chunks of at most ``chunk_bytes``, or of one slot where that is larger."""
        pitch = _pitch(slot_bytes, chunk_bytes)
        unit = math.lcm(pitch, mmap.PAGESIZE)
        size = unit * max(1, chunk_bytes // unit)
        return cls(num_slots, slot_bytes, pitch, size // pitch)

    @property
    def chunk_bytes(self) -> int:
        """Bytes from one chunk's start to the next one's."""
        return self.slots_per_chunk * self.pitch

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks: whole pages."""
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
    """The least distance between slots that lets a chunk end with a slot and a page."""
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
"""Without the seals a process that opens the file can truncate it: a SIGBUS in every rank."""


@dataclass(frozen=True)
class SlotLayout:
    """The layout of slots in a host memory; all ranks that share one must agree.

    ``block_bytes`` of each group, the ``pitch`` from slot to slot, the order of the bytes within a
    block (``formats``, one for each group, as ``GroupLayout.format``).
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
    """Where another process of this host finds the memory, as plain data."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int
    slots: SlotLayout


class SharedMemory:
    """Memory that several processes of one host map. Lives as long as any of them.

    A memfd has no name, so nothing is left when its last process ends. The first rank makes it and
    sends :class:`SharedHandle` to the others over any channel. It is slower to pin than private
    memory, unless ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is set to ``advise``.
    """

    def __init__(self, fd: int, num_bytes: int, slots: SlotLayout, *, is_creator: bool) -> None:
        """Map ``fd`` and take ownership of it."""
        self.is_creator = is_creator
        self.slots = slots
        self.fd: int | None = fd
        """Its file, for a child process; None once it is closed."""
        try:
            mapping = map_memory(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        ask_huge(self.bytes)

    @classmethod
    def create(cls, asked: int | Auto, slots: SlotLayout) -> SharedMemory:
        """New memory; hand :attr:`handle` to the other ranks while this object is open."""
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
        """The memory that another process of this host and user has made.

        ``slots`` is the layout of this rank's blocks; ConfigError, with both, where it differs.
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
        # The process may have ended, and its number or that of its file be used again.
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
        """Let no more ranks join; existing mappings stay. Safe to call twice."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class HostTier:
    """Slots in one run of memory, private by default, so that a crash leaves nothing behind.

    Owns the mapping; its pages come as they are touched, or when a ``HostMemory`` makes them ready.
    Copy engines and tiers take ``rows`` or ``address`` and need no other copy.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        chunks: Chunks | None = None,
        memory: PrivateMemory | SharedMemory | None = None,
    ) -> None:
        """``memory`` (default: private) holds the slots as ``chunks`` lays them out."""
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
        """Bytes from one slot's beginning to the next one's."""
        return self.chunks.pitch

    @property
    def rows(self) -> Bytes:
        """All slots, one row each; writing to a row writes the slot."""
        if self._rows is None:
            raise ClosedError("the host memory is closed")
        return self._rows

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot ``i`` begins ``i * pitch`` later."""
        return int(self.rows.ctypes.data)

    def close(self) -> None:
        # The mapping goes when the last array over it does: an engine may still hold one.
        self._rows = None
