"""The reference tiers, one of each kind, over a dict."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

from kvferry.core.keys import Key
from kvferry.core.quantities import format_size, parse_size
from kvferry.errors import ConfigError
from kvferry.tiers.contract import Batch, Result, TierSetup, Way
from kvferry.tiers.queued import Task, ThreadedTier
from kvferry.types import TierName

MEMORY = TierName("memory")

_Name = TypeVar("_Name", int, Key)


class DictTier(ThreadedTier, Generic[_Name]):
    """Blocks in a dict, one ``bytes`` each. Owns the bytes; the contract's plainest reading."""

    _most_blocks: int | None = None

    def __init__(self, block_bytes: int, *, name: TierName = MEMORY, num_threads: int = 2) -> None:
        super().__init__(name, block_bytes, num_threads=num_threads)
        self._blocks: dict[_Name, bytes] = {}

    @abstractmethod
    def _names(self, batch: Batch) -> Iterable[_Name]:
        """What each block of a batch is kept under: its place, or its key."""

    def forget(self) -> None:
        with self._changed:
            super().forget()
            self._blocks.clear()

    def _carry_out(self, task: Task) -> Result:
        batch = task.batch
        reasons: dict[int, str] = {}
        for at, (name, key) in enumerate(zip(self._names(batch), batch.keys, strict=True)):
            reason = task.stopped or self.ailment or self._move(task, at, name, key)
            if reason:
                reasons[at] = reason
        ok = np.array([at not in reasons for at in range(len(batch))])
        return Result(batch.id, ok, reasons, int(ok.sum()) * batch.block_bytes)

    def _move(self, task: Task, at: int, name: _Name, key: Key) -> str:
        """Look up, write or read one block; return why it failed, or nothing."""
        way, is_current = task.batch.way, task.generation == self._generation
        if way is Way.FIND:
            return "" if name in self._blocks and is_current else "not here"
        pieces = zip(task.batch.addresses[at].tolist(), task.batch.sizes.tolist(), strict=True)
        if way is Way.WRITE:
            return self._keep(task, name, b"".join(ctypes.string_at(*piece) for piece in pieces))
        block = self._blocks.get(name) if is_current else None
        if block is None:
            return (
                f"tier {self.name}: {name if isinstance(name, int) else name.hex()} holds nothing"
            )
        start = 0
        for address, size in pieces:
            ctypes.memmove(address, block[start : start + size], size)
            start += size
        return ""

    def _keep(self, task: Task, name: _Name, block: bytes) -> str:
        with self._changed:
            if task.generation != self._generation:
                return f"tier {self.name} was told to forget it"
            self._blocks[name] = block
            if self._most_blocks is not None and len(self._blocks) > self._most_blocks:
                del self._blocks[next(iter(self._blocks))]
            return ""


class MemoryTier(DictTier[int]):
    """The reference for tiers with numbered places."""

    def __init__(
        self,
        num_places: int,
        block_bytes: int,
        *,
        name: TierName = MEMORY,
        num_threads: int = 2,
    ) -> None:
        self.num_places = num_places
        super().__init__(block_bytes, name=name, num_threads=num_threads)

    def _names(self, batch: Batch) -> Iterable[int]:
        assert batch.places is not None
        return batch.places.tolist()


class KeyedMemoryTier(DictTier[Key]):
    """The reference for tiers that find blocks by their keys.

    With ``most_blocks``, the oldest block makes room for a new one.
    """

    def __init__(
        self,
        block_bytes: int,
        *,
        most_blocks: int | None = None,
        name: TierName = MEMORY,
        num_threads: int = 2,
    ) -> None:
        super().__init__(block_bytes, name=name, num_threads=num_threads)
        self._most_blocks = most_blocks

    def _names(self, batch: Batch) -> Iterable[Key]:
        return batch.keys


def open_placed(setup: TierSetup) -> MemoryTier:
    """The tier ``memory:SIZE``."""
    return MemoryTier(_num_blocks(setup), setup.block_bytes, name=setup.name)


def open_keyed(setup: TierSetup) -> KeyedMemoryTier:
    """The tier ``memory-by-key:SIZE``."""
    return KeyedMemoryTier(setup.block_bytes, most_blocks=_num_blocks(setup), name=setup.name)


def _num_blocks(setup: TierSetup) -> int:
    size = parse_size(setup.options, name=f"tier {setup.name}")
    if size < setup.block_bytes:
        raise ConfigError(
            f"{format_size(size)} hold no block of {setup.block_bytes} bytes; give it more"
        )
    return size // setup.block_bytes
