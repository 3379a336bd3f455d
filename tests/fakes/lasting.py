"""A placed tier that outlives its process, as far as a test's process may: a shelf by name."""

from __future__ import annotations

import numpy as np
from tests.fakes.memory_tiers import MemoryTier

from kvferry.cache.slots import as_slots
from kvferry.core.keys import Key, Keys, Recovered
from kvferry.tiers.contract import Result, TierSetup, Way
from kvferry.tiers.queued import Task
from kvferry.types import TierName

shelves: dict[tuple[str, int], dict[int, tuple[Key, bytes]]] = {}
"""What is on each shelf: blocks by place, in the order written. Whoever looks clears it."""


class ShelfTier(MemoryTier):
    """The reference tier, but what it holds is on a shelf, and there in the next life."""

    def __init__(
        self,
        shelf: dict[int, tuple[Key, bytes]],
        num_places: int,
        block_bytes: int,
        name: TierName,
    ) -> None:
        super().__init__(num_places, block_bytes, name=name)
        self.shelf = shelf
        self._blocks = {place: block for place, (_, block) in shelf.items()}

    def recovered(self) -> Recovered:
        keys = Keys.from_bytes([key for key, _ in self.shelf.values()])
        return keys, as_slots(list(self.shelf))

    def forget(self) -> None:
        super().forget()
        self.shelf.clear()

    def _carry_out(self, task: Task) -> Result:
        result = super()._carry_out(task)
        batch = task.batch
        if batch.way is Way.WRITE and batch.places is not None:
            with self._changed:
                for at in range(len(batch)):
                    place = int(batch.places[at])
                    self.shelf.pop(place, None)
                    if result.ok[at] and task.generation == self._generation:
                        self.shelf[place] = (batch.keys[at], self._blocks[place])
        return result


def open_shelf(setup: TierSetup) -> ShelfTier:
    """The tier ``tests.fakes.lasting:open_shelf:NAME/PLACES``."""
    name, _, places = setup.options.partition("/")
    shelf = shelves.setdefault((name, setup.rank), {})
    return ShelfTier(shelf, int(places or 64), setup.block_bytes, setup.name)


def lose(shelf: dict[int, tuple[Key, bytes]], share: float, rng: np.random.Generator) -> None:
    """A part of a shelf did not reach the medium."""
    for place in [place for place in shelf if rng.random() < share]:
        del shelf[place]
