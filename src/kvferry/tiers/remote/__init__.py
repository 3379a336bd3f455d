"""Blocks in a store that servers share: S3, Mooncake."""

from kvferry.tiers.remote.opening import open_remote
from kvferry.tiers.remote.tier import RemoteTier

__all__ = ["RemoteTier", "open_remote"]
