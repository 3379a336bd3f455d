"""Where the bytes of a block are on the device, and in what order a host slot holds them."""

from kvferry.device.layout.base import GroupLayout
from kvferry.device.layout.describe import describe

__all__ = ["GroupLayout", "describe"]
