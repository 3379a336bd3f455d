"""The reference tiers with faults: slow, failing, away and lossy on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvferry.core.keys import Key, Keys
from kvferry.errors import KvferryError
from kvferry.tiers import memory
from kvferry.tiers.contract import Way
from kvferry.tiers.queued import Task
from kvferry.types import SlotArray

Fault = Callable[[Way, Key], None]
"""Called for each block; what it raises is that block's error. One that blocks is a hung medium."""


class MemoryTier(memory.MemoryTier):
    """A tier of ours with ``fault``, ``lose`` and ``go_away``."""

    fault: Fault | None = None

    def go_away(self, reason: str) -> None:
        """Out of order from now on; what is here stays."""
        self._ailment = reason or "out of order"

    def come_back(self) -> None:
        """Back in order."""
        self._ailment = ""

    def _lose(self, names: Iterable[object]) -> None:
        with self._changed:
            for name in names:
                self._blocks.pop(name, None)

    def lose(self, names: SlotArray | Keys) -> None:
        """These hold nothing any more, as a failing medium would have it."""
        self._lose(names if isinstance(names, Keys) else names.tolist())

    def _move(self, task: Task, at: int, name: int | Key) -> str:
        way = task.batch.way
        try:
            if way is Way.WRITE and isinstance(name, int):
                self._lose((name,))
            if self.fault is not None:
                self.fault(way, task.batch.keys[at])
        except KvferryError as error:
            return f"tier {self.name}: {error}"
        except Exception as error:
            return f"tier {self.name}: {type(error).__name__}: {error}"
        return super()._move(task, at, name)


class KeyedMemoryTier(MemoryTier):
    """By key."""

    def __init__(self, block_bytes: int, **options: Any) -> None:
        super().__init__(None, block_bytes, **options)
