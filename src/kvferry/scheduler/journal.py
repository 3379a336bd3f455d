"""The last requests and what was copied for them: a memory with a bound, for whoever asks why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.hints import Hints
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
        num_bytes, seconds, num_runs, beside_model = 0, 0.0, 1, False
        paths = set()
        for receipt in flight.receipts:  # one for each rank
            num_bytes += receipt.num_bytes
            seconds = max(seconds, receipt.seconds)
            num_runs = max(num_runs, receipt.num_runs)
            beside_model |= receipt.beside_model
            paths.add(receipt.path)
        paths.discard("")
        return cls(
            transfer_id=transfer.id,
            src=transfer.src,
            dst=transfer.dst,
            group=transfer.group,
            num_blocks=max(len(transfer.src_slots), len(transfer.dst_slots)),
            num_bytes=num_bytes,
            seconds=seconds,
            paths=tuple(sorted(paths)),
            reason=flight.reason or flight.note,
            beside_model=beside_model,
            num_runs=num_runs,
        )


@dataclass(slots=True)
class Entry:
    """What is remembered of one request."""

    explanation: Explanation | None = None
    hints: Hints | None = None
    refused: tuple[str, ...] = ()
    """What of the hints could not be heeded, and why."""
    overlap: str = ""
    """How its load went together with the forward pass, where somebody decided that."""
    copies: list[Copy] = field(default_factory=list)


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
            self._entries[explanation.request_id] = Entry(explanation)
            if len(self._entries) > MOST_REQUESTS:
                self._entries.popitem(last=False)
        else:
            self._touch(explanation.request_id).explanation = explanation

    def ended(self, request_id: RequestId, flight: Flight) -> None:
        """A transfer ended that moved blocks of this request, or it waits no longer for it."""
        if isinstance(flight.transfer, Transfer):  # a question copies nothing
            copy = Copy.of(flight, flight.transfer)
            copies = self._touch(request_id).copies
            copies.append(copy)
            del copies[:-MOST_COPIES]

    def wished(self, request_id: RequestId, hints: Hints, refused: Sequence[str]) -> None:
        """Something was said of a request's blocks, and this could not be heeded."""
        entry = self._touch(request_id)
        entry.hints, entry.refused = hints, tuple(refused)

    def overlapped(self, request_id: RequestId, words: str) -> None:
        """It was decided how a request's load goes together with the forward pass."""
        self._touch(request_id).overlap = words

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
