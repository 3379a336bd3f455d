"""What a ferry finds of a request: blocks to load, or blocks on their way up from a lower level."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.answers import MatchState
from kvferry.errors import InputError
from kvferry.scheduler import Request, Scheduler


@dataclass(frozen=True, eq=False, slots=True)
class Hit:
    """Blocks that can be loaded: ``len(hit)`` of them, after the ``on_device`` first ones.

    They stay where they are until the hit is loaded, released, or left alone for
    ``Config.match_deadline`` seconds. ``needed`` says for each group which places of the request's
    block table a load fills. One that ``is_pending`` has no blocks yet: a level below host memory
    was asked for them or brings them up. Ask again with ``Ferry.again``, or compute without; or,
    where ``coming`` says how many are on their way, load them as they come.
    """

    request: Request
    num_blocks: int
    on_device: int
    is_pending: bool = False
    coming: int = 0

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def needed(self) -> tuple[range, ...]:
        return self.request.needed_blocks


def pending(request: Request, on_device: int, block_tokens: int) -> Hit:
    """The hit of a request that waits for a level."""
    hoped = request.below.hoped_tokens // block_tokens if request.below is not None else 0
    return Hit(request, 0, on_device, is_pending=True, coming=max(0, hoped - on_device))


def not_a_hit(given: object) -> InputError:
    return InputError(f"a hit must come from ferry.match, got {type(given).__name__}")


class PendingHits:
    """Requests whose hits are pending, and until when somebody must ask for each again.

    Owns these times; one that nobody asks for in time is ended, so that a hit which was dropped
    leaves nothing behind.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._until: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def keep(self, request: Request) -> None:
        """Somebody asked for it just now."""
        self._until.pop(request, None)
        self._until[request] = self._clock() + self._patience

    def again(self, hit: Hit, scheduler: Scheduler, block_tokens: int) -> Hit:
        """What has become of a hit; one that is not pending is the answer itself."""
        request, on_device = hit.request, hit.on_device
        if not hit.is_pending:
            return hit
        if request not in scheduler:
            return Hit(request, 0, on_device)
        match = request.match(computed_tokens=on_device * block_tokens)
        if request.waits_below:
            self.keep(request)
            return pending(request, on_device, block_tokens)
        self.drop(request)
        if match.state is not MatchState.HIT:
            request.end()
        return Hit(request, (match.num_tokens - match.computed_tokens) // block_tokens, on_device)

    def drop(self, request: Request) -> None:
        """It is pending no longer."""
        self._until.pop(request, None)

    def expire(self) -> None:
        """End those that nobody asked for; the one that was left alone longest comes first."""
        now = self._clock()
        for request in [request for request, until in self._until.items() if until <= now]:
            del self._until[request]
            request.end()
