"""What becomes of transfers that have ended, or whose time is up, and of the blocks they used.

::

    landed ──┬─> its leases end, its device blocks are the engine's again
             └─> requests that wait for it go on
    overdue ───> requests that wait for it go on without; its memory is still the ranks'
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import reach
from kvferry.answers import DeviceBlocks, FailedLoad, Landing, Settled
from kvferry.pool import Pool
from kvferry.scheduler.flight import Flight, Flights
from kvferry.scheduler.hits import Hits
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.outbox import LoadOrder
from kvferry.scheduler.requests import Requests
from kvferry.types import DEVICE, Question, RequestId


class Landings:
    """Owns the device blocks that nobody copies any more until the engine is told of them."""

    def __init__(
        self,
        groups: Sequence[reach.Group],
        pool: Pool,
        flights: Flights,
        hits: Hits,
        lower: LowerLevels,
        requests: Requests,
        journal: Journal,
        *,
        stores_in_order: bool,
    ) -> None:
        """``stores_in_order`` says that a store goes on where the one before it ended."""
        self._groups = groups
        self._pool = pool
        self._flights = flights
        self._hits = hits
        self._lower = lower
        self._requests = requests
        self._journal = journal
        self._stores_in_order = stores_in_order
        self._released: list[DeviceBlocks] = []

    @property
    def has_released(self) -> bool:
        return bool(self._released)

    def cancel(self, load: LoadOrder) -> None:
        """A load that no rank has heard of is not wanted any more."""
        self._hits.ended(load.lease)
        self._released.append(DeviceBlocks(load.transfer.group, load.transfer.dst_slots))

    def report(self, landed: Sequence[Flight], now: float) -> Settled:
        """What changed for the engine, by these and by the time."""
        loaded: list[RequestId] = []
        failed: list[FailedLoad] = []
        for flight in landed:
            self._release(flight)
            self._requests.tell(flight, loaded, failed)
        for flight in self._flights.expire(now):
            self._requests.tell(flight, loaded, failed)
            self._lower.overdue(flight)
            for lease in flight.in_doubt:
                lease.disown()
        expired = self._requests.expire_hits(now)
        released, self._released = tuple(self._released), []
        landings = tuple(Landing(flight.transfer.id, flight.reason) for flight in landed)
        return Settled(tuple(loaded), tuple(failed), released, landings, expired)

    def _release(self, flight: Flight) -> None:
        """No rank touches this transfer's memory any more."""
        transfer = flight.transfer
        for request_id in flight.served:
            self._journal.ended(request_id, flight)
        if isinstance(transfer, Question):
            self._lower.landed(flight)
        elif transfer.dst == DEVICE:
            self._released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
            for lease in flight.leases:
                self._hits.ended(lease)
        elif transfer.src == DEVICE:
            self._released.append(DeviceBlocks(transfer.group, transfer.src_slots))
            if flight.ok and self._lower:
                self._write_through(flight, transfer.group)
        else:
            self._lower.landed(flight)

    def _write_through(self, flight: Flight, group: int) -> None:
        # Lazy stores come from anywhere; eager ones follow each other where every key is needed.
        full = isinstance(self._groups[group], reach.FullAttention)
        chained = full and self._stores_in_order
        for lease in flight.leases:
            parent = self._pool.key_before(lease) if chained else None
            self._lower.write_through(self._pool.keys_of(lease), parent=parent, chained=chained)
