"""Load tracking: which requests wait for which transfers, on the scheduler side and on a rank.

A load is one piece, or several while its last blocks are still being promoted. With each plan the
scheduler side tells the ranks which transfers belong to a load, and which blocks none will fill.
Each rank tells the engine once the whole load has ended there::

    a hit in host memory    LoadOrder(transfers, is_last)
    a hit being promoted    LoadOrder(transfers), LoadOrder(transfers), LoadOrder(lost, is_last)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvferry.connectors.common.messages import LoadOrder
from kvferry.scheduler.request import Request
from kvferry.types import Transfer, TransferId


@dataclass(eq=False)
class PromisedLoad:
    """A load that the engine waits for. Owns the list of its blocks that no transfer fills yet."""

    request: Request
    unfilled: dict[int, None]
    """Device blocks without a transfer: not ordered so far, or their transfer was cancelled."""
    ordered: dict[TransferId, list[int]] = field(default_factory=dict)
    """Transfers that the ranks do not know yet, each with the device blocks that it fills."""

    def take(self) -> LoadOrder | None:
        """Return the next plan's order, without cancelled transfers; None if there is none."""
        sent = []
        for transfer_id, blocks in self.ordered.items():
            if transfer_id in self.request.loading:
                sent.append(transfer_id)
                for block in blocks:
                    self.unfilled.pop(block, None)
            else:
                self.unfilled |= dict.fromkeys(blocks)
        self.ordered.clear()
        if not self.request.has_more_to_load:
            return LoadOrder(tuple(sent), tuple(self.unfilled))
        return LoadOrder(tuple(sent), is_last=False) if sent else None

    def give_up(self) -> LoadOrder:
        """Return the load's last order: blocks of transfers that no rank knows count as lost."""
        for blocks in self.ordered.values():
            self.unfilled |= dict.fromkeys(blocks)
        return LoadOrder((), tuple(self.unfilled))


# -- on a rank ----------------------------------------------------------------------------------


@dataclass(eq=False)
class AwaitedLoad:
    """A load on one rank: ends with its last order and the last of its ``waiting`` transfers.

    If it ``is_early``, the engine may be told before it has landed; ``is_told`` once that happened.
    """

    request_id: str
    epoch: int
    waiting: dict[TransferId, list[int]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    reason: str = ""
    is_last: bool = False
    is_early: bool = False
    is_told: bool = False

    def note(self, order: LoadOrder, transfers: Iterable[Transfer], *, may_be_early: bool) -> None:
        """Add an order of the scheduler side; ``transfers`` are all those of its plan."""
        for transfer in transfers:
            if transfer.id in order.transfers:
                self.waiting[transfer.id] = blocks = transfer.dst_slots.tolist()
                self.blocks += blocks
                self.is_early = may_be_early and transfer.in_parts
        self.blocks += order.lost
        self.lost.update(order.lost)
        self.is_last = order.is_last

    def lose(self) -> None:
        """Count all of the load's blocks as lost."""
        self.lost.update(self.blocks)
        self.waiting.clear()

    @property
    def has_ended(self) -> bool:
        return self.is_last and not self.waiting


class FinishedLoads:
    """Loads whose end a rank reports to the engine at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests whose load has ended, well or not."""
        self.failed: set[str] = set()
        self.invalid: set[int] = set()
        """Device blocks whose load failed."""

    def end(self, request_id: str, lost: Collection[int]) -> None:
        """Note that a request's load has ended; ``lost`` are the blocks that were not filled."""
        self.arrived.add(request_id)
        if lost:
            self.failed.add(request_id)
            self.invalid.update(lost)

    def take(self, name: Literal["arrived", "failed", "invalid"]) -> set[Any]:
        """Return the contents of one of these sets, and empty it."""
        taken: set[Any] = getattr(self, name)
        setattr(self, name, set())
        return taken
