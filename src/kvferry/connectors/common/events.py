"""Which blocks can be had from this server without computing, reported to routers as events.

An engine's events name a medium: one for host memory, one for any tier below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvferry.cache.events import EventKind
from kvferry.cache.pool import Pool
from kvferry.cache.reach import Group
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.types import HOST, TierName

_TIER_EVENTS = (EventKind.EVICT, EventKind.FOUND, EventKind.LOST, EventKind.PROMOTED)

_MAX_LOWER = 1 << 17
"""Blocks below the host that routers know of; then the oldest is taken back. A shared store never
says what it has dropped, and what is known of a block takes some 500 bytes."""


class EventForms(Protocol):
    """The engine's own events for routers; ``medium`` names the tier kind."""

    host: str
    lower: str

    def describe(self, request: Any, group: int, start: int, size: int) -> Any:
        """What an event says of the block of ``size`` tokens from token ``start`` on."""

    def stored(self, block: Any, medium: str) -> Any: ...

    def removed(self, block: Any, medium: str) -> Any: ...


class _Reported:
    """A block that routers know of, and the tiers that it is on."""

    __slots__ = ("block", "places")

    def __init__(self, block: Any) -> None:
        self.block = block
        self.places: set[TierName] = set()

    @property
    def is_lower(self) -> bool:
        return bool(self.places - {HOST})


class BlockEvents:
    """Owns what was ordered until it can be matched, and what routers know of until it goes.

    Reads the event logs of the host's pool and of the tiers.
    """

    def __init__(
        self,
        pool: Pool,
        groups: Sequence[Group],
        forms: EventForms,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        self._forms = forms
        self._pool = pool
        self._groups = groups
        self._ordered: dict[Key, Any] = {}
        self._reported: dict[Key, _Reported] = {}
        self._lower: dict[Key, None] = {}  # the oldest first
        self._events: list[Any] = []
        self._readers = [
            (HOST, pool.log.reader((EventKind.EVICT,))),
            *((tier.name, tier.log.reader(_TIER_EVENTS)) for tier in tiers),
        ]

    def ordered(self, part: Ordered) -> None:
        """These blocks of a request are being stored."""
        request, size = part.request.chain.request, self._groups[part.group].block_tokens
        places = part.positions if isinstance(part.positions, range) else part.positions.tolist()
        for place, key in zip(places, part.keys, strict=True):
            self._ordered[key] = self._forms.describe(request, part.group, place * size, size)

    def settled(self) -> None:
        """Stores may have landed: report those that can be matched from now on."""
        self._read_logs()
        if not self._ordered:
            return
        keys = Keys.from_bytes(self._ordered)
        known, cached = self._pool.known(keys), self._pool.cached(keys)
        for key, is_known, is_cached in zip(list(self._ordered), known, cached, strict=True):
            if is_cached or not is_known:
                block = self._ordered.pop(key)
                if is_cached:
                    self._add(key, self._reported.setdefault(key, _Reported(block)), HOST)

    def _read_logs(self) -> None:
        """Report what was appended to the logs since the last call, in the order of time."""
        events = [(event, name) for name, reader in self._readers for event in reader.take()]
        for event, name in sorted(events, key=lambda each: each[0].at):
            if event.kind is EventKind.FOUND:
                self._found(event.all_keys(), name)
            elif event.kind is EventKind.PROMOTED:
                for key in event.all_keys():
                    reported = self._reported.get(key)
                    if reported is not None and HOST not in reported.places:
                        self._ordered[key] = reported.block
            else:
                keys = list(self._reported) if event.keys is None else event.all_keys()
                for key in keys:
                    self._drop(key, name)

    def _found(self, keys: Keys, tier: TierName) -> None:
        for key in keys:
            reported = self._reported.get(key)
            if reported is not None:
                self._add(key, reported, tier)
        while len(self._lower) > _MAX_LOWER:
            key = next(iter(self._lower))
            for place in self._reported[key].places - {HOST}:
                self._drop(key, place)

    # -- what routers hear ----------------------------------------------------------------------

    def _add(self, key: Key, reported: _Reported, place: TierName) -> None:
        if place in reported.places:
            return
        if place == HOST:
            self._events.append(self._forms.stored(reported.block, self._forms.host))
        elif not reported.is_lower:
            self._lower[key] = None
            self._events.append(self._forms.stored(reported.block, self._forms.lower))
        reported.places.add(place)

    def _drop(self, key: Key, place: TierName) -> None:
        reported = self._reported.get(key)
        if reported is None or place not in reported.places:
            return
        reported.places.remove(place)
        if place == HOST:
            self._events.append(self._forms.removed(reported.block, self._forms.host))
        elif not reported.is_lower:
            del self._lower[key]
            self._events.append(self._forms.removed(reported.block, self._forms.lower))
        if not reported.places:
            del self._reported[key]

    def take(self) -> Iterable[Any]:
        """Events since the last call."""
        self._read_logs()
        events, self._events = self._events, []
        return events
