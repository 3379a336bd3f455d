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
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvferry.errors import ConfigError, InputError
from kvferry.tiers.mapping import Bytes, ask_huge, map_memory
from kvferry.types import DEVICE, HOST, Outcome, Rank, Receipt, Transfer


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


class Mover(Protocol):
    """Whatever carries transfers: a copy engine, a tier mover."""

    def submit(self, transfer: Transfer) -> object: ...

    def poll(self) -> list[Receipt]: ...

    def drain(self, timeout: float | None = None) -> list[Receipt]: ...

    def close(self) -> None: ...


class SharedMover:
    """One rank's part of the transfers of a host pool that ``num_ranks`` ranks share.

    Owns its mover. Loads to the device go through whole; of everything else this rank moves every
    ``num_ranks``-th block, and the others move theirs. The scheduler waits for all of them anyway,
    so a block is matchable when it is complete.
    """

    def __init__(self, mover: Mover, *, rank: Rank, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank {rank} is not one of 0 to {num_ranks - 1}")
        self._mover = mover
        self._rank = rank
        self._num_ranks = num_ranks
        self._nothing_to_do: list[Receipt] = []

    def submit(self, transfer: Transfer) -> object:
        if (transfer.src, transfer.dst) == (HOST, DEVICE):
            return self._mover.submit(transfer)
        # By transfer too: else rank 0 would do all of the transfers of one block.
        first = (self._rank - transfer.id) % self._num_ranks
        part = slice(first, None, self._num_ranks)
        src, dst = transfer.src_slots[part].copy(), transfer.dst_slots[part].copy()
        if not len(src):
            self._nothing_to_do.append(Receipt(transfer.id, self._rank, Outcome.OK, path="shared"))
            return None
        return self._mover.submit(replace(transfer, src_slots=src, dst_slots=dst))

    def poll(self) -> list[Receipt]:
        receipts, self._nothing_to_do = self._nothing_to_do, []
        return receipts + self._mover.poll()

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        receipts, self._nothing_to_do = self._nothing_to_do, []
        return receipts + self._mover.drain(timeout)

    def close(self) -> None:
        self._mover.close()
