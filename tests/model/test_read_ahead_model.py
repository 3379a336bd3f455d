"""Hits that are read before they are ordered, in random lives: loads still bring what is there.

Seen red: a scatter that does not wait for what was read ahead. (Cases that random lives seldom meet
are in ``tests/unit/test_device_read_ahead.py``.)
"""

from __future__ import annotations

from contextlib import nullcontext

import hypothesis.strategies as st
from hypothesis.stateful import initialize, rule
from tests.fakes.kv import LAYOUTS
from tests.fakes.rig import LONG
from tests.model.test_device_engine_model import BLOCKS, NUM_BLOCKS, PAGES, SLOTS, EngineMachine

from kvferry.transfer.engine import gpu as reading_ahead
from kvferry.transfer.planning.planner import FixedPlanner
from kvferry.types import SlotArray, TransferId, as_slots

PINNED = TransferId(0)
"""Holds the slots of a hit that is not loaded yet."""


class ReadAheadMachine(EngineMachine):
    """As its parent, by the path that reads ahead, with one hit that is pinned or not."""

    pinned: SlotArray | None = None

    @initialize(
        store_path=st.sampled_from(["staged", "kernel"]),
        layout=st.sampled_from(sorted(LAYOUTS)),
        page=st.sampled_from(PAGES),
        seed=st.integers(0, 1000),
    )
    def open(self, store_path: str, layout: str, page: int, seed: int) -> None:
        self.least_ahead, reading_ahead.LEAST_BYTES = reading_ahead.LEAST_BYTES, 0
        self.begin("staged", layout, page, seed)
        self._rig.engine._planner = FixedPlanner(store_path, "staged")
        self._rig.load([0], [0])  # what is made at first is made
        self._rig.drain_ok()
        self.blocks[0] = self.slots[0]

    @rule(slots=SLOTS, count=st.integers(1, 3))
    def pin(self, slots: list[int], count: int) -> None:
        """A hit: while it is pinned nobody writes its slots, and they may be read ahead."""
        self.let_go()
        _, slots = self._free(list(range(NUM_BLOCKS)), slots[:count])
        if slots:
            self.held_slots[PINNED] = slots
            self.pinned = as_slots(slots)
            self._rig.engine.read_ahead(0, self.pinned)

    @rule()
    def let_go(self) -> None:
        self.held_slots.pop(PINNED, None)
        self.pinned = None

    @rule(blocks=BLOCKS, wait=st.booleans(), here=st.booleans())
    def load_pinned(self, blocks: list[int], wait: bool, here: bool) -> None:
        pinned = self.pinned
        busy = {b for held in self.held_blocks.values() for b in held}
        blocks = [b for b in blocks if b not in busy]
        if pinned is None or len(blocks) < len(pinned):
            return
        slots, blocks = pinned.tolist(), blocks[: len(pinned)]
        self.let_go()
        with self._rig.engine.begun_here() if here else nullcontext():
            transfer = self._rig.load(pinned, blocks)
        writes = [(b, self.slots[s]) for b, s in zip(blocks, slots, strict=True)]
        self._fly(transfer, self.blocks, writes, blocks, slots, wait)

    @rule(slots=SLOTS, blocks=BLOCKS)
    def come_back(self, slots: list[int], blocks: list[int]) -> None:
        """A conversation alone: nothing is under way, then a hit, and its load."""
        self._settle(self._rig.engine.drain(LONG))
        self.pin(slots[: len(blocks)], len(blocks))
        self.load_pinned(blocks, wait=False, here=True)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            reading_ahead.LEAST_BYTES = self.least_ahead


TestReadAheadMachine = ReadAheadMachine.TestCase
