"""Where bytes rest below the device: the contract, host memory, and the reference tiers."""

from kvferry.tiers.base import (
    Batch,
    BatchId,
    LastingTier,
    Result,
    Rows,
    Tier,
    TierSetup,
    Way,
)
from kvferry.tiers.growth import Growth, GrowthState, GrowthStats, Pin, Registrar
from kvferry.tiers.host import HostTier
from kvferry.tiers.host_memory import HostMemory
from kvferry.tiers.limits import Machine, size_for
from kvferry.tiers.memory import KeyedMemoryTier, MemoryTier
from kvferry.tiers.mover import LevelMover, Mover, SharedLevelMover, SharedMover
from kvferry.tiers.opening import open_levels, open_tier
from kvferry.tiers.shared import SharedHandle, SharedMemory, SlotLayout
from kvferry.tiers.tier_mover import TierMover

__all__ = [
    "Batch",
    "BatchId",
    "Growth",
    "GrowthState",
    "GrowthStats",
    "HostMemory",
    "HostTier",
    "KeyedMemoryTier",
    "LastingTier",
    "LevelMover",
    "Machine",
    "MemoryTier",
    "Mover",
    "Pin",
    "Registrar",
    "Result",
    "Rows",
    "SharedHandle",
    "SharedLevelMover",
    "SharedMemory",
    "SharedMover",
    "SlotLayout",
    "Tier",
    "TierMover",
    "TierSetup",
    "Way",
    "open_levels",
    "open_tier",
    "size_for",
]
