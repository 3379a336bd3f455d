"""What the connector's two sides send each other through vLLM: plain data, picklable.

vLLM asks whether these are of its own kinds; the connector says so (``connector.py``), so that
nothing here needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.tiers.disk.figures import DiskFigures
from kvferry.tiers.disk.setup import StoreAt
from kvferry.transfer.planner.choose import PathChoices
from kvferry.types import KEY_BYTES, Health, KeyRows, Plan, Rank, Receipt, TierName, TransferId

NO_PLAN = Plan(step=0)


class EarlyShares(NamedTuple):
    """How much of a load must have landed before vLLM is told, in a step without a forward and in
    one with it.

    Others may run though a step has no forward: asynchronous scheduling leaves some empty.
    """

    at_rest: float
    beside: float


@dataclass(frozen=True)
class StepOrders:
    """Scheduler to every rank: one step's plan.

    ``loads`` says which request waits for which transfers, because vLLM wants to hear of requests.
    ``undone`` are loads that vLLM waits for but that no transfer will bring, with the device blocks
    they were meant for. ``computes`` says that a forward pass belongs to this step: its stores must
    come after that. ``drain`` asks to finish all copies before answering, because the scheduler's
    side is out of service and will read no receipts. ``epoch`` becomes another when everything is
    forgotten: loads are of blocks stored in it. ``is_quiet`` says that this is one of many steps
    that only decode, and that nothing else is in here. ``early`` has the loads of which vLLM may be
    told before they have landed, and how much of each must have. ``going_on`` are the requests of
    whose loads more pieces follow, in later steps: the last is of one that is not among them. Such
    a request in ``undone`` has its load closed, in this step: those blocks of it will not come.
    """

    plan: Plan = NO_PLAN
    loads: dict[str, tuple[TransferId, ...]] = field(default_factory=dict)
    undone: dict[str, tuple[int, ...]] = field(default_factory=dict)
    computes: bool = False
    drain: bool = False
    epoch: int = 0
    is_quiet: bool = False
    early: dict[str, EarlyShares] = field(default_factory=dict)
    going_on: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class TierShape:
    """A tier below one rank's host memory; None where it finds blocks by their keys.

    ``keys`` and ``places`` are what the rank still has there from an earlier life, in the order in
    which it was written: 36 bytes a block, because there may be millions.
    """

    name: TierName
    num_places: int | None
    keys: KeyRows = field(default_factory=lambda: np.empty((0, KEY_BYTES // 8), dtype="<u8"))
    places: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    most_in_one: int = 1
    """How many blocks of a chain it may keep in one object."""
    stores: tuple[StoreAt, ...] = ()
    """Where its blocks lie on disk, if they do."""

    def without_blocks(self) -> TierShape:
        return TierShape(
            self.name, self.num_places, most_in_one=self.most_in_one, stores=self.stores
        )


@dataclass(frozen=True)
class RankShape:
    """One rank at start: how many host slots it has, or why it has none.

    ``choices`` are what it picks copy paths by, where it has several. ``tiers`` lie below its host
    memory, nearest first.
    """

    rank: Rank
    num_slots: int = 0
    ready_slots: int = 0
    slot_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    layout: str = ""
    is_shared: bool = False
    choices: PathChoices | None = None
    tiers: tuple[TierShape, ...] = ()
    refusal: str = ""

    def without_blocks(self) -> RankShape:
        """The same, but for what its tiers still have: that is told once, and not kept."""
        return replace(self, tiers=tuple(tier.without_blocks() for tier in self.tiers))


@dataclass(frozen=True)
class StepReceipts:
    """Every rank to the scheduler: what ended since the last step.

    ``ready`` says how many host slots ranks can use by now, where that has changed, and ``pinned``
    how many bytes of them are registered with the GPU's driver. ``shapes`` come once: not every
    vLLM lets the ranks tell the scheduler's side by handshake. ``drained`` names the ranks that
    were asked to drain and have: a rank with nothing to say is not in the sum at all. ``stale`` are
    epochs whose blocks no longer fit the model's weights. ``health`` tells of tiers that went away
    or came back. ``disks`` has what the drives of a rank did so far, by tier, about once a second.
    """

    receipts: tuple[Receipt, ...] = ()
    ready: tuple[tuple[Rank, int], ...] = ()
    shapes: tuple[RankShape, ...] = ()
    drained: tuple[Rank, ...] = ()
    pinned: tuple[tuple[Rank, int], ...] = ()
    stale: tuple[int, ...] = ()
    health: tuple[Health, ...] = ()
    disks: tuple[tuple[Rank, str, DiskFigures], ...] = ()

    def aggregate(self, other: StepReceipts) -> StepReceipts:
        return StepReceipts(
            self.receipts + other.receipts,
            self.ready + other.ready,
            self.shapes + other.shapes,
            self.drained + other.drained,
            self.pinned + other.pinned,
            self.stale + other.stale,
            self.health + other.health,
            self.disks + other.disks,
        )
