"""Blocks on disk: one store per directory and rank, bounded, checked, whole after a crash."""

from kvferry.tiers.disk.status import DiskFigures
from kvferry.tiers.disk.tier import DiskTier, open_disk

__all__ = ["DiskFigures", "DiskTier", "open_disk"]
