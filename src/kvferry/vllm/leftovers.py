"""What ended requests have not stored yet, until there is a good moment for it.

::

    ended ──┬─> waits for the next turn ──┬─> it comes: that request stores both at once
            │   (while vLLM evicts        └─> vLLM rests or evicts, or a while has passed: stored
            │    nothing)
            └─> held on the device ─────────> stored as soon as others are on their way

Every store costs the scheduler the same, however few blocks it has, and requests end where others
begin: then the GPU waits for us. So a short rest of a turn waits, and many never need a store of
their own, because the next turn comes first. Nothing holds its blocks: it is looked for by content
when its time comes. Where vLLM evicts, blocks go too fast for that, and a conversation may come
back to find its beginning gone from the device: there a rest is held and stored at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.vllm.holds import BlockHolds
from kvferry.vllm.tracked import Tracked, Unstored

WAIT_SECONDS = 2.0
"""How long a short rest waits for the next turn: programs that call tools answer as fast."""

SOON_SECONDS = 0.02
"""How long others wait: until the requests that took their place are on their way."""

_PER_STEP = 2
"""So many that have waited long enough are stored beside a model that runs."""

_MOST = 64
"""So many wait for a next turn."""

_SHARE = 8
"""At most one in so many device blocks is held."""


@dataclass(frozen=True, eq=False)
class Rest:
    """What one ended request leaves: its blocks below ``num_tokens`` that are not stored.

    ``name`` is vLLM's hash of the last of them, which covers all tokens before it. ``held`` are the
    blocks themselves, where they are held.
    """

    tracked: Tracked
    num_tokens: int
    name: bytes
    since: float
    held: Unstored | None = None

    @property
    def request_id(self) -> str:
        return str(self.tracked.request.request_id)


class Leftovers:
    """Owns what waits; of what is held, the record. Whoever takes a rest sees to its blocks."""

    def __init__(
        self,
        holds: BlockHolds,
        *,
        num_device_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holds = holds
        self._most_held = num_device_blocks // _SHARE
        self._clock = clock
        self._waiting: dict[bytes, Rest] = {}  # both the oldest first
        self._held: list[Rest] = []
        self.is_wanted = False
        """Whether vLLM needs the blocks: then none is held any longer."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def can_wait(self) -> bool:
        """Whether vLLM evicts nothing: only then a rest may wait for a next turn."""
        return not self._holds.evicts

    @property
    def holds_some(self) -> bool:
        """Whether device blocks are held that vLLM may need any time."""
        return bool(self._held)

    def wait(self, tracked: Tracked, num_tokens: int, name: bytes) -> Rest | None:
        """Let a short rest wait; returns what waited with the same end: one is enough."""
        twin = self._waiting.pop(name, None)
        self._waiting[name] = Rest(tracked, num_tokens, name, self._clock())
        return twin

    def hold(self, held: Unstored, name: bytes) -> None:
        """Remember one whose blocks are held."""
        rest = Rest(held.tracked, held.num_tokens, name, self._clock(), held)
        self._held.append(rest)

    def put_back(self, rests: Sequence[Rest]) -> None:
        """They could not be stored whole yet: again in the next step, and before all others."""
        self._waiting = {rest.name: rest for rest in rests if rest.held is None} | self._waiting
        self._held = [rest for rest in rests if rest.held is not None] + self._held

    def take_continued(self, name: bytes) -> Rest | None:
        """What waits for a request that goes on after this block."""
        return self._waiting.pop(name, None)

    def take_of(self, request_id: str) -> list[Rest]:
        """What requests of this name left."""
        return self._take(lambda rest: rest.request_id == request_id)

    @property
    def is_due(self) -> bool:
        """Whether something should be stored beside a model that runs."""
        if self._waiting:
            oldest = next(iter(self._waiting.values()))
            if self._clock() >= oldest.since + WAIT_SECONDS or len(self._waiting) > _MOST:
                return True
            if not self.can_wait:
                return True
        if self._held:
            is_soon = self._clock() >= self._held[0].since + SOON_SECONDS
            return self.is_wanted or self._is_short or is_soon
        return False

    def take_due(self, *, is_idle: bool) -> list[Rest]:
        """What is to be stored in this step, the oldest first."""
        now = self._clock()
        takes_held, self.is_wanted = is_idle or self.is_wanted or self._is_short, False
        takes_waiting = is_idle or not self.can_wait
        surplus = len(self._waiting) - _MOST
        room = max(_PER_STEP, surplus)

        def is_due(rest: Rest) -> bool:
            nonlocal surplus, room
            if rest.held is not None:
                return takes_held or now >= rest.since + SOON_SECONDS
            surplus -= 1
            is_ripe = now >= rest.since + WAIT_SECONDS or surplus >= 0
            room -= is_ripe
            return takes_waiting or (is_ripe and room >= 0)

        return self._take(is_due)

    @property
    def _is_short(self) -> bool:
        """Whether vLLM has few blocks left, or we hold many."""
        return self._holds.num_free < self._most_held or self._holds.num_held > self._most_held

    def _take(self, wanted: Callable[[Rest], bool]) -> list[Rest]:
        taken = [rest for rest in (*self._held, *self._waiting.values()) if wanted(rest)]
        for rest in taken:
            if rest.held is None:
                del self._waiting[rest.name]
            else:
                self._held.remove(rest)
        return taken
