"""One rank's host memory: sized, mapped, grown, closed; shared where the ranks' KV is the same."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import format_size
from kvferry.errors import ConfigError, InputError
from kvferry.hostmem.growth import Growth, GrowthStats, Pin, Registrar
from kvferry.hostmem.limits import Machine, find_placement, size_for
from kvferry.hostmem.slots import (
    CHUNK_BYTES,
    Bytes,
    Chunks,
    HostTier,
    PrivateMemory,
    ask_huge,
    map_memory,
)
from kvferry.settings.kinds import Auto

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

    A memfd has no name, so nothing is left in /dev/shm or on disk when its last process ends. The
    first rank makes it and sends :class:`SharedHandle` to the others over any channel. Each rank
    stores every n-th block and loads all. It is slower to pin than private memory, unless
    ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is set to ``advise``.
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


log = logging.getLogger(__name__)


class HostMemory(Closing):
    """The host tier and its growth. Owns both, and closes them in the right order.

    The constructor returns when the first slots can serve; ``ready_slots`` counts the others as
    they follow. Open the pool with ``num_ready=0`` and call the scheduler's ``note_ready`` at every
    step.
    """

    def __init__(
        self,
        asked: int | Auto,
        slot_bytes: int,
        *,
        registrar: Registrar | None = None,
        pin: Pin = Pin.AUTO,
        busy: Callable[[], bool] = lambda: False,
        wanted: Callable[[], float] | None = None,
        pci_bus_id: str | None = None,
        num_ranks: int | None = None,
        machine: Machine | None = None,
        shared: SharedMemory | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
    ) -> None:
        """``asked`` bytes, for each of ``num_ranks`` on this host that ask for the same.

        ``registrar`` pins with the GPU's driver (None: not pinned), ``pci_bus_id`` names the GPU to
        be near to, ``busy`` and ``wanted`` pace the growth (see :class:`Growth`). ``shared`` memory
        (see :meth:`share`) counts once, not once per rank. ConfigError, with the limit and the
        remedy, where the machine cannot give this much.
        """
        machine = machine if machine is not None else Machine()
        if shared is None:
            ranks = num_ranks if num_ranks is not None else machine.num_ranks_here()
            size = size_for(asked, machine, num_ranks=ranks)
        else:
            size = shared.bytes.nbytes
        if size < slot_bytes:
            words = f"host: {format_size(size)} hold no block of {slot_bytes} bytes; give it more"
            raise ConfigError(words)
        chunks = Chunks.lay_out(size // slot_bytes, slot_bytes, chunk_bytes)
        if chunks.num_bytes > size:  # what the pitch adds, or the last page
            fits = max(1, size // chunks.pitch)
            chunks = Chunks.lay_out(fits, slot_bytes, chunk_bytes)
        if shared is not None and (shared.slots.slot_bytes, shared.slots.pitch) != (
            slot_bytes,
            chunks.pitch,
        ):
            raise ConfigError(
                f"the shared host memory has {shared.slots}. This rank's blocks have "
                f"{slot_bytes} bytes every {chunks.pitch}. All ranks must share one layout"
            )
        memory = shared if shared is not None else PrivateMemory(chunks.num_bytes)
        self.tier = HostTier(chunks.num_slots, slot_bytes, chunks=chunks, memory=memory)
        self._shared = shared
        self.growth = Growth(
            self.tier,
            registrar=registrar,
            pin=pin,
            busy=busy,
            wanted=wanted,
            placement=find_placement(pci_bus_id, machine.read),
            machine=machine if shared is None or shared.is_creator else None,
            num_threads=num_threads,
        )

    @staticmethod
    def share(
        asked: int | Auto | SharedHandle, slots: SlotLayout, *, machine: Machine | None = None
    ) -> SharedMemory:
        """Memory for all ranks of this host: the first rank makes it, the others open it.

        The first gives the size and sends ``handle`` to the other ranks, which give that. Keep it
        open until all have it. ``slots`` is the layout of this rank's blocks; ConfigError, with
        both, where another rank's differs.
        """
        if isinstance(asked, SharedHandle):
            return SharedMemory.open(asked, slots)
        machine = machine if machine is not None else Machine()
        return SharedMemory.create(size_for(asked, machine), slots)

    @property
    def num_slots(self) -> int:
        return self.tier.num_slots

    @property
    def ready_slots(self) -> int:
        """How many slots, from slot 0 on, can be used now."""
        return self.growth.ready_slots

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU's kernels may access the slots; else only copies by the driver may."""
        return self.growth.is_pinned

    @property
    def chunk_bytes(self) -> int:
        """Distance between registrations: one copy must not cross from one to the next."""
        return self.tier.chunks.chunk_bytes

    def stats(self) -> GrowthStats:
        return self.growth.stats()

    def close(self) -> None:
        """Stop growing, unregister, unmap. Nothing may be copying. Safe to call twice."""
        self.growth.close()
        self.tier.close()
        if self._shared is not None:
            self._shared.close()
