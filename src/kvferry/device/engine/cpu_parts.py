"""Loads of the CPU device that land part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvferry.device.engine.stream import Event, Stream
from kvferry.types import TransferId


class CpuParts:
    """The loads in parts of one engine that are not over: an event for each part."""

    def __init__(self, loads: Stream, compute: Stream | None) -> None:
        """Without a compute stream the caller computes: it is the one to wait."""
        self._loads = loads
        self._compute = compute
        self._marks: dict[TransferId, list[Event]] = {}

    def begin(self, transfer_id: TransferId, parts: Sequence[Callable[[], object]]) -> None:
        """Queue one part after the other; nothing in them can fail."""
        marks = self._marks[transfer_id] = []
        for part in parts:
            self._loads.run(part)
            marks.append(self._loads.record())

    def ended(self, transfer_id: TransferId) -> None:
        self._marks.pop(transfer_id, None)

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """See ``PartwiseEngine``."""
        marks = self._marks.get(transfer_id)
        return None if marks is None else sum(mark.synchronize(0) for mark in marks)

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """See ``PartwiseEngine``."""
        for transfer_id in transfer_ids:
            marks = self._marks.get(transfer_id)
            if marks:
                mark = marks[min(number, len(marks) - 1)]
                self._compute.wait(mark) if self._compute is not None else mark.synchronize()
