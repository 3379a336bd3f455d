"""The reference tiers, one of each kind, over a dict; slow and lossy on request."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.quantities import format_size, parse_size
from kvferry.errors import ConfigError, KvferryError
from kvferry.tiers.contract import Batch, Result, TierSetup, Way
from kvferry.tiers.queued import Task
from kvferry.tiers.threaded import ThreadedTier
from kvferry.types import Key, SlotArray, TierName

MEMORY = TierName("memory")

Fault = Callable[[Way, Key], None]
"""Called for each block; what it raises is that block's error. One that blocks is a hung medium."""

_Name = TypeVar("_Name", int, Key)


class _Blocks(ThreadedTier, Generic[_Name]):
    """Blocks in a dict, one ``bytes`` each. Owns the bytes; the contract's plainest reading.

    ``delay`` seconds per batch, ``fault``, ``lose`` and :meth:`go_away` imitate a failing disk or
    network.
    """

    def __init__(
        self,
        block_bytes: int,
        *,
        name: TierName = MEMORY,
        delay: float = 0.0,
        fault: Fault | None = None,
        num_threads: int = 2,
    ) -> None:
        super().__init__(name, block_bytes, num_threads=num_threads)
        self.delay = delay
        self.fault = fault
        self._blocks: dict[_Name, bytes] = {}

    def _names(self, batch: Batch) -> Iterable[_Name]:
        """What each block of a batch is kept under."""
        raise NotImplementedError

    def go_away(self, reason: str) -> None:
        """Out of order from now on; what is here stays."""
        self._ailment = reason or "out of order"

    def come_back(self) -> None:
        """Back in order."""
        self._ailment = ""

    def forget(self) -> None:
        with self._changed:
            super().forget()
            self._blocks.clear()

    def _lose(self, names: Iterable[_Name]) -> None:
        with self._changed:
            for name in names:
                self._blocks.pop(name, None)

    def _carry_out(self, task: Task) -> Result:
        if self.delay:
            time.sleep(self.delay)
        batch = task.batch
        ok = np.zeros(len(batch), dtype=bool)
        reasons: dict[int, str] = {}
        for at, (name, key) in enumerate(zip(self._names(batch), batch.keys, strict=True)):
            reason = task.stopped or self._ailment or self._try(task, at, name, key)
            ok[at] = not reason
            if reason:
                reasons[at] = reason
        return Result(batch.id, ok, reasons, int(ok.sum()) * batch.block_bytes)

    def _try(self, task: Task, at: int, name: _Name, key: Key) -> str:
        """Do one block; returns what went wrong."""
        way = task.batch.way
        try:
            if way is Way.WRITE and isinstance(name, int):
                self._lose((name,))
            if self.fault is not None:
                self.fault(way, key)
        except KvferryError as error:
            return f"tier {self.name}: {error}"
        except Exception as error:  # one bad block is one bad block, whatever its error
            return f"tier {self.name}: {type(error).__name__}: {error}"
        if way is Way.FIND:
            here = name in self._blocks and task.generation == self._generation
            return "" if here else "not here"
        pieces = zip(task.batch.addresses[at].tolist(), task.batch.sizes.tolist(), strict=True)
        if way is Way.WRITE:
            return self._keep(task, name, b"".join(ctypes.string_at(*piece) for piece in pieces))
        block = self._blocks.get(name) if task.generation == self._generation else None
        if block is None:
            return f"tier {self.name}: {self._words(name)} holds nothing"
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
            return ""

    def _words(self, name: _Name) -> str:
        return f"place {name}" if isinstance(name, int) else f"key {name.hex()[:16]}"


class MemoryTier(_Blocks[int]):
    """The reference for tiers with numbered places."""

    def __init__(
        self,
        num_places: int,
        block_bytes: int,
        *,
        name: TierName = MEMORY,
        delay: float = 0.0,
        fault: Fault | None = None,
        num_threads: int = 2,
    ) -> None:
        self.num_places = num_places
        super().__init__(block_bytes, name=name, delay=delay, fault=fault, num_threads=num_threads)

    def lose(self, places: SlotArray) -> None:
        """These places hold nothing any more, as a failing medium would have it."""
        self._lose(places.tolist())

    def _names(self, batch: Batch) -> Iterable[int]:
        assert batch.places is not None
        return batch.places.tolist()


class KeyedMemoryTier(_Blocks[Key]):
    """The reference for tiers that find blocks by their keys.

    With ``most_blocks``, what came first goes first.
    """

    def __init__(
        self,
        block_bytes: int,
        *,
        most_blocks: int | None = None,
        name: TierName = MEMORY,
        delay: float = 0.0,
        fault: Fault | None = None,
        num_threads: int = 2,
    ) -> None:
        super().__init__(block_bytes, name=name, delay=delay, fault=fault, num_threads=num_threads)
        self._most_blocks = most_blocks

    def _keep(self, task: Task, name: Key, block: bytes) -> str:
        with self._changed:
            reason = super()._keep(task, name, block)
            if self._most_blocks is not None and len(self._blocks) > self._most_blocks:
                del self._blocks[next(iter(self._blocks))]
            return reason

    def lose(self, keys: Keys) -> None:
        """These keys are not here any more."""
        self._lose(keys)

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
