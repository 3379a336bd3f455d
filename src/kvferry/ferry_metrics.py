"""What a ferry serves over HTTP: its figures, and why a hit is no longer than it is."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from kvferry.metrics.inbox import Inbox
from kvferry.metrics.source import AskedScheduler, Source
from kvferry.rank import RankMemory
from kvferry.scheduler.journal import Copy
from kvferry.types import HOST

if TYPE_CHECKING:
    from kvferry.metrics.endpoint import Endpoint


def open_endpoint(
    scheduler: AskedScheduler, inbox: Inbox, rank: RankMemory, *, host: str, port: int
) -> Endpoint:
    """The server's threads hold what they ask: not the memory, which should go with its ferry."""
    # Imported here: few need a server, and its modules would triple our own import.
    from kvferry.metrics.endpoint import Endpoint

    memory = weakref.ref(rank)
    source = Source(
        scheduler,
        inbox,
        slot_bytes=dict.fromkeys((HOST, *rank.levels), rank.host.tier.slot_bytes),
        pinned_bytes=partial(_pinned_bytes, memory),
        why_path=partial(_why_path, memory),
    )
    return Endpoint(source, host=host, port=port)


def _pinned_bytes(rank: weakref.ref[RankMemory]) -> int | None:
    found = rank()
    return found.host.stats().pinned_bytes if found is not None else None


def _why_path(rank: weakref.ref[RankMemory], copy: Copy) -> str:
    from kvferry.metrics.reasons import why_path  # here: few ask, and it brings the planner

    found = rank()
    return why_path(copy, getattr(found.engine, "choices", None) if found is not None else None)
