"""Where an endpoint gets its answers: one scheduler, asked on its own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.metrics.inbox import Inbox
from kvferry.metrics.reasons import why_path
from kvferry.metrics.request_names import is_of_client
from kvferry.metrics.samples import Snapshot
from kvferry.scheduler.journal import Copy, Entry
from kvferry.scheduler.why import Explanation
from kvferry.stats import SchedulerStats
from kvferry.types import RequestId

if TYPE_CHECKING:
    from kvferry.tiers.disk.status import DiskFigures

WhyPath = Callable[[Copy], str]
"""Why a copy took its path, in words; empty where that is not known here."""


class AskedScheduler(Protocol):
    """What of a scheduler can be asked."""

    def stats(self) -> SchedulerStats: ...

    def journal(self, request_id: RequestId) -> Entry | None: ...

    def recent(self) -> tuple[RequestId, ...]: ...


class Source:
    """Asks a scheduler through its inbox. Owns neither; safe to call from any thread."""

    def __init__(
        self,
        scheduler: AskedScheduler,
        inbox: Inbox,
        *,
        slot_bytes: Mapping[str, int] | None = None,
        pinned_bytes: Callable[[], int | None] = lambda: None,
        why_path: WhyPath = lambda copy: why_path(copy, None),
        disks: Callable[[], Mapping[str, DiskFigures]] = dict,
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._slot_bytes = dict(slot_bytes or {})
        self._pinned_bytes = pinned_bytes
        self._why_path = why_path
        self._disks = disks

    def snapshot(self) -> Snapshot:
        stats = self._inbox.ask(self._scheduler.stats)
        return Snapshot(
            stats,
            installed_version(),
            self._slot_bytes,
            self._pinned_bytes(),
            disks=self._disks(),
        )

    def explain(self, request_id: RequestId) -> dict[str, Any] | None:
        """What is remembered of a request, as plain data; None if nothing is.

        A server tells its users a shorter name than its engine has, and may make several requests
        of one: then it is the latest that ``request_id`` is the client's name of, and ``others``
        names the rest.
        """
        ids = [request_id]
        entry = self._inbox.ask(self._entry, request_id)
        if entry is None:
            every = self._inbox.ask(self._scheduler.recent)
            ids = [found for found in reversed(every) if is_of_client(request_id, found)]
            entry = self._inbox.ask(self._entry, ids[0]) if ids else None
        if entry is None:
            return None
        return {**plain(ids[0], entry, self._why_path), "others": ids[1:]}

    def recent(self, most: int = 50) -> list[dict[str, Any]]:
        """The latest requests and what each of them missed, the latest first."""
        return [
            {
                "request_id": request_id,
                "reason": why.reason.value if why is not None else None,
                "asked_tokens": why.asked_tokens if why is not None else None,
                "host_tokens": why.host_tokens if why is not None else None,
            }
            for request_id, why in self._inbox.ask(self._latest, most)
        ]

    def away(self) -> dict[str, str]:
        """The levels that cannot be used now, and why."""
        ailments = self._inbox.ask(self._scheduler.stats).ailments
        return {level: ailment for level, ailment in ailments.items() if ailment}

    # Run on the engine's thread, so they pick up facts and leave all else to whoever asked.

    def _entry(self, request_id: RequestId) -> Entry | None:
        """A copy: the journal's own goes on changing."""
        entry = self._scheduler.journal(request_id)
        return None if entry is None else replace(entry, copies=entry.copies.copy())

    def _latest(self, most: int) -> list[tuple[RequestId, Explanation | None]]:
        found = []
        for request_id in reversed(self._scheduler.recent()[-most:]):
            entry = self._scheduler.journal(request_id)
            found.append((request_id, entry.explanation if entry is not None else None))
        return found


def plain(request_id: RequestId, entry: Entry, why_path: WhyPath) -> dict[str, Any]:
    """One journal entry, ready for JSON."""
    why = entry.explanation
    return {
        "request_id": request_id,
        "explanation": why.as_dict() if why is not None else None,
        "hints": entry.hints.as_dict() if entry.hints is not None else None,
        "refused": list(entry.refused),
        "overlap": entry.overlap,
        "copies": [{**asdict(copy), "why": why_path(copy)} for copy in entry.copies],
    }


@cache
def installed_version() -> str:
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
