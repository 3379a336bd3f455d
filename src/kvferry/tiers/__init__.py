"""Where bytes rest below the device: the contract, host memory, and the reference tier."""

from kvferry.tiers.base import Rows, Tier
from kvferry.tiers.growth import Growth, GrowthStats, Pin, Progress, Registrar
from kvferry.tiers.host import HostTier
from kvferry.tiers.host_memory import HostMemory
from kvferry.tiers.limits import Machine, size_for
from kvferry.tiers.memory import MemoryTier
from kvferry.tiers.mover import TierMover
from kvferry.tiers.shared import SharedHandle, SharedMemory, SharedMover

__all__ = [
    "Growth",
    "GrowthStats",
    "HostMemory",
    "HostTier",
    "Machine",
    "MemoryTier",
    "Pin",
    "Progress",
    "Registrar",
    "Rows",
    "SharedHandle",
    "SharedMemory",
    "SharedMover",
    "Tier",
    "TierMover",
    "size_for",
]
