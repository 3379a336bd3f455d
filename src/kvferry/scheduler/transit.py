"""How much is on its way between device and host, counted as it comes and goes."""

from __future__ import annotations

from collections.abc import Sequence


class Transit:
    """Blocks and bytes that transfers still bring or take, sent off or not. Owns four numbers.

    What is overdue no longer counts: a rank that hangs must not hold up every load and store.
    """

    __slots__ = (
        "_block_bytes",
        "blocks_from_device",
        "blocks_to_device",
        "bytes_from_device",
        "bytes_to_device",
    )

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self._block_bytes = tuple(block_bytes)
        self.blocks_to_device = 0
        self.bytes_to_device = 0
        self.blocks_from_device = 0
        self.bytes_from_device = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on their way, either way."""
        return self.bytes_to_device + self.bytes_from_device

    def load(self, group: int, num_blocks: int) -> None:
        """So many more blocks are to be loaded; fewer, where it is negative."""
        self.blocks_to_device += num_blocks
        self.bytes_to_device += num_blocks * self._block_bytes[group]

    def keep(self, num_blocks: int) -> None:
        """So many more device blocks are kept for loads not ordered yet; fewer, if negative."""
        self.blocks_to_device += num_blocks

    def store(self, group: int, num_blocks: int) -> None:
        """So many more blocks are to be stored; fewer, where it is negative."""
        self.blocks_from_device += num_blocks
        self.bytes_from_device += num_blocks * self._block_bytes[group]
