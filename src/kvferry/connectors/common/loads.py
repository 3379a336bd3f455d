"""Load tracking: which requests wait for which transfers, on the scheduler side and on a rank.

A load comes in one piece, or in several while its last blocks are still being promoted. The
scheduler side tells the ranks what brings it, plan by plan, and what nothing will bring. Each rank
tells the engine once all of it has ended there::

    a hit in host memory    LoadOrder(transfers, is_last)
    one that comes up       LoadOrder(transfers), LoadOrder(transfers), LoadOrder(lost, is_last)
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
    """A load that the engine waits for. Owns which of its blocks nothing is known to bring."""

    request: Request
    unfilled: dict[int, None]
    """The blocks of a load in pieces; of a whole one, those whose copies were cancelled."""
    ordered: dict[TransferId, list[int]] = field(default_factory=dict)
    """What will fill blocks and was not yet handed to the ranks."""

    def take(self) -> LoadOrder | None:
        """What the ranks are told with the next plan. Pieces that were cancelled are not in it."""
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
        """The last order: nothing brings what no rank was told of."""
        for blocks in self.ordered.values():
            self.unfilled |= dict.fromkeys(blocks)
        return LoadOrder((), tuple(self.unfilled))


# -- on a rank ----------------------------------------------------------------------------------


@dataclass(eq=False)
class AwaitedLoad:
    """A load on one rank: ends with its last order and the last of its ``waiting`` transfers.

    If it ``is_early``, the engine may be told before it lands, which ``is_told`` notes.
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
        """The scheduler side says what else brings it; ``transfers`` are the plan's."""
        for transfer in transfers:
            if transfer.id in order.transfers:
                self.waiting[transfer.id] = blocks = transfer.dst_slots.tolist()
                self.blocks += blocks
                self.is_early = may_be_early and transfer.in_parts
        self.blocks += order.lost
        self.lost.update(order.lost)
        self.is_last = order.is_last

    def lose(self) -> None:
        """Nothing of it will come."""
        self.lost.update(self.blocks)
        self.waiting.clear()

    @property
    def has_ended(self) -> bool:
        return self.is_last and not self.waiting


class FinishedLoads:
    """What a rank tells the engine of loads at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests that need not wait any longer, whether their blocks came or not."""
        self.failed: set[str] = set()
        self.invalid: set[int] = set()
        """Device blocks that were to be loaded and were not."""

    def end(self, request_id: str, lost: Collection[int]) -> None:
        """A load is over; ``lost`` are blocks that did not come."""
        self.arrived.add(request_id)
        if lost:
            self.failed.add(request_id)
            self.invalid.update(lost)

    def take(self, name: Literal["arrived", "failed", "invalid"]) -> set[Any]:
        """What has come to one of these sets since the last call."""
        taken: set[Any] = getattr(self, name)
        setattr(self, name, set())
        return taken
