"""One host pool for all ranks on a host whose KV is the same: stored once, loaded by each.

The memory is a memfd: it has no name, so nothing is left in /dev/shm or on disk when its last
process goes, however it goes. The first rank makes it and hands :class:`SharedHandle` to the
others over whatever channel they have.

    rank 0   create ── handle ──> other ranks: open
    stores   each rank copies every n-th block      loads   each rank copies all blocks

It is slower to pin than private memory, unless the machine allows huge pages there
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` set to ``advise``).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from kvferry.errors import ConfigError, InputError
from kvferry.tiers.mapping import Bytes, ask_huge, map_memory


@dataclass(frozen=True)
class SharedHandle:
    """Where another process of this host finds the memory; plain, so that it can be sent."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int


class SharedMemory:
    """Memory that several processes of one host map. Lives as long as any of them does."""

    def __init__(self, fd: int, num_bytes: int, *, is_creator: bool) -> None:
        """Map ``fd``, which is ours from now on."""
        self.is_creator = is_creator
        self._fd: int | None = fd
        try:
            mapping = map_memory(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        ask_huge(self.bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory; hand :attr:`handle` to the other ranks while this object is open."""
        fd = os.memfd_create("kvferry", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"host: {num_bytes} bytes of shared memory cannot be had: {error}; ask for less"
            ) from error
        return cls(fd, num_bytes, is_creator=True)

    @classmethod
    def open(cls, handle: SharedHandle) -> SharedMemory:
        """The memory that another process of this host and user has made."""
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"shared host memory of process {handle.pid} cannot be opened ({path}): {error}; "
                "all ranks of a host must run as one user and see each other's processes, and the "
                "rank that made it must still run"
            ) from error
        found = os.fstat(fd)
        # The process may be gone and its number, or that of its file, be another's by now.
        if (found.st_dev, found.st_ino, found.st_size) != (
            handle.device,
            handle.inode,
            handle.num_bytes,
        ):
            os.close(fd)
            raise ConfigError(f"{path} is not the shared host memory it was; start the ranks anew")
        return cls(fd, handle.num_bytes, is_creator=False)

    @property
    def handle(self) -> SharedHandle:
        if self._fd is None:
            raise InputError("the shared memory is closed: no other rank can open it any more")
        found = os.fstat(self._fd)
        return SharedHandle(os.getpid(), self._fd, found.st_dev, found.st_ino, found.st_size)

    def close(self) -> None:
        """No more ranks may join. What is mapped stays mapped. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
