"""What becomes of transfers that have ended, or whose time is up, and of the blocks they used.

::

    landed ──┬─> its leases end, its device blocks are the engine's again
             └─> requests that wait for it go on
    overdue ───> requests that wait for it go on without; its memory is still the ranks'
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import reach
from kvferry.answers import DeviceBlocks, Landing, Match
from kvferry.scheduler.flight import Flight
from kvferry.scheduler.orders import Ordered
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.request import Request
from kvferry.scheduler.settled import FailedLoad, Settled
from kvferry.types import DEVICE, Question, Transfer


class Settling:
    """Tells requests and the engine what ended. Owns nothing but its way of telling."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._flights = parts.flights
        self._transit = parts.transit

    def report(self, landed: Sequence[Flight], now: float, *, looks: bool = True) -> Settled:
        """What changed for the engine, by these and, if it ``looks`` at that, by the time."""
        parts = self._parts
        loaded: list[Request] = []
        failed: list[FailedLoad] = []
        landings: list[Landing] = []
        num_bytes, seconds = 0, 0.0
        for flight in landed:
            transfer = flight.transfer
            landings.append(Landing(transfer.id, flight.reason))
            if isinstance(transfer, Question):
                self._end_move(flight)
            elif transfer.dst == DEVICE:
                for receipt in flight.receipts:
                    num_bytes += receipt.num_bytes
                    seconds += receipt.seconds
                self._end_load(flight, transfer, loaded, failed)
            elif transfer.src == DEVICE:
                self._end_store(flight, transfer)
            else:
                self._end_move(flight)
        if num_bytes:
            parts.hits.worth.note_load(num_bytes, seconds)
        if looks and now >= self._flights.next_deadline:
            for flight in self._flights.expire(now):
                self._give_up(flight, loaded, failed)
        ordered = self._load_on(loaded, failed) if parts.coming else ()
        expired = self._expire_hits(now) if parts.pinned else ()
        released = tuple(parts.released)
        parts.released.clear()
        return Settled(tuple(loaded), tuple(failed), released, tuple(landings), expired, ordered)

    def _end_load(
        self,
        flight: Flight,
        transfer: Transfer,
        loaded: list[Request],
        failed: list[FailedLoad],
    ) -> None:
        self._parts.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
        if not flight.overdue:
            self._stop_counting(flight, transfer)
            self._tell(flight, loaded, failed)

    def _end_store(self, flight: Flight, transfer: Transfer) -> None:
        parts = self._parts
        parts.released.append(DeviceBlocks(transfer.group, transfer.src_slots))
        if not flight.overdue:
            self._transit.store(transfer.group, -len(transfer.src_slots))
        for request in flight.served:
            parts.journal.ended(request.id, flight)
            if request.hints is not None:
                request.num_storing -= 1
                if not request.num_storing:
                    request.stored()
        if parts.lower.levels and not flight.reason:
            self._write_through(flight, transfer.group)

    def _end_move(self, flight: Flight) -> None:
        brought = self._parts.lower.landed(flight)
        if brought is not None:
            level, num_bytes, seconds = brought
            self._parts.hits.worth.note_load(num_bytes, seconds, level)
        for request in self._parts.waits.take(flight.transfer.id):
            request.came(flight)

    def _give_up(self, flight: Flight, loaded: list[Request], failed: list[FailedLoad]) -> None:
        """Its time is up: nobody waits for it any longer. What it claims stays claimed."""
        transfer = flight.transfer
        if isinstance(transfer, Question):
            self._end_move(flight)
        elif transfer.dst == DEVICE:
            self._stop_counting(flight, transfer)
            self._tell(flight, loaded, failed)
        elif transfer.src == DEVICE:
            self._transit.store(transfer.group, -len(transfer.src_slots))
        else:
            self._parts.lower.overdue(flight)
            for request in self._parts.waits.take(transfer.id):
                request.came(flight)
        for lease in flight.in_doubt:
            lease.disown()

    def _stop_counting(self, flight: Flight, transfer: Transfer) -> None:
        self._transit.load(transfer.group, -len(transfer.dst_slots))
        for lease in flight.leases:
            self._parts.hits.ended(lease)

    def _tell(self, flight: Flight, loaded: list[Request], failed: list[FailedLoad]) -> None:
        (request,) = flight.served
        ended = request.landed(flight)
        if ended is not None:
            promised, reason = ended
            self._ended(request, promised, reason, loaded, failed)

    def _ended(
        self,
        request: Request,
        promised: Match,
        reason: str,
        loaded: list[Request],
        failed: list[FailedLoad],
    ) -> None:
        if reason:
            failed.append(FailedLoad(request, promised.computed_tokens, promised.to_load, reason))
        else:
            loaded.append(request)

    def _load_on(self, loaded: list[Request], failed: list[FailedLoad]) -> tuple[Ordered, ...]:
        """Order more of loads in pieces, before another request asks for the same blocks."""
        ordered, ended = self._parts.coming.advance()
        for request, promised, reason in ended:
            self._ended(request, promised, reason, loaded, failed)
        return tuple(ordered)

    def _write_through(self, flight: Flight, group: int) -> None:
        # Lazy stores come from anywhere; eager ones follow each other where every key is needed.
        parts = self._parts
        full = isinstance(parts.matcher.groups[group], reach.FullAttention)
        chained = full and not parts.stores.is_lazy
        for lease in flight.leases:
            parent = parts.pool.key_before(lease) if chained else None
            parts.lower.write_through(parts.pool.keys_of(lease), parent=parent, chained=chained)

    def _expire_hits(self, now: float) -> tuple[Request, ...]:
        """Let go of hits that nobody took in time; whose they were."""
        expired = [request for request in tuple(self._parts.pinned) if request.expire(now)]
        self._parts.accounts.counts.expired_hits += len(expired)
        return tuple(expired)
