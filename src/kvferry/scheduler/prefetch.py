"""Blocks on their way up before anybody asks for them."""

from __future__ import annotations

from kvferry.keys import Keys
from kvferry.scheduler.below import Below
from kvferry.scheduler.flight import Flight
from kvferry.scheduler.parts import Parts
from kvferry.types import RequestId


class Prefetch:
    """One request's blocks, brought from the levels below to the host. Owns what it waits for.

    Piece by piece, within the bound on promotions, until all is there that can be had.
    """

    def __init__(
        self,
        name: RequestId,
        keys: Keys,
        keep_seconds: float | None,
        parts: Parts,
        tenant: int = 0,
    ) -> None:
        """They are the ``tenant``'s, or nobody's yet: who asks for them later finds them."""
        self.id = name
        self.keys = keys
        self.keep_seconds = keep_seconds
        self.tenant = tenant
        self._parts = parts
        self.num_slots = 0
        """Host slots that were claimed for it so far."""
        self.refused: tuple[str, ...] = ()
        """What of it is not kept though it was to be, and why; once all has come."""
        self._below = Below()
        self._reached = -1

    def advance(self, most_slots: int | None = None) -> bool:
        """Order the next of it; False once there is no more to order.

        No more than so many slots are claimed for that.
        """
        parts = self._parts
        if self._below.waits:
            return True
        look = parts.matcher.look(self.keys, 0, len(self.keys) * parts.matcher.hash_tokens)
        if look.host_tokens > self._reached:  # what came may let more come
            self._reached = look.host_tokens
            self._below.renew()
        num_claimed = parts.pool.num_reserved
        is_coming = self._below.fetch(self, look, parts, most_slots)
        self.num_slots += parts.pool.num_reserved - num_claimed
        return is_coming

    def came(self, flight: Flight) -> None:
        """Blocks it waits for have come up, or will not."""
        self._parts.journal.ended(self.id, flight)
        self._below.waits.discard(flight.transfer.id)

    def drop(self) -> None:
        """It waits for nothing any more."""
        self._below.drop(self, self._parts)
