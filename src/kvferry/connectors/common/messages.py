"""Messages between the scheduler side and the ranks, plain and picklable; a guard for each side."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from kvferry.tiers.disk.protocol import DiskFigures
from kvferry.types import Health, Opened, Plan, Rank, Receipt, TierName, TransferId

log = logging.getLogger(__name__)

NO_PLAN = Plan(step=0)


class LoadOrder(NamedTuple):
    """Transfers of a load that this step's plan has, and device blocks that no transfer will fill.

    After the last order and its transfers every rank tells the engine that the load has ended.
    """

    transfers: tuple[TransferId, ...]
    lost: tuple[int, ...] = ()
    is_last: bool = True


@dataclass(frozen=True)
class StepOrders:
    """Scheduler side to every rank: one step's plan.

    ``loads`` has, by request, the loads whose end the ranks report to the engine. ``computes``: the
    step has a forward pass, which its stores must follow. ``drain``: the ranks finish all copies
    before they answer, because the scheduler side is out of service and reads no receipts.
    ``epoch`` changes with every reset. ``is_quiet``: the step only decodes and orders nothing.
    """

    plan: Plan = NO_PLAN
    loads: dict[str, LoadOrder] = field(default_factory=dict)
    computes: bool = False
    drain: bool = False
    epoch: int = 0
    is_quiet: bool = False


@dataclass(frozen=True, eq=False)
class TierShape:
    """One lower tier of a rank; ``num_places`` is None if it finds blocks by key.

    ``opened`` lists the blocks from before a restart, 36 bytes each because there may be millions;
    None while the tier is not open. ``away`` names the disk directories that are not open.
    """

    name: TierName
    num_places: int | None
    opened: Opened | None = None
    away: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankShape:
    """One rank at start: its host slots, blocks and tiers, or the reason why it has none.

    ``tiers`` are nearest first. A rank that ``sees_weights`` notices when the weights change.
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
        """Return the shape without the list of its tiers' blocks, which is sent once, not kept."""
        return replace(self, tiers=tuple([replace(tier, opened=None) for tier in self.tiers]))


@dataclass(frozen=True)
class StepReceipts:
    """Every rank to the scheduler side: receipts and changes since the last step.

    ``ready`` has usable host slots and pinned bytes, where these changed. ``shapes`` are sent once,
    for engines without a handshake. ``drained`` names the ranks that have drained as asked.
    ``stale`` has epochs whose blocks no longer match the model's weights. ``health`` has tiers that
    became unavailable or available; ``disks`` has the drives' figures, once a second.
    """

    receipts: tuple[Receipt, ...] = ()
    ready: tuple[tuple[Rank, int, int], ...] = ()
    shapes: tuple[RankShape, ...] = ()
    drained: tuple[Rank, ...] = ()
    stale: tuple[int, ...] = ()
    health: tuple[Health, ...] = ()
    disks: tuple[tuple[Rank, str, DiskFigures], ...] = ()

    def aggregate(self, other: StepReceipts) -> StepReceipts:
        """Return the receipts of two ranks, or of two groups of ranks, together."""
        names = [each.name for each in fields(self)]
        return StepReceipts(*(getattr(self, name) + getattr(other, name) for name in names))


class Guard:
    """Records whether one side of the connector has failed, and the first reason.

    An exception in kvferry never stops the server: it is logged, and the engine goes on without it.
    """

    def __init__(self, side: str) -> None:
        self._side = side
        self.reason = ""  # empty until it fails

    def trip(self, where: str, error: BaseException) -> None:
        """Take this side out of service; log and keep only the first failure."""
        if not self.reason:
            self.reason = f"{where}: {type(error).__name__}: {error}"
            log.exception(
                "kvferry (%s) failed in %s and is out of service; the engine goes on without it",
                self._side,
                where,
            )
