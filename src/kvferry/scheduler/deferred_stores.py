"""What ended requests have not stored yet, until there is a good moment for it.

::

    ended ──┬─> waits for the next turn ──┬─> it comes: that request stores both at once
            │   (while the engine evicts  └─> the engine rests or evicts, or a while has passed:
            │    nothing)                     stored
            └─> held on the device ─────────> stored as soon as others are on their way

Every store costs the scheduler the same, however few blocks it has, and requests end where others
begin: then the device waits for us. So a short rest of a turn waits, and many never need a store of
their own, because the next turn comes first. Nothing holds its blocks: it is looked for by content
when its time comes. Where the engine evicts, blocks go too fast for that, and a conversation may
come back to find its beginning gone from the device: there a rest is held and stored at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.scheduler.transfers import BlockTable, EngineBlocks
from kvferry.types import DeviceBlocks, Key

WAIT_SECONDS = 2.0
"""How long a short rest waits for the next turn: programs that call tools answer as fast."""

SOON_SECONDS = 0.02
"""How long others wait: until the requests that took their place are on their way."""

STORE_TOKENS = 4096
"""A running request is stored when it has this many more tokens, and when it ends: every store
costs the scheduler the same, however few blocks it has. Nothing is lost meanwhile but what a
preemption takes, because blocks in use stay on the device."""

_HURRY = 8
"""Where the engine evicts, it may preempt as well: so many times as often."""

_PER_STEP = 2
"""So many that have waited long enough are stored beside a model that runs."""

_MOST = 64
"""So many wait for a next turn."""

_SHARE = 8
"""At most one in so many device blocks is held."""


@dataclass(frozen=True, eq=False)
class Deferred:
    """What one ended request leaves: its blocks below ``num_tokens`` that are not stored.

    ``key`` is that of the last of them, which covers all tokens before it. ``tables`` name the
    blocks where they are ``held``; else they are looked for when they are stored.
    """

    request: Any
    num_tokens: int
    key: Key
    since: float
    tables: Sequence[BlockTable] | None = None
    held: tuple[DeviceBlocks, ...] = ()


class DeferredStores:
    """Owns what waits and what is held, and says when which of it is due.

    Requests end themselves; the blocks are the engine's.
    """

    def __init__(
        self,
        engine: EngineBlocks,
        *,
        least_tokens: int,
        is_full: bool,
        num_device_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        """``is_full`` says that no block is given up while its request runs.

        A window may pass a block before its turn comes: such requests store block by block.
        """
        self.engine = engine
        self.stores_late = is_full
        num_blocks = max(1, STORE_TOKENS // least_tokens) if is_full else 1
        self.store_step = least_tokens * num_blocks
        self._hasty_step = least_tokens * max(1, num_blocks // _HURRY)
        self._most_held = num_device_blocks // _SHARE
        self._clock = clock
        self._waiting: dict[Key, Deferred] = {}  # both the oldest first
        self.held: list[Deferred] = []
        """Those whose device blocks are held, which the engine may need any time."""
        self.is_wanted = False
        """Whether the engine needs the blocks: then none is held any longer."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self.held)

    @property
    def can_wait(self) -> bool:
        """Whether the engine evicts nothing: only then a rest may wait for a next turn."""
        return not self.engine.evicts

    @property
    def step(self) -> int:
        """How many tokens a running request stores at once, counted from ``Progress.since``."""
        return self._hasty_step if self.engine.evicts else self.store_step

    def wait(self, request: Any, num_tokens: int, key: Key) -> Deferred | None:
        """Let a short rest wait; returns what waited with the same end: one is enough."""
        twin = self._waiting.pop(key, None)
        self._waiting[key] = Deferred(request, num_tokens, key, self._clock())
        return twin

    def hold(
        self,
        request: Any,
        num_tokens: int,
        key: Key,
        tables: Sequence[BlockTable],
        held: tuple[DeviceBlocks, ...],
    ) -> None:
        """Remember one whose blocks are held."""
        self.held.append(Deferred(request, num_tokens, key, self._clock(), tables, held))

    def put_back(self, rests: Sequence[Deferred]) -> None:
        """They could not be stored whole yet: again in the next step, and before all others."""
        self._waiting = {rest.key: rest for rest in rests if not rest.held} | self._waiting
        self.held = [rest for rest in rests if rest.held] + self.held

    def take_continued(self, chain: Sequence[Key] | Any, num_keys: int) -> Deferred | None:
        """What waits for a request that goes on after so many blocks of its chain."""
        if not self._waiting or num_keys > len(chain):  # an engine may have more than has keys
            return None
        return self._waiting.pop(chain[num_keys - 1], None)

    @property
    def is_due(self) -> bool:
        """Whether something should be stored beside a model that runs."""
        if self._waiting:
            oldest = next(iter(self._waiting.values()))
            if self._clock() >= oldest.since + WAIT_SECONDS or len(self._waiting) > _MOST:
                return True
            if not self.can_wait:
                return True
        if self.held:
            is_soon = self._clock() >= self.held[0].since + SOON_SECONDS
            return self.is_wanted or self._is_short or is_soon
        return False

    def take_due(self, *, is_idle: bool) -> list[Deferred]:
        """What is to be stored in this step, the oldest first."""
        now = self._clock()
        takes_held, self.is_wanted = is_idle or self.is_wanted or self._is_short, False
        takes_waiting = is_idle or not self.can_wait
        surplus = len(self._waiting) - _MOST
        room = max(_PER_STEP, surplus)
        due = [r for r in self.held if takes_held or now >= r.since + SOON_SECONDS]
        for rest in self._waiting.values():
            surplus -= 1
            is_ripe = now >= rest.since + WAIT_SECONDS or surplus >= 0
            room -= is_ripe
            if takes_waiting or (is_ripe and room >= 0):
                due.append(rest)
        for rest in due:
            self._remove(rest)
        return due

    def drop(self, request: Any) -> list[Deferred]:
        """What one request left, which is not to be stored any more."""
        rests = [rest for rest in (*self.held, *self._waiting.values()) if rest.request is request]
        for rest in rests:
            self._remove(rest)
        return rests

    def take_all(self) -> list[Deferred]:
        """Everything, due or not: what is left of before is not to be stored any more."""
        rests = [*self.held, *self._waiting.values()]
        self.held, self._waiting = [], {}
        return rests

    def _remove(self, rest: Deferred) -> None:
        if rest.held:
            self.held.remove(rest)
        else:
            del self._waiting[rest.key]

    @property
    def _is_short(self) -> bool:
        """Whether the engine has few blocks left, or many are held."""
        engine = self.engine
        return engine.num_free < self._most_held or engine.num_held > self._most_held
