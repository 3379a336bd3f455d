"""The source of an engine whose two halves are in one process."""

from __future__ import annotations

import weakref
from functools import partial

from kvferry.metrics.inbox import Inbox
from kvferry.metrics.source import AskedScheduler, Source
from kvferry.rank import RankMemory
from kvferry.scheduler.journal import Copy
from kvferry.types import HOST


def rank_source(scheduler: AskedScheduler, inbox: Inbox, rank: RankMemory) -> Source:
    """A scheduler and the one rank it has.

    A server's threads hold the source: it holds the rank weakly, so that its memory can be gone
    when its owner is.
    """
    found = weakref.ref(rank)
    return Source(
        scheduler,
        inbox,
        slot_bytes=dict.fromkeys((HOST, *rank.levels), rank.host.tier.slot_bytes),
        pinned_bytes=partial(_pinned_bytes, found),
        why_path=partial(_why_path, found),
    )


def _pinned_bytes(rank: weakref.ref[RankMemory]) -> int | None:
    found = rank()
    return found.host.stats().pinned_bytes if found is not None else None


def _why_path(rank: weakref.ref[RankMemory], copy: Copy) -> str:
    from kvferry.metrics.reasons import why_path  # here: few ask, and it brings the planner

    found = rank()
    return why_path(copy, getattr(found.engine, "choices", None) if found is not None else None)
