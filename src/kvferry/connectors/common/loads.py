"""Load tracking: which requests wait for which transfers, on the scheduler side and on a rank.

A load in one piece ends on the ranks: each tells the engine when its transfers have ended. A load
in pieces, whose last blocks are still being promoted, ends on the scheduler side: it has the
receipts of all ranks, and orders them to tell the engine (:class:`EndedLoad`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from kvferry.connectors.common.messages import EndedLoad
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import Ordered
from kvferry.types import Landing, TransferId

_transfer_of = attrgetter("transfer")


class LoadInPieces:
    """One load whose blocks are ordered as they reach the host. Owns what of it has landed."""

    def __init__(self, request: Request, blocks: tuple[int, ...], epoch: int) -> None:
        self.request = request
        self._blocks = blocks
        self._lost = dict.fromkeys(blocks)
        self._epoch = epoch
        self._ordered: dict[TransferId, list[int]] = {}  # not yet handed to the ranks
        self._sent: dict[TransferId, list[int]] = {}

    def order(self, piece: Ordered) -> None:
        self._ordered[piece.transfer] = piece.blocks.tolist()

    def send(self) -> None:
        """A plan goes to the ranks. Pieces that were cancelled are not in it."""
        loading = self.request.loading
        self._sent |= {id_: b for id_, b in self._ordered.items() if id_ in loading}
        self._ordered.clear()

    def land(self, landing: Landing) -> None:
        for block in self._sent.pop(landing.transfer_id, ()):
            if not landing.reason:
                self._lost.pop(block, None)

    @property
    def has_ended(self) -> bool:
        """Whether no piece of it is under way on any rank, and none will be ordered."""
        return not (self._ordered or self._sent or self.request.has_more_to_load)

    def ended(self) -> EndedLoad:
        return EndedLoad(self._blocks, tuple(self._lost), self._epoch)


class WholeLoad(NamedTuple):
    """A load in one piece; if it ``is_early``, its request may run before it lands."""

    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]
    is_early: bool


class PromisedLoads:
    """Loads that the engine waits for and that no rank was told of, and all loads in pieces."""

    def __init__(self) -> None:
        self.whole: dict[Request, WholeLoad] = {}
        self.pieces: dict[Request, LoadInPieces] = {}
        self.ended: dict[str, EndedLoad] = {}

    def promise(
        self,
        request: Request,
        blocks: tuple[int, ...],
        ordered: Sequence[Ordered],
        *,
        epoch: int,
        is_early: bool = False,
    ) -> None:
        """The engine counts on ``blocks``; ``ordered`` is what will fill them, or nothing."""
        if not ordered:
            self.ended[request.id] = EndedLoad(blocks, blocks, epoch)
        elif request.has_more_to_load:
            self.pieces[request] = LoadInPieces(request, blocks, epoch)
            self.order(ordered)
        else:
            self.whole[request] = WholeLoad(tuple(map(_transfer_of, ordered)), blocks, is_early)

    def order(self, pieces: Iterable[Ordered]) -> None:
        """More pieces were ordered."""
        for piece in pieces:
            self.pieces[piece.request].order(piece)

    def land(self, landed: Iterable[Landing]) -> None:
        """These transfers have ended on every rank."""
        for landing in landed:
            for load in self.pieces.values():
                load.land(landing)

    @property
    def are_ending(self) -> bool:
        """Whether the ranks are about to be told that a load in pieces has ended."""
        return any(load.has_ended for load in self.pieces.values())

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

    def take_ended(self) -> dict[str, EndedLoad]:
        """Loads that the ranks are to tell the engine of. Call it with every plan."""
        for request, load in tuple(self.pieces.items()):
            load.send()
            if load.has_ended:
                del self.pieces[request]
                self.ended[request.id] = load.ended()
        ended, self.ended = self.ended, {}
        return ended

    @property
    def unkept(self) -> dict[str, EndedLoad]:
        """Every load that the engine waits for and no rank was told of, as it stands now."""
        pieces = {request.id: load.ended() for request, load in self.pieces.items()}
        whole = {
            request.id: EndedLoad(load.blocks, load.blocks) for request, load in self.whole.items()
        }
        return self.ended | pieces | whole


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
