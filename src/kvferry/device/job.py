"""What a path is asked to do: the addresses of one transfer, and the contract of a path."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.device.layout import GroupLayout
from kvferry.types import SlotArray


class Direction(Enum):
    """Which way the bytes go, seen from the device."""

    STORE = "store"  # device -> host
    LOAD = "load"  # host -> device


@dataclass(frozen=True, eq=False)
class CopyJob:
    """Block ``device_blocks[i]`` from or to host slot ``host_slots[i]``, all segments.

    Host slot ``h`` is the ``layout.block_bytes`` bytes at ``host_base + h * host_pitch``.
    """

    direction: Direction
    layout: GroupLayout
    device_blocks: SlotArray
    host_slots: SlotArray
    host_base: int
    host_pitch: int

    @property
    def num_bytes(self) -> int:
        return len(self.device_blocks) * self.layout.block_bytes


class Path(Protocol):
    """One way to copy. Enqueues on a stream and returns; completion is the engine's event."""

    name: str

    def enqueue(self, job: CopyJob, stream: int) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal."""

    def close(self) -> None:
        """Give back staging memory and pinned buffers. Safe to call twice."""
