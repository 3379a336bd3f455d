"""One host pool for all ranks on a host whose KV is the same: stored once, loaded by each.

The memory is a memfd. It has no name, so nothing is left in /dev/shm or on disk when its last
process ends. The first rank makes it and sends :class:`SharedHandle` to the others over any
channel. Its size is sealed, and a rank whose slots have another layout cannot join::

    rank 0   create ── handle ──> other ranks: open
    stores   each rank copies every n-th block      loads   each rank copies all blocks

A rank alone has such memory too where the process of a remote store works on the slots in place.

It is slower to pin than private memory, unless the machine allows huge pages there
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` set to ``advise``).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import ConfigError, InputError
from kvferry.hostmem.mapping import Bytes, ask_huge, map_memory
from kvferry.hostmem.slots import CHUNK_BYTES, Chunks

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
        spare_bytes: int = 0,
    ) -> SlotLayout:
        pitch = Chunks.lay_out(1, max(block_bytes), chunk_bytes, spare_bytes).pitch
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
    """Memory that several processes of one host map. Lives as long as any of them."""

    def __init__(self, fd: int, num_bytes: int, slots: SlotLayout, *, is_creator: bool) -> None:
        """Map ``fd`` and take ownership of it."""
        self.is_creator = is_creator
        self.slots = slots
        self._fd: int | None = fd
        try:
            mapping = map_memory(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        ask_huge(self.bytes)

    @classmethod
    def create(cls, num_bytes: int, slots: SlotLayout) -> SharedMemory:
        """New memory; hand :attr:`handle` to the other ranks while this object is open."""
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
        """The memory that another process of this host and user has made, for such blocks."""
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
    def fd(self) -> int | None:
        """Its file, for a child process; None once it is closed."""
        return self._fd

    @property
    def handle(self) -> SharedHandle:
        if self._fd is None:
            raise InputError("the shared memory is closed: no other rank can open it any more")
        found = os.fstat(self._fd)
        size = found.st_size
        return SharedHandle(os.getpid(), self._fd, found.st_dev, found.st_ino, size, self.slots)

    def close(self) -> None:
        """Let no more ranks join; existing mappings stay. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
