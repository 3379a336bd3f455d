"""The last requests and what was copied for them: a memory with a bound, for whoever asks why."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.scheduler.flight import Flight
from kvferry.scheduler.why import Explanation
from kvferry.types import RequestId, Transfer

MOST_REQUESTS = 1024
MOST_COPIES = 32
"""Of one request; a long one stores a little in many steps, and its last copies tell enough."""


@dataclass(frozen=True)
class Copy:
    """One transfer that ended for a request (a store may have carried others' blocks too).

    Bytes are summed over ranks, seconds are the slowest rank's. ``paths`` are those the ranks took,
    ``beside_model`` says that a rank chose its own while the model ran, ``num_runs`` in how many
    pieces the host slots lay for it.
    """

    transfer_id: int
    src: str
    dst: str
    group: int
    num_blocks: int
    num_bytes: int
    seconds: float
    paths: tuple[str, ...]
    reason: str = ""
    beside_model: bool = False
    num_runs: int = 1

    @classmethod
    def of(cls, flight: Flight, transfer: Transfer) -> Copy:
        receipts = flight.receipts
        return cls(
            transfer_id=transfer.id,
            src=transfer.src,
            dst=transfer.dst,
            group=transfer.group,
            num_blocks=len(transfer),
            num_bytes=sum(receipt.num_bytes for receipt in receipts),
            seconds=max((receipt.seconds for receipt in receipts), default=0.0),
            paths=tuple(sorted({receipt.path for receipt in receipts if receipt.path})),
            reason=flight.reason or flight.note,
            beside_model=any(receipt.beside_model for receipt in receipts),
            num_runs=max((receipt.num_runs for receipt in receipts), default=1),
        )


@dataclass
class Entry:
    """What is remembered of one request."""

    explanation: Explanation | None = None
    copies: deque[Copy] = field(default_factory=lambda: deque(maxlen=MOST_COPIES))


class Journal:
    """Remembers the latest requests; the one longest untouched is forgotten first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[RequestId, Entry] = OrderedDict()

    def explained(self, explanation: Explanation, *, is_new: bool) -> None:
        """A request was looked up; this replaces what was said about it before.

        Where it ``is_new``, what another of the same name did is forgotten as well.
        """
        if is_new:
            self._entries.pop(explanation.request_id, None)
        self._touch(explanation.request_id).explanation = explanation

    def ended(self, request_id: RequestId, flight: Flight) -> None:
        """A transfer ended that moved blocks of this request, or it waits no longer for it."""
        if isinstance(flight.transfer, Transfer):  # a question copies nothing
            self._touch(request_id).copies.append(Copy.of(flight, flight.transfer))

    def entry(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """All that are remembered, the latest last."""
        return tuple(self._entries)

    def _touch(self, request_id: RequestId) -> Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = Entry()
            if len(self._entries) > MOST_REQUESTS:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(request_id)
        return entry
