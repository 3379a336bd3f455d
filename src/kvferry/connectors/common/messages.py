"""What both sides share: the messages between them, plain and picklable, and a guard for each."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from kvferry.tiers.disk.protocol import DiskFigures
from kvferry.types import Health, Opened, Plan, Rank, Receipt, TierName, TransferId

log = logging.getLogger(__name__)

NO_PLAN = Plan(step=0)


class LoadOrder(NamedTuple):
    """What brings a load in this step, and the device blocks that nothing brings.

    After the last order and its transfers every rank tells the engine of the load, once.
    """

    transfers: tuple[TransferId, ...]
    lost: tuple[int, ...] = ()
    is_last: bool = True


@dataclass(frozen=True)
class StepOrders:
    """Scheduler side to every rank: one step's plan.

    ``loads`` are, by request, those whose end the ranks tell the engine. ``computes`` says that a
    forward pass belongs to this step, which its stores must follow. ``drain`` asks the ranks to
    finish all copies before they answer: the scheduler side is out of service and reads no
    receipts. ``epoch`` changes with every reset. ``is_quiet`` marks a step that only decodes and
    orders nothing.
    """

    plan: Plan = NO_PLAN
    loads: dict[str, LoadOrder] = field(default_factory=dict)
    computes: bool = False
    drain: bool = False
    epoch: int = 0
    is_quiet: bool = False


@dataclass(frozen=True, eq=False)
class TierShape:
    """One tier below a rank's host memory; ``num_places`` is None if it finds blocks by key.

    ``opened`` is what the tier has of an earlier life, 36 bytes a block because there may be
    millions; None while it is not open. ``away`` names the directories of a disk that are not.
    """

    name: TierName
    num_places: int | None
    opened: Opened | None = None
    away: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankShape:
    """One rank at start: how many host slots it has, or why it has none.

    ``tiers`` are nearest first. A rank that ``sees_weights`` notices when they change.
    """

    rank: Rank
    num_slots: int = 0
    ready_slots: int = 0
    slot_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    layout: str = ""
    is_shared: bool = False
    tiers: tuple[TierShape, ...] = ()
    refusal: str = ""
    sees_weights: bool = False

    def without_blocks(self) -> RankShape:
        """The same shape without the blocks of its tiers, which are sent once and not kept."""
        return replace(self, tiers=tuple([replace(tier, opened=None) for tier in self.tiers]))


@dataclass(frozen=True)
class StepReceipts:
    """Every rank to the scheduler side: what ended since the last step.

    ``ready`` has usable host slots and pinned bytes, where these changed.
    ``shapes`` are sent once, for engines without a handshake. ``drained`` names the ranks that
    were asked to drain and have. ``stale`` are epochs whose blocks no longer fit the weights.
    ``health`` has tiers that went away or came back; ``disks``, once a second, the drives' figures.
    """

    receipts: tuple[Receipt, ...] = ()
    ready: tuple[tuple[Rank, int, int], ...] = ()
    shapes: tuple[RankShape, ...] = ()
    drained: tuple[Rank, ...] = ()
    stale: tuple[int, ...] = ()
    health: tuple[Health, ...] = ()
    disks: tuple[tuple[Rank, str, DiskFigures], ...] = ()

    def aggregate(self, other: StepReceipts) -> StepReceipts:
        """The receipts of two ranks, or of two groups of ranks, together."""
        names = [each.name for each in fields(self)]
        return StepReceipts(*(getattr(self, name) + getattr(other, name) for name in names))


class Guard:
    """Remembers whether one side of the connector has failed, and the first reason.

    An exception of kvferry never stops the server: it is logged, and the engine goes on alone.
    """

    def __init__(self, side: str) -> None:
        self._side = side
        self.reason = ""  # until it fails

    def trip(self, where: str, error: BaseException) -> None:
        """Go out of service. Only the first failure is logged and kept."""
        if not self.reason:
            self.reason = f"{where}: {type(error).__name__}: {error}"
            log.exception(
                "kvferry (%s) failed in %s and is out of service; the engine goes on without it",
                self._side,
                where,
            )
