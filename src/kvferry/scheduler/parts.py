"""What the requests of one scheduler share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.cache.pool import Pool
from kvferry.cache.tenants import Tenants
from kvferry.scheduler.accounts import Accounts
from kvferry.scheduler.deferred_stores import Rests
from kvferry.scheduler.hits import Hits
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.lookup import Matcher
from kvferry.scheduler.promotion import ComingLoads
from kvferry.scheduler.stores import Stores
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import Flights, Outbox, Transit, Waits
from kvferry.types import DeviceBlocks


@dataclass(eq=False)
class Parts:
    """Everything a scheduler's requests look, load and store with. Owned by the scheduler.

    ``sizes`` are the tokens of a block, by group, ``least_tokens`` the least of them. The last
    ``spare_tokens`` of a request are neither loaded nor stored. ``owing`` are requests that were
    answered and are not counted yet, ``pinned`` those with a hit nobody has loaded yet.
    ``coming`` are loads in pieces, where the engine lets us order those.
    ``released`` are device blocks that nobody copies any more, until the engine is told.
    """

    pool: Pool
    matcher: Matcher
    hits: Hits
    stores: Stores
    transit: Transit
    flights: Flights
    outbox: Outbox
    lower: LowerTiers
    waits: Waits
    journal: Journal
    accounts: Accounts
    sizes: tuple[int, ...]
    least_tokens: int
    clock: Callable[[], float]
    spare_tokens: int = 0
    tenants: Tenants | None = None
    rests: Rests | None = None
    live: dict[Any, None] = field(default_factory=dict)
    owing: dict[Any, None] = field(default_factory=dict)
    pinned: dict[Any, None] = field(default_factory=dict)
    released: list[DeviceBlocks] = field(default_factory=list)
    coming: ComingLoads = field(init=False)

    def tell_owing(self, *, are_whole: bool = False) -> None:
        """Count and explain every answer that nobody has counted yet.

        Chains that ``are_whole`` do not grow: of who loads, nothing more is to be heard.
        """
        for request in tuple(self.owing):
            request.tell()
            if are_whole and request.loading:
                self.accounts.ended(request)
