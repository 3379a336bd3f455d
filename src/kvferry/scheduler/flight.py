"""Transfers in flight: which ranks have answered, whose time is up, what each one claims.

A transfer ends when every rank has reported. A deadline ends the *waiting* for it, never its
*claim*: a slow rank may still be reading a slot or writing a device block, so both stay claimed
until that rank has answered or is declared lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import InputError, ReceiptError
from kvferry.lease import Lease, Purpose
from kvferry.stats import TrafficCounts
from kvferry.types import DEVICE, HOST, Outcome, Rank, Receipt, Transfer, TransferId


@dataclass(eq=False)
class Flight:
    """One transfer on its way, and the leases it will end.

    ``served`` are the requests it stores or loads for. ``receipts`` are those taken so far.
    """

    transfer: Transfer
    leases: tuple[Lease, ...]
    deadline: float
    waiting: set[Rank]
    reason: str = ""
    overdue: bool = False
    served: tuple[Any, ...] = ()
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def in_doubt(self) -> tuple[Lease, ...]:
        """The leases whose blocks must not be matched if this fails.

        A block that could not be brought up is not offered again: its next owner would fail with
        it. One that could not be sent down is still good where it is.
        """
        upward = self.transfer.dst in (DEVICE, HOST)
        return tuple(lease for lease in self.leases if upward or lease.purpose is Purpose.WRITE)


@dataclass
class FlightCounts:
    """What happened to transfers and receipts so far."""

    launched: int = 0
    landed: int = 0
    failed: int = 0
    overdue: int = 0
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
        self._flying: dict[TransferId, Flight] = {}
        self._lost: dict[Rank, str] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._flying)

    def transfers(self) -> Iterator[Transfer]:
        """The transfers in flight whose time is not up, oldest first.

        Others must not wait for the rest: a rank that hangs would hold up every load and store.
        """
        return (flight.transfer for flight in self._flying.values() if not flight.overdue)

    def new_id(self) -> TransferId:
        self._next_id += 1
        return TransferId(self._next_id - 1)

    def launch(
        self,
        transfer: Transfer,
        leases: tuple[Lease, ...],
        deadline: float,
        served: tuple[Any, ...] = (),
    ) -> None:
        """A transfer is handed to the workers; its leases end when it lands."""
        waiting = {Rank(rank) for rank in range(self._num_ranks)} - self._lost.keys()
        reason = next(iter(self._lost.values()), "")
        self._flying[transfer.id] = Flight(
            transfer, leases, deadline, waiting, reason, served=served
        )
        self.counts.launched += 1

    def settle(self, receipts: Iterable[Receipt]) -> list[Flight]:
        """Take receipts in any order; returns the flights that landed by them.

        A receipt for a transfer that already landed, or a rank's second one, is counted and
        dropped. One that answers nothing we ever sent is refused before any is taken.
        """
        receipts = list(receipts)
        for receipt in receipts:
            self._check(receipt)
        # With every rank lost nobody answers any more: such a flight lands as soon as we look.
        orphans = [f for f in self._flying.values() if not f.waiting]
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
        """Flights whose deadline has just passed. They stay in flight until they land."""
        late = [f for f in self._flying.values() if f.deadline <= now and not f.overdue]
        for flight in late:
            flight.overdue = True
            flight.reason = flight.reason or (
                f"no answer in time from rank {', '.join(map(str, sorted(flight.waiting)))}"
            )
        self.counts.overdue += len(late)
        return late

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
        if not 0 <= receipt.transfer_id < self._next_id:
            raise ReceiptError(
                f"receipt for transfer {receipt.transfer_id}, but only {self._next_id} were ever "
                "sent; drop it and settle the others"
            )
        if not 0 <= receipt.rank < self._num_ranks:
            raise ReceiptError(
                f"receipt for transfer {receipt.transfer_id} from rank {receipt.rank}, but ranks "
                f"are 0 to {self._num_ranks - 1}"
            )

    def _take(self, flight: Flight, receipt: Receipt) -> None:
        flight.waiting.discard(receipt.rank)
        if receipt.outcome is not Outcome.OK:
            flight.reason = flight.reason or (
                f"rank {receipt.rank}: {receipt.reason or 'failed without a reason'}"
            )
        route = (flight.transfer.src, flight.transfer.dst)
        counts = self.counts
        counts.bytes_moved[route] = counts.bytes_moved.get(route, 0) + receipt.num_bytes
        counts.seconds_moved[route] = counts.seconds_moved.get(route, 0.0) + receipt.seconds
        flight.receipts.append(receipt)
        if receipt.outcome is Outcome.OK:
            counts.traffic.add((*route, receipt.path), receipt.num_bytes, receipt.seconds)

    def _land(self, flight: Flight) -> Flight:
        del self._flying[flight.transfer.id]
        self.counts.landed += 1
        self.counts.failed += not flight.ok
        for lease in flight.leases:
            doubtful = not flight.ok and lease in flight.in_doubt
            if lease.purpose is Purpose.WRITE:
                lease.abort() if doubtful else lease.commit()
            else:
                lease.spoil() if doubtful else lease.release()
        return flight
