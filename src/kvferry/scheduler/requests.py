"""The requests in service, and which of them waits for which transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, ValuesView

from kvferry import reach
from kvferry.answers import FailedLoad
from kvferry.scheduler.flight import Flight
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.request import RequestRecord
from kvferry.types import RequestId, TransferId


class Requests:
    """Owns the records and who waits for what; leases, flights and device blocks are others'.

    A load serves one request; what comes up from a lower level may be waited for by several.
    """

    def __init__(self, groups: Sequence[reach.Group], journal: Journal) -> None:
        self._groups = groups
        self._journal = journal
        self._records: dict[RequestId, RequestRecord] = {}
        self._waiting_for: dict[TransferId, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def ids(self) -> tuple[RequestId, ...]:
        return tuple(self._records)

    def records(self) -> ValuesView[RequestRecord]:
        return self._records.values()

    def get(self, request_id: RequestId) -> RequestRecord | None:
        return self._records.get(request_id)

    def record(self, request_id: RequestId) -> RequestRecord:
        """What is remembered of a request; a new one is remembered from now on."""
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = RequestRecord.new(self._groups)
        return record

    def remove(self, request_id: RequestId) -> RequestRecord | None:
        return self._records.pop(request_id, None)

    def wait(self, request_id: RequestId, transfer_ids: Iterable[TransferId]) -> None:
        """The request goes on when these transfers have ended."""
        for transfer_id in transfer_ids:
            self._waiting_for.setdefault(transfer_id, []).append(request_id)

    def stop_waiting(self, request_id: RequestId, record: RequestRecord) -> None:
        loads = record.loading.waiting if record.loading is not None else set()
        for transfer_id in loads | record.promoting:
            others = [other for other in self._waiting_for[transfer_id] if other != request_id]
            if others:
                self._waiting_for[transfer_id] = others
            else:
                del self._waiting_for[transfer_id]
        record.loading = None
        record.promoting = set()
        record.asked = False
        record.promoted = False

    def tell(self, flight: Flight, loaded: list[RequestId], failed: list[FailedLoad]) -> None:
        """Let those who wait for a transfer know that their waiting is over."""
        for request_id in self._waiting_for.pop(flight.transfer.id, ()):
            self._journal.ended(request_id, flight)
            record = self._records[request_id]
            if flight.transfer.id in record.promoting:
                record.promoting.discard(flight.transfer.id)
            else:
                self._tell_loading(request_id, record, flight, loaded, failed)

    def _tell_loading(
        self,
        request_id: RequestId,
        record: RequestRecord,
        flight: Flight,
        loaded: list[RequestId],
        failed: list[FailedLoad],
    ) -> None:
        loading = record.loading
        assert loading is not None
        loading.waiting.discard(flight.transfer.id)
        loading.reason = loading.reason or flight.reason
        if loading.waiting and not loading.reason:
            return
        # The first failure fails the request; what else it waits for lands on its own.
        self.stop_waiting(request_id, record)
        if not loading.reason:
            loaded.append(request_id)
        else:
            match = loading.match
            failed.append(
                FailedLoad(request_id, match.computed_tokens, match.to_load, loading.reason)
            )

    def expire_hits(self, now: float) -> tuple[RequestId, ...]:
        """Let go of hits that nobody took in time; whose they were."""
        expired = []
        for request_id, record in self._records.items():
            if record.hit is not None and record.hit.deadline <= now:
                expired.append(request_id)
                record.let_go()
        return tuple(expired)
