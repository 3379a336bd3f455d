"""Where bytes rest below the device: the contract, host memory, and the reference tier."""

from kvferry.tiers.base import Rows, Tier
from kvferry.tiers.host import HostTier
from kvferry.tiers.memory import MemoryTier
from kvferry.tiers.mover import TierMover

__all__ = ["HostTier", "MemoryTier", "Rows", "Tier", "TierMover"]
