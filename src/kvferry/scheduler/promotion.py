"""Promotion: a request's blocks brought up from lower tiers to the host.

::

    match ──> ask tiers that find blocks by keys ──> match again ──> bring up ──> match again: a hit

A request waits once for answers and once for blocks, each with a deadline. Then it is matched with
what is in the host, and computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.cache.policies.load_or_compute import Decision
from kvferry.scheduler.lookup import Lookup, Matcher
from kvferry.scheduler.tiering import LowerTiers
from kvferry.types import TransferId


@dataclass(eq=False, slots=True)
class Promotion:
    """What one request has asked of lower tiers. Owns what it still waits for.

    It asks once, and promotes once, for each match that finds something else. A block that was not
    known to be below by then is not there; a block that did not come up by then is computed.
    """

    num_asked: int = 0
    """Blocks that tiers were asked for, when they last were."""
    waits: set[TransferId] = field(default_factory=set)
    declined: Decision | None = None
    """Why what lay below was not brought up last time: computing it was faster."""
    has_asked: bool = False
    has_promoted: bool = False

    def renew(self) -> None:
        """The next match may ask and promote again."""
        self.has_asked = self.has_promoted = False


class Promoter:
    """Asks lower tiers and brings up blocks, for requests and prefetches. Owns a count.

    Both have a ``promotion`` and a ``tenant``. The scheduler tells them when a transfer they wait
    for has ended.
    """

    def __init__(self, matcher: Matcher, lower: LowerTiers) -> None:
        self.promoted_tokens = 0
        self._matcher = matcher
        self._lower = lower

    def fetch(self, caller: Any, found: Lookup, most_slots: int | None = None) -> bool:
        """Ask for what is not known, or bring up what is below; whether the caller should wait.

        ``most_slots`` bounds what is brought up, besides the bound on all promotions.
        """
        promotion: Promotion = caller.promotion
        if not promotion.has_asked and self._lower.keyed and self._lower.can_be_asked:
            wanted = self._matcher.to_ask(found)
            if wanted is not None:
                promotion.waits |= self._lower.ask(wanted)
            if promotion.waits:
                promotion.has_asked = True
                promotion.num_asked = len(wanted) if wanted is not None else 0
                return True
            promotion.num_asked = 0
        if found.all_tokens <= found.host_tokens or promotion.has_promoted:
            return False
        return self._promote(caller, found, most_slots)

    def _promote(self, caller: Any, found: Lookup, most_slots: int | None) -> bool:
        promotion: Promotion = caller.promotion
        room = self._lower.room
        most = room if most_slots is None else min(room, most_slots)
        found = self._matcher.within(found, most)
        runs = self._matcher.to_promote(found)
        num_tokens = found.all_tokens - found.host_tokens
        promotion.declined = None
        if runs:
            decision = self._lower.worth_promoting(runs, num_tokens)
            if not decision.load:
                promotion.declined = decision
                return False
        promotion.waits |= self._lower.promote(runs, room, tenant=caller.tenant)
        promotion.has_promoted = bool(promotion.waits)
        if promotion.has_promoted:
            self.promoted_tokens += num_tokens
        return promotion.has_promoted
