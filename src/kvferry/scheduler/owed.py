"""Answers that nobody has counted yet: they are given at once, and told of when there is time.

A miss is answered with one look for one key; a hit with a look for all of them, and its bytes may
be on their way before anybody has written down why there are no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.scheduler.hit import PinnedHit
from kvferry.scheduler.look import Missing

if TYPE_CHECKING:
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.request import Request


class OwedMiss(NamedTuple):
    """What was lacking, and what had been asked for."""

    missing: Missing
    num_keys: int
    computed_tokens: int
    max_tokens: int


Owed = OwedMiss | PinnedHit


def tell(request: Request, owed: Owed, parts: Parts) -> None:
    """Count and explain what a request was answered."""
    if isinstance(owed, PinnedHit):
        parts.accounts.found(request, owed)
        return
    missing, num_keys, computed_tokens, max_tokens = owed
    if not request.is_counted:
        keys = request.chain.keys()[:num_keys] if parts.stores.admission.counts else None
        parts.accounts.asked(request, keys, max_tokens - computed_tokens)
    parts.accounts.missed(request, missing, computed_tokens=computed_tokens, max_tokens=max_tokens)
