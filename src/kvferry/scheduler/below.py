"""What one request has asked of the levels below the host, and waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry import reach
from kvferry.policy import Decision
from kvferry.scheduler.look import Look
from kvferry.types import TransferId

if TYPE_CHECKING:
    from kvferry.scheduler.hit import PinnedHit
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.prefetch import Prefetch
    from kvferry.scheduler.request import Request


class Below:
    """Questions and promotions of one request. Owns which of them it still waits for.

    Once per look: what was not known to be below by then is not there, and what did not come up by
    then is computed.
    """

    __slots__ = (
        "_has_asked",
        "_has_promoted",
        "declined",
        "foreseen",
        "hoped_tokens",
        "num_asked",
        "waits",
    )

    def __init__(self) -> None:
        self.num_asked = 0
        """Blocks that levels were asked for, at the last look that asked."""
        self.waits: set[TransferId] = set()
        self.hoped_tokens = 0
        """How many tokens its hit has if all comes up that was ordered at the last look."""
        self.declined: Decision | None = None
        """Why what lay below was not brought up at the last look: computing it was faster."""
        self.foreseen: PinnedHit | None = None
        """What it was last told it will have; nothing of it is claimed."""
        self._has_asked = False
        self._has_promoted = False

    def fetch(
        self,
        request: Request | Prefetch,
        look: Look,
        parts: Parts,
        most_slots: int | None = None,
    ) -> bool:
        """Ask for what is not known, or bring up what is; True if the request should wait.

        ``most_slots`` bounds what is brought up, beside the bound on all promotions.
        """
        if self._ask(request, look, parts):
            return True
        room = parts.lower.room
        return self._promote(
            request, look, parts, room if most_slots is None else min(room, most_slots)
        )

    def _ask(self, request: Request | Prefetch, look: Look, parts: Parts) -> bool:
        if self._has_asked or not parts.lower.can_be_asked:
            return False
        wanted = parts.matcher.to_ask(look)
        self.waits |= parts.lower.ask(wanted) if wanted is not None else set()
        parts.waits.add(request, self.waits)
        self._has_asked = bool(self.waits)
        self.num_asked = wanted.num_needed if wanted is not None and self._has_asked else 0
        return self._has_asked

    def _promote(self, request: Request | Prefetch, look: Look, parts: Parts, room: int) -> bool:
        if look.all_tokens <= look.host_tokens or self._has_promoted:
            return False
        look = parts.matcher.within(look, room)
        wanted = list(parts.matcher.to_promote(look))
        self.declined = None
        if wanted:
            num_tokens = look.all_tokens - look.host_tokens
            each = [keys for _, keys, _ in wanted]
            decision = parts.lower.worth_bringing(each, num_tokens, parts.hits.worth)
            if not decision.load:
                self.declined = decision
                return False
        for g, keys, parent in wanted:
            chained = isinstance(parts.matcher.groups[g], reach.FullAttention)
            self.waits |= parts.lower.promote(
                keys, parent=parent, chained=chained, tenant=request.tenant
            )
        parts.waits.add(request, self.waits)
        self._has_promoted = bool(self.waits)
        self.hoped_tokens = look.all_tokens if self._has_promoted else 0
        if self._has_promoted:
            parts.accounts.counts.promoted_tokens += look.all_tokens - look.host_tokens
        return self._has_promoted

    def drop(self, request: Request | Prefetch, parts: Parts) -> None:
        """It waits for nothing any more, and may ask anew."""
        self.stop_waiting(request, parts)
        self.renew()

    def stop_waiting(self, request: Request | Prefetch, parts: Parts) -> None:
        """It waits for nothing any more."""
        parts.waits.remove(request, self.waits)
        self.waits = set()
        self.hoped_tokens = 0
        self.foreseen = None

    def renew(self) -> None:
        """The next look may ask and bring up again."""
        self._has_asked = self._has_promoted = False
