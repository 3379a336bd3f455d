"""One rank's host memory: sized, mapped, grown, closed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import format_size
from kvferry.errors import ConfigError
from kvferry.hostmem.growth import Growth, GrowthStats, Pin, Registrar
from kvferry.hostmem.limits import Machine, size_for
from kvferry.hostmem.mapping import PrivateMemory
from kvferry.hostmem.numa import find_placement, prefer
from kvferry.hostmem.shared import SharedHandle, SharedMemory, SlotLayout
from kvferry.hostmem.slots import CHUNK_BYTES, Chunks, HostTier
from kvferry.settings.kinds import Auto
from kvferry.types import HOST, TierName

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
        name: TierName = HOST,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int | None = None,
        spare_bytes: int = 0,
    ) -> None:
        """``asked`` bytes, for each of ``num_ranks`` on this host that ask for the same.

        ``registrar`` pins with the GPU's driver (None: not pinned), ``pci_bus_id`` names the GPU to
        be near to, ``busy`` and ``wanted`` pace the growth (see :class:`Growth`). ``shared`` memory
        (see :meth:`share`) counts once, not once per rank. ``spare_bytes`` behind every slot are
        for a child process, which maps the memory. ConfigError, with the limit and the remedy,
        where the machine cannot give this much.
        """
        machine = machine if machine is not None else Machine()
        if shared is None:
            ranks = num_ranks if num_ranks is not None else machine.num_ranks_here()
            size = size_for(asked, machine, num_ranks=ranks)
        else:
            size = shared.bytes.nbytes
        num_slots = _slots_in(size, slot_bytes)
        chunks = Chunks.lay_out(num_slots, slot_bytes, chunk_bytes, spare_bytes)
        if chunks.num_bytes > size:  # what the pitch adds, or the last page
            fits = max(1, size // chunks.pitch)
            chunks = Chunks.lay_out(fits, slot_bytes, chunk_bytes, spare_bytes)
        if shared is not None and (shared.slots.slot_bytes, shared.slots.pitch) != (
            slot_bytes,
            chunks.pitch,
        ):
            raise ConfigError(
                f"the shared host memory has {shared.slots}. This rank's blocks have "
                f"{slot_bytes} bytes every {chunks.pitch}. All ranks must share one layout"
            )
        if shared is None and spare_bytes:
            shared = SharedMemory.create(chunks.num_bytes, SlotLayout((slot_bytes,), chunks.pitch))
        memory = shared if shared is not None else PrivateMemory(chunks.num_bytes)
        self.tier = HostTier(chunks.num_slots, slot_bytes, name=name, chunks=chunks, memory=memory)
        self._shared = shared
        placement = prefer(self.tier.bytes, find_placement(pci_bus_id, machine.read))
        self.growth = Growth(
            self.tier,
            registrar=registrar,
            pin=pin,
            busy=busy,
            wanted=wanted,
            placement=placement,
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


def _slots_in(size: int, slot_bytes: int) -> int:
    if size < slot_bytes:
        raise ConfigError(
            f"host: {format_size(size)} hold no block of {slot_bytes} bytes; give it more"
        )
    return size // slot_bytes
