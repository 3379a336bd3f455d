"""The first chunk of a load, read into the ring before the load is ordered."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.device.job import CopyJob
from kvferry.device.paths.chunk_cursor import ChunkCursor
from kvferry.device.paths.host_runs import HostRuns
from kvferry.device.paths.ring import RingSlot


@dataclass(eq=False)
class ReadAhead:
    """Bytes in a slot of the ring that a load may want, as long as nobody else has used the ring.

    ``job`` is the load as far as it is known: its device blocks are not. ``begun`` and ``ended``
    are timing events around the copy; they stay with who gave them.
    """

    job: CopyJob
    chunk: ChunkCursor
    runs: HostRuns
    slot: RingSlot
    num_uses: int
    """Of the ring, with this one."""
    begun: int
    ended: int
    is_used: bool = False
    """Whether the load went on from here."""

    def is_of(self, job: CopyJob) -> bool:
        """Whether it is of this very load.

        By the slots' array, not by what is in it: the same slots may have other bytes by then. Who
        has pinned them for a load makes an array for that, and loads it once.
        """
        return job.host_slots is self.job.host_slots and job.layout is self.job.layout
