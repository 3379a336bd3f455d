"""Transfers in flight: which ranks have answered, whose time is up, what each one claims.

A transfer ends when every rank has reported. Below the host a block has moved when it has on every
rank: positions that failed on any of them are lost, the rest counts.

A deadline ends the *waiting* for a transfer, never its *claim*: a slow rank may still be reading a
slot or writing a device block, so both stay claimed until that rank has answered or is declared
lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError, ReceiptError
from kvferry.lease import Lease, Purpose
from kvferry.stats import TrafficCounts
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
)

_LONG_AGO = float("-inf")
_NEVER = float("inf")


@dataclass(eq=False)
class Flight:
    """One transfer on its way, and the leases it will end; or a question, which has none.

    ``served`` are the requests it stores or loads for. ``receipts`` are those taken so far.
    ``failed`` are the positions lost on any rank, where the others count; ``note`` says why.
    """

    transfer: Transfer | Question
    leases: tuple[Lease, ...]
    deadline: float
    waiting: set[Rank]
    reason: str = ""
    overdue: bool = False
    served: tuple[Any, ...] = ()
    receipts: list[Receipt] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def lost(self) -> npt.NDArray[np.bool_]:
        """For each block, whether it failed on any rank."""
        lost = np.full(len(self.transfer), not self.ok)
        lost[list(self.failed)] = True
        return lost

    @property
    def keeps_the_rest(self) -> bool:
        """Whether one lost block is one lost block; a copy to or from the device is one whole."""
        order = self.transfer
        return isinstance(order, Question) or DEVICE not in (order.src, order.dst)

    def concerns(self, level: TierName) -> bool:
        order = self.transfer
        if isinstance(order, Question):
            return order.level == level
        return level in (order.src, order.dst)

    @property
    def in_doubt(self) -> tuple[Lease, ...]:
        """The leases whose blocks must not be matched if this fails.

        A block that could not be brought up is not offered again: its next owner would fail with
        it. One that could not be sent down is still good where it is.
        """
        order = self.transfer
        upward = isinstance(order, Transfer) and order.dst in (DEVICE, HOST)
        return tuple(lease for lease in self.leases if upward or lease.purpose is Purpose.WRITE)


@dataclass
class FlightCounts:
    """What happened to transfers and receipts so far."""

    launched: int = 0
    landed: int = 0
    failed: int = 0
    overdue: int = 0
    lost_blocks: int = 0
    stale_receipts: int = 0
    bytes_moved: dict[tuple[str, str], int] = field(default_factory=dict)
    seconds_moved: dict[tuple[str, str], float] = field(default_factory=dict)
    traffic: TrafficCounts = field(default_factory=TrafficCounts)

    def moved(self, src: str, dst: str) -> tuple[int, float]:
        """Bytes and seconds so far on one route."""
        return self.bytes_moved.get((src, dst), 0), self.seconds_moved.get((src, dst), 0.0)


class Flights:
    """All transfers in flight. Owns their leases from launch to landing; knows no requests."""

    def __init__(self, num_ranks: int) -> None:
        self.counts = FlightCounts()
        self._num_ranks = num_ranks
        self._ranks = frozenset(map(Rank, range(num_ranks)))
        self.next_deadline = _NEVER
        """Before that nobody is late: :meth:`expire` finds nothing."""
        self._flying: dict[TransferId, Flight] = {}
        self._lost: dict[Rank, str] = {}
        self._num_sent = 0
        self.new_id = cast(Callable[[], TransferId], itertools.count().__next__)
        """The id of the next transfer."""

    def __len__(self) -> int:
        return len(self._flying)

    def transfers(self) -> Iterator[Transfer]:
        """The transfers in flight whose time is not up, oldest first.

        Others must not wait for the rest: a rank that hangs would hold up every load and store.
        """
        return (
            flight.transfer
            for flight in self._flying.values()
            if not flight.overdue and isinstance(flight.transfer, Transfer)
        )

    @property
    def num_awaited(self) -> int:
        """Transfers and questions in flight whose time is not up."""
        return sum(not flight.overdue for flight in self._flying.values())

    def launch(
        self,
        transfer: Transfer | Question,
        leases: tuple[Lease, ...],
        deadline: float,
        served: tuple[Any, ...] = (),
    ) -> None:
        """A transfer or question is handed to the workers; its leases end when it lands."""
        waiting, reason = set(self._ranks), ""
        if self._lost:
            waiting -= self._lost.keys()
            reason = next(iter(self._lost.values()))
        self._flying[transfer.id] = Flight(
            transfer, leases, deadline, waiting, reason, served=served
        )
        self._num_sent = max(self._num_sent, transfer.id + 1)
        self.next_deadline = min(self.next_deadline, deadline)
        self.counts.launched += isinstance(transfer, Transfer)

    def settle(self, receipts: Iterable[Receipt]) -> list[Flight]:
        """Take receipts in any order; returns the flights that landed by them.

        A receipt for a transfer that already landed, or a rank's second one, is counted and
        dropped. One that answers nothing we ever sent is refused before any is taken.
        """
        receipts = list(receipts)
        for receipt in receipts:
            if (
                receipt.failed
                or receipt.rank not in self._ranks
                or not (0 <= receipt.transfer_id < self._num_sent)
            ):
                self._check(receipt)
        landed = []
        if self._lost:
            # With every rank lost nobody answers any more: such a flight lands as soon as we look.
            orphans = [flight for flight in self._flying.values() if not flight.waiting]
            landed = [self._land(flight) for flight in orphans]
        for receipt in receipts:
            flight = self._flying.get(receipt.transfer_id)
            if flight is None or receipt.rank not in flight.waiting:
                self.counts.stale_receipts += 1
                continue
            self._take(flight, receipt)
            if not flight.waiting:
                landed.append(self._land(flight))
        return landed

    def expire(self, now: float) -> list[Flight]:
        """Flights whose deadline has just passed. They stay in flight until they land.

        But a question, which claims nothing, is over: an answer to it comes too late.
        """
        late = [f for f in self._flying.values() if f.deadline <= now and not f.overdue]
        coming = [f.deadline for f in self._flying.values() if f.deadline > now]
        self.next_deadline = min(coming, default=_NEVER)
        for flight in late:
            flight.overdue = True
            flight.reason = flight.reason or (
                f"no answer in time from rank {', '.join(map(str, sorted(flight.waiting)))}"
            )
            if isinstance(flight.transfer, Question):
                del self._flying[flight.transfer.id]
            else:
                self.counts.overdue += 1
        return late

    def give_up(self, level: TierName, reason: str) -> None:
        """A level is away: nobody waits any longer for what it was to bring, take or say."""
        for flight in self._flying.values():
            if flight.concerns(level) and not flight.overdue:
                flight.deadline = self.next_deadline = _LONG_AGO
                flight.reason = flight.reason or reason

    def disown(self, request: Any) -> None:
        """Nobody vouches for what is stored of a request: it stays claimed, but is never found."""
        for flight in self._flying.values():
            order = flight.transfer
            if request in flight.served and isinstance(order, Transfer) and order.src == DEVICE:
                for lease in flight.leases:
                    lease.disown()

    def lose_rank(self, rank: Rank, reason: str) -> list[Flight]:
        """A rank is gone and touches nothing any more; returns the flights that landed by it."""
        if not 0 <= rank < self._num_ranks:
            raise InputError(f"rank {rank} cannot be lost; ranks are 0 to {self._num_ranks - 1}")
        self._lost[rank] = reason or f"rank {rank} was lost"
        reason = self._lost[rank]
        landed = []
        for flight in list(self._flying.values()):
            if rank in flight.waiting:
                flight.waiting.discard(rank)
                flight.reason = flight.reason or reason
                if not flight.waiting:
                    landed.append(self._land(flight))
        return landed

    def abandon(self, reason: str) -> list[Flight]:
        """End every flight as failed. Only safe once no worker touches memory any more."""
        flights = list(self._flying.values())
        for flight in flights:
            flight.reason = flight.reason or reason
            self._land(flight)
        return flights

    def _check(self, receipt: Receipt) -> None:
        if not 0 <= receipt.transfer_id < self._num_sent:
            raise ReceiptError(
                f"receipt for transfer {receipt.transfer_id}, but only {self._num_sent} were ever "
                "sent; drop it and settle the others"
            )
        flight = self._flying.get(receipt.transfer_id)
        if receipt.failed and flight is not None:
            least, most = min(receipt.failed), max(receipt.failed)
            if least < 0 or most >= len(flight.transfer):
                raise ReceiptError(
                    f"receipt for transfer {receipt.transfer_id} says that blocks {least} to "
                    f"{most} failed, but it has {len(flight.transfer)}"
                )
        if not 0 <= receipt.rank < self._num_ranks:
            raise ReceiptError(
                f"receipt for transfer {receipt.transfer_id} from rank {receipt.rank}, but ranks "
                f"are 0 to {self._num_ranks - 1}"
            )

    def _take(self, flight: Flight, receipt: Receipt) -> None:
        flight.waiting.discard(receipt.rank)
        flight.receipts.append(receipt)
        if receipt.outcome is not Outcome.OK:
            reason = f"rank {receipt.rank}: {receipt.reason or 'failed without a reason'}"
            if receipt.outcome is Outcome.PARTIAL and flight.keeps_the_rest:
                flight.failed.update(receipt.failed)
                flight.note = flight.note or reason
            else:
                flight.reason = flight.reason or reason
        transfer, counts = flight.transfer, self.counts
        if isinstance(transfer, Question):
            return
        route = (transfer.src, transfer.dst)
        counts.bytes_moved[route] = counts.bytes_moved.get(route, 0) + receipt.num_bytes
        counts.seconds_moved[route] = counts.seconds_moved.get(route, 0.0) + receipt.seconds
        if receipt.outcome is not Outcome.FAILED:
            counts.traffic.add((*route, receipt.path), receipt.num_bytes, receipt.seconds)

    def _land(self, flight: Flight) -> Flight:
        del self._flying[flight.transfer.id]
        if flight.failed and len(flight.failed) == len(flight.transfer):
            flight.reason = flight.reason or flight.note
        if isinstance(flight.transfer, Transfer):
            self.counts.landed += 1
            self.counts.failed += bool(flight.reason)
            self.counts.lost_blocks += len(flight.failed) if not flight.reason else 0
        if flight.failed or flight.reason:
            self._end_in_doubt(flight)
            return flight
        for lease in flight.leases:
            lease.commit() if lease.purpose is Purpose.WRITE else lease.release()
        return flight

    def _end_in_doubt(self, flight: Flight) -> None:
        failed, doubtful = sorted(flight.failed), flight.in_doubt
        for lease in flight.leases:
            if lease.purpose is Purpose.WRITE:
                lease.commit(failed) if flight.ok else lease.abort()
            elif lease not in doubtful:
                lease.release()
            else:
                lease.release(failed) if flight.ok else lease.spoil()
