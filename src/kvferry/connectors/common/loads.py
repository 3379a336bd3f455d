"""Load tracking: which requests wait for which transfers, on the scheduler side and on a rank.

A load in one piece ends on the ranks: each tells the engine when its transfers have ended. A load
in pieces, whose last blocks are still being promoted, ends on the scheduler side: it has the
receipts of all ranks, and orders them to tell the engine (:class:`EndedLoad`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.common.messages import EndedLoad, StepOrders
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import Ordered
from kvferry.types import Landing, Plan, TransferId


@dataclass(eq=False)
class PromisedLoad:
    """One load that the engine counts on. Owns what of it was ordered, sent, and has landed.

    ``ordered`` transfers, with their device blocks, are not yet handed to the ranks; ``lost`` are
    the ``blocks`` that have not landed. If it ``is_early``, its request may run before it lands.
    """

    request: Request
    blocks: tuple[int, ...]
    ordered: dict[TransferId, list[int]]
    lost: dict[int, None]
    epoch: int
    is_early: bool
    is_in_pieces: bool
    sent: dict[TransferId, list[int]] = field(default_factory=dict)

    def land(self, landing: Landing) -> None:
        for block in self.sent.pop(landing.transfer_id, ()):
            if not landing.reason:
                self.lost.pop(block, None)

    @property
    def has_ended(self) -> bool:
        """Whether no piece of it is under way on any rank, and none will be ordered."""
        return not (self.ordered or self.sent or self.request.has_more_to_load)

    def ended(self) -> EndedLoad:
        return EndedLoad(self.blocks, tuple(self.lost), self.epoch)


class PromisedLoads:
    """Loads that the engine waits for and that no rank was told of, and all loads in pieces."""

    def __init__(self) -> None:
        self.loads: dict[Request, PromisedLoad] = {}

    def promise(
        self,
        request: Request,
        blocks: tuple[int, ...],
        ordered: Iterable[Ordered],
        *,
        epoch: int,
        is_early: bool = False,
    ) -> None:
        """The engine counts on ``blocks``; ``ordered`` is what will fill them, or nothing."""
        self.loads[request] = PromisedLoad(
            request,
            blocks,
            {piece.transfer: piece.blocks.tolist() for piece in ordered},
            dict.fromkeys(blocks),
            epoch,
            is_early,
            request.has_more_to_load,
        )

    def order(self, pieces: Iterable[Ordered]) -> None:
        """More pieces were ordered."""
        for piece in pieces:
            self.loads[piece.request].ordered[piece.transfer] = piece.blocks.tolist()

    def land(self, landed: Iterable[Landing]) -> None:
        """These transfers have ended on every rank."""
        for landing in landed:
            for load in self.loads.values():
                load.land(landing)

    @property
    def are_ending(self) -> bool:
        """Whether the ranks are about to be told that a load in pieces has ended."""
        return any(load.is_in_pieces and load.has_ended for load in self.loads.values())

    def orders(self, plan: Plan, **facts: Any) -> StepOrders:
        """The orders of a step: loads whose end the ranks tell, and loads that have ended.

        Loads that were cancelled since they were ordered are not among them.
        """
        loads, ended, early = {}, {}, set()
        for request, load in tuple(self.loads.items()):
            ordered, load.ordered = load.ordered, {}
            if ordered and not load.is_in_pieces:
                if request.loading.issuperset(ordered):
                    loads[request.id] = tuple(ordered)
                    if load.is_early:
                        early.add(request.id)
                del self.loads[request]
                continue
            for each, blocks in ordered.items():
                if each in request.loading:
                    load.sent[each] = blocks
            if load.has_ended:
                ended[request.id] = load.ended()
                del self.loads[request]
        return StepOrders(plan, loads, ended, early=frozenset(early), **facts)

    @property
    def unkept(self) -> dict[str, EndedLoad]:
        """Every load that the engine waits for and no rank was told of, as it stands now."""
        return {request.id: load.ended() for request, load in self.loads.items()}


# -- on a rank ----------------------------------------------------------------------------------


@dataclass(eq=False)
class AwaitedLoad:
    """A load in one piece on one rank: ends with the last of its ``waiting`` transfers.

    If it ``is_early``, the engine may be told before it lands, which ``is_told`` notes.
    """

    request_id: str
    waiting: set[TransferId]
    epoch: int
    is_early: bool = False
    blocks: list[int] = field(default_factory=list)
    failed: bool = False
    is_told: bool = False
    transfers: tuple[TransferId, ...] = ()


class FinishedLoads:
    """What a rank tells the engine of loads at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests that need not wait any longer, whether their blocks came or not."""
        self.failed: set[str] = set()
        self.invalid: set[int] = set()
        """Device blocks that were to be loaded and were not."""

    def fail(self, request_id: str, blocks: Iterable[int]) -> None:
        self.arrived.add(request_id)
        self.failed.add(request_id)
        self.invalid.update(blocks)

    def take_arrived(self) -> set[str]:
        arrived, self.arrived = self.arrived, set()
        return arrived

    def take_failed(self) -> set[str]:
        failed, self.failed = self.failed, set()
        return failed

    def take_invalid(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid
