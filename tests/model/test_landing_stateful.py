"""Loads told of before they land, under random forward passes: no layer is read before its part.

The device here is a list: compute is queued with the parts it was ordered behind, and what a layer
reads is right only if it came after all parts of that layer of every load that vLLM was told of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.connectors.common.loads import AwaitedLoad
from kvferry.connectors.common.overlap import LayerwiseLoads
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.types import TransferId

LAYERS = [f"layer{n}" for n in range(7)]
MODES = ["", "NONE", "PIECEWISE"]


def layout() -> GroupLayout:
    count = len(LAYERS)
    spans = tuple((f"{name}[0]", 10 * n, 10 * n + 10) for n, name in enumerate(LAYERS))
    sizes = np.full(count, 10)
    return GroupLayout(np.arange(count) * 99, sizes, sizes, 2, spans=spans)


class Device:
    """Knows how far each load has come, and behind which parts compute is queued."""

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.landed: dict[TransferId, int | None] = {}
        self.behind: dict[TransferId, int] = {}  # compute waits for parts up to this one
        self.refuses = False

    def num_landed(self, transfer_id: TransferId) -> int | None:
        return self.landed.get(transfer_id)

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        if self.refuses:
            raise RuntimeError("the device says no")
        for transfer_id in transfer_ids:
            part = min(number, self.num_parts - 1)
            self.behind[transfer_id] = max(part, self.behind.get(transfer_id, -1))


class Landing(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.parts = LayerParts.of(layout())
        self.device = Device(len(self.parts))
        self.loads = LayerwiseLoads(
            self.device,  # type: ignore[arg-type]
            LAYERS,
            layout(),
            land=self.land_all,
        )
        self.under_way: list[AwaitedLoad] = []
        self.told: list[AwaitedLoad] = []
        self.calls = {mode: set(LAYERS) if mode else set() for mode in MODES}
        self.seen: dict[str, set[str]] = {mode: set() for mode in MODES}
        self.number = 0

    def land_all(self) -> None:
        for load in self.under_way:
            for transfer_id in load.waiting:
                if self.device.landed[transfer_id] is not None:
                    self.device.landed[transfer_id] = len(self.parts)

    @rule(is_early=st.booleans())
    def order(self, is_early: bool) -> None:
        self.number += 1
        transfer_id = TransferId(self.number)
        self.device.landed[transfer_id] = None
        load = AwaitedLoad(f"r{self.number}", 0)
        load.waiting[transfer_id], load.is_early = [], is_early
        self.under_way.append(load)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def is_queued(self, data: Any) -> None:
        """All of one is on its way."""
        (transfer_id,) = data.draw(st.sampled_from(self.under_way)).waiting
        if self.device.landed[transfer_id] is None:
            self.device.landed[transfer_id] = 0

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def continues(self, data: Any) -> None:
        """The first comes further; they land in their order, as on one stream."""
        for load in self.under_way:
            (transfer_id,) = load.waiting
            landed = self.device.landed[transfer_id]
            if landed is None:
                return
            if landed < len(self.parts):
                self.device.landed[transfer_id] = data.draw(st.integers(landed, len(self.parts)))
                return

    @precondition(lambda self: self.under_way)
    @rule()
    def ends(self) -> None:
        """The first is over: landed, or failed before it was on its way."""
        load = self.under_way[0]
        (transfer_id,) = load.waiting
        landed = self.device.landed[transfer_id]
        if landed is None or landed == len(self.parts):
            assert landed is not None or not load.is_told
            self.under_way.pop(0)
            self.told = [each for each in self.told if each is not load]
            self.device.landed[transfer_id] = len(self.parts) if landed is not None else None
            self.loads.landed(transfer_id)

    @precondition(lambda self: self.under_way)
    @rule(computes=st.booleans())
    def tell(self, computes: bool) -> None:
        load = self.under_way[0]
        if not self.loads.may_tell(load, computes=computes):
            return
        assert load.is_early
        assert not computes, "the requests of this step would wait for it"
        (transfer_id,) = load.waiting
        assert self.device.landed[transfer_id] is not None
        self.loads.tell(load)
        self.told.append(load)

    @rule(
        mode=st.sampled_from(MODES),
        refuses=st.booleans(),
        silent=st.sampled_from([[], LAYERS[3:5]]),
        tells_late=st.booleans(),
    )
    def forward(self, mode: str, refuses: bool, silent: list[str], tells_late: bool) -> None:
        """A whole step. A mode in which some layers never called may leave out those again."""
        if silent and set(LAYERS) <= self.seen[mode]:
            silent = []
        self.device.refuses = refuses
        self.loads.begin_forward(mode)
        for name in LAYERS:
            self.write(name)
            if mode and name not in silent and self.loads.listens:
                self.loads.before_layer(name)
                self.seen[mode].add(name)
            self.read(name)
            if mode and name not in silent and self.loads.listens:
                self.loads.after_layer(name)
        if tells_late:  # some runners ask what has arrived before they end a step
            self.told_inside()
        self.loads.end_forward()
        self.device.refuses = False

    def told_inside(self) -> None:
        for load in self.under_way[:1]:
            if self.loads.may_tell(load, computes=False):
                self.loads.tell(load)
                self.told.append(load)

    @rule(mode=st.sampled_from(MODES))
    def nothing_is_computed(self, mode: str) -> None:
        """A step that should have had a forward pass, and had none."""
        self.loads.begin_forward(mode)
        self.loads.end_forward()

    def write(self, name: str) -> None:
        """A layer's new KV is written before its attention is called for."""
        self.is_behind(name, "written")

    def read(self, name: str) -> None:
        self.is_behind(name, "read")

    def is_behind(self, name: str, what: str) -> None:
        part = self.parts.last_of(layout(), [f"{name}[0]"])
        for load in self.told:
            (transfer_id,) = load.waiting
            landed = self.device.landed[transfer_id]
            if landed is not None and landed <= part:
                waited = self.device.behind.get(transfer_id, -1)
                assert waited >= part, f"{name} is {what} before part {part} of {load.request_id}"

    @invariant()
    def nobody_listens_between_steps(self) -> None:
        if hasattr(self, "loads"):
            assert not self.loads.listens


Landing.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLanding = Landing.TestCase
