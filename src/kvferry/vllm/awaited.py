"""Requests whose blocks are on their way to a rank: what vLLM waits to hear of, and hears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvferry.types import TransferId
from kvferry.vllm.messages import EarlyShares, StepOrders


@dataclass(eq=False)
class AwaitedLoad:
    """Ends when nothing is waited for. ``blocks`` are the device blocks it brings.

    With ``early`` shares vLLM may be told before it lands: when so much of it has landed. One that
    ``is_open`` waits for more pieces; of one in pieces only the ``lost`` blocks did not come.
    """

    request_id: str
    waiting: set[TransferId]
    epoch: int
    blocks: set[int] = field(default_factory=set)
    failed: bool = False
    early: EarlyShares | None = None
    is_told: bool = False
    is_open: bool = False
    in_pieces: bool = False
    lost: set[int] = field(default_factory=set)
    transfers: frozenset[TransferId] = field(init=False)
    _brought: dict[TransferId, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transfers = frozenset(self.waiting)

    def bring(self, transfer_id: TransferId, blocks: list[int]) -> None:
        """One of its transfers is to fill these blocks."""
        self.blocks.update(blocks)
        if self.in_pieces:
            self._brought[transfer_id] = blocks

    def end(self, transfer_id: TransferId, *, ok: bool) -> bool:
        """One of its transfers has ended; returns whether the load has."""
        self.waiting.discard(transfer_id)
        brought = self._brought.pop(transfer_id, ())
        if not ok:
            self.lose(brought if self.in_pieces else self.blocks)
        return not self.waiting and not self.is_open

    def lose(self, blocks: Iterable[int]) -> None:
        """These blocks of it did not come."""
        self.failed = True
        self.lost.update(blocks)
        self.blocks.update(blocks)


class LoadsInPieces:
    """Owns the loads of which more pieces follow, by request, until they are closed.

    vLLM is told of one when it is closed and nothing of it is on its way, and not before: a rank
    that told twice would let a request run whose blocks another rank still writes.
    """

    def __init__(self) -> None:
        self._open: dict[str, AwaitedLoad] = {}

    def ordered(
        self, request_id: str, ids: Iterable[TransferId], orders: StepOrders
    ) -> AwaitedLoad:
        """These transfers are a load, or one more piece of one."""
        load = self._open.pop(request_id, None)
        if load is None:
            load = AwaitedLoad(request_id, set(ids), orders.epoch)
        else:
            load.waiting.update(ids)
        load.is_open = request_id in orders.going_on
        if load.is_open:
            load.in_pieces = True
            self._open[request_id] = load
        return load

    def close(self, request_id: str, blocks: Iterable[int]) -> AwaitedLoad | None:
        """No more of it follows, and these blocks will not come; None if it is not open."""
        load = self._open.pop(request_id, None)
        if load is not None:
            load.is_open = False
            load.lose(blocks)
        return load

    def give_up(self, orders: StepOrders) -> Iterator[tuple[str, set[int]]]:
        """Nothing of these, or of a step's orders, can be trusted: what to tell vLLM of now.

        Those of which more pieces follow it hears of once they are closed.
        """
        blocks = {t.id: t.dst_slots.tolist() for t in orders.plan.transfers}
        for request_id, ids in orders.loads.items():
            load = self.ordered(request_id, ids, orders)
            load.lose({block for id in ids for block in blocks.get(id, ())})
            if not load.is_open:
                yield request_id, load.blocks
        for load in self._open.values():
            load.waiting.clear()
            load.lose(load.blocks.copy())
        for request_id, undone in orders.undone.items():
            closed = self.close(request_id, undone)
            yield request_id, set(undone) if closed is None else closed.lost


class ToldLoads:
    """What vLLM is told of loads at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests that need not wait any longer, whether their blocks came or not."""
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def fail(self, request_id: str, blocks: Iterable[int]) -> None:
        self.arrived.add(request_id)
        self._failed.add(request_id)
        self._invalid.update(blocks)

    def take_arrived(self) -> set[str]:
        arrived, self.arrived = self.arrived, self.arrived and set()
        return arrived

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, self._failed and set()
        return failed

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, self._invalid and set()
        return invalid
