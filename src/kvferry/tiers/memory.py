"""The reference tiers over a dict, one placed and one keyed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvferry.core.keys import Key
from kvferry.core.quantities import format_size, parse_size
from kvferry.errors import ConfigError
from kvferry.tiers.contract import Result, TierSetup, Way
from kvferry.tiers.queued import Task, ThreadedTier
from kvferry.types import TierName

MEMORY = TierName("memory")


class MemoryTier(ThreadedTier):
    """Keeps each block as ``bytes`` in a dict. The simplest placed or keyed tier."""

    def __init__(
        self,
        num_places: int | None,
        block_bytes: int,
        *,
        name: TierName = MEMORY,
        most_blocks: int | None = None,
    ) -> None:
        """Make a placed tier, or a keyed one if ``num_places`` is None.

        With ``most_blocks``, the oldest block is evicted to make room for a new one.
        """
        self.num_places = num_places
        super().__init__(name, block_bytes)
        self._most_blocks = most_blocks
        self._blocks: dict[Any, bytes] = {}

    def forget(self) -> None:
        with self._changed:
            super().forget()
            self._blocks.clear()

    def _carry_out(self, task: Task) -> Result:
        batch = task.batch
        names = list(batch.keys) if batch.places is None else batch.places.tolist()
        reasons: dict[int, str] = {}
        for at, name in enumerate(names):
            reason = task.stopped or self.ailment or self._move(task, at, name)
            if reason:
                reasons[at] = reason
        ok = np.array([at not in reasons for at in range(len(batch))])
        return Result(batch.id, ok, reasons, int(ok.sum()) * batch.block_bytes)

    def _move(self, task: Task, at: int, name: int | Key) -> str:
        """Look up, write or read one block; return why it failed, or nothing."""
        batch, pieces = task.batch, list[tuple[int, int]]()
        if batch.way is not Way.FIND:
            pieces = list(zip(batch.addresses[at].tolist(), batch.sizes.tolist(), strict=True))
        if batch.way is Way.WRITE:
            return self._keep(task, name, b"".join(ctypes.string_at(*piece) for piece in pieces))
        block = self._blocks.get(name) if task.generation == self._generation else None
        if block is None:
            named = name if isinstance(name, int) else name.hex()
            return f"tier {self.name}: {named} holds nothing"
        start = 0
        for address, size in pieces:
            ctypes.memmove(address, block[start : start + size], size)
            start += size
        return ""

    def _keep(self, task: Task, name: int | Key, block: bytes) -> str:
        with self._changed:
            if task.generation != self._generation:
                return f"tier {self.name} was told to forget it"
            self._blocks[name] = block
            if self._most_blocks is not None and len(self._blocks) > self._most_blocks:
                del self._blocks[next(iter(self._blocks))]
            return ""


def open_placed(setup: TierSetup) -> MemoryTier:
    """Open the tier ``memory:SIZE``."""
    return MemoryTier(_num_blocks(setup), setup.block_bytes, name=setup.name)


def open_keyed(setup: TierSetup) -> MemoryTier:
    """Open the tier ``memory-by-key:SIZE``."""
    most = _num_blocks(setup)
    return MemoryTier(None, setup.block_bytes, most_blocks=most, name=setup.name)


def _num_blocks(setup: TierSetup) -> int:
    size = parse_size(setup.options, name=f"tier {setup.name}")
    if size < setup.block_bytes:
        raise ConfigError(
            f"{format_size(size)} hold no block of {setup.block_bytes} bytes; give it more"
        )
    return size // setup.block_bytes
