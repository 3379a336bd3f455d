"""Load tracking: which requests wait for which transfers, on the scheduler side and on a rank.

Each rank tells the engine when a load's transfers have ended there. The ranks also tell of loads
that could not be ordered at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import Ordered
from kvferry.types import TransferId

_transfer_of = attrgetter("transfer")


class WholeLoad(NamedTuple):
    """A load; if it ``is_early``, its request may run before it lands."""

    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]
    is_early: bool


class PromisedLoads:
    """Loads that the engine waits for and that no rank was told of."""

    def __init__(self) -> None:
        self.whole: dict[Request, WholeLoad] = {}
        self.ended: dict[str, tuple[int, ...]] = {}
        """The device blocks of loads that could not be ordered."""

    def promise(
        self,
        request: Request,
        blocks: tuple[int, ...],
        ordered: Sequence[Ordered],
        *,
        is_early: bool = False,
    ) -> None:
        """The engine counts on ``blocks``; ``ordered`` is what will fill them, or nothing."""
        if ordered:
            self.whole[request] = WholeLoad(tuple(map(_transfer_of, ordered)), blocks, is_early)
        else:
            self.ended[request.id] = blocks

    def take_loads(self) -> tuple[dict[str, tuple[TransferId, ...]], frozenset[str]]:
        """Loads of a step's plan, and the names of those whose requests may run before they land.

        Loads that were cancelled since they were ordered are not among them.
        """
        loads, early = {}, set()
        for request, load in self.whole.items():
            if request.loading.issuperset(load.transfers):
                loads[request.id] = load.transfers
                if load.is_early:
                    early.add(request.id)
        self.whole.clear()
        return loads, frozenset(early)

    def take_ended(self) -> dict[str, tuple[int, ...]]:
        """Loads that could not be ordered: the ranks are to tell the engine. Once for each plan."""
        ended, self.ended = self.ended, {}
        return ended

    @property
    def unkept(self) -> dict[str, tuple[int, ...]]:
        """The device blocks of every load that the engine waits for and no rank was told of."""
        return self.ended | {request.id: load.blocks for request, load in self.whole.items()}


# -- on a rank ----------------------------------------------------------------------------------


@dataclass(eq=False)
class AwaitedLoad:
    """A load on one rank: ends with the last of its ``waiting`` transfers.

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
