"""Where a request can stand, and what leads from one state to the next."""

from __future__ import annotations

from enum import Enum

from kvferry.errors import InputError
from kvferry.types import RequestId


class State(Enum):
    """Where a request stands.

    ::

                        ┌────────── preempt ───────────┐
                        ▼                              │
        open ──> UNKNOWN ──match──> MATCHED ──load──> LOADING ──settled──> LOADED
                   │  ▲                │                  │                  │
                   │  └── miss, expired┘◀──── failed ─────┘                  │ run, store
                   │ match, answered at once                                 ▼
                   └──────> ANSWERED ────────────── run, store ──────────> RUNNING
                   match: what it wants is on its way: WAITING               │
                   (whose end may be foreseen: WAITING ──load──> LOADING)    │
                                                           leave: LEFT ◀─────┤
                                           stored late, or gone on with: └──▶ ENDED ◀── end
    """

    UNKNOWN = "unknown"  # nothing is pinned for it, nothing is on its way
    ANSWERED = "answered"  # it was told that nothing is here; not counted yet
    WAITING = "waiting"  # blocks it wants are coming up, or another request loads them
    MATCHED = "matched"  # a hit is pinned for it
    LOADING = "loading"  # its hit is on its way to the device, its last blocks maybe to the host
    LOADED = "loaded"  # its hit is on the device, nothing is computed on it yet
    RUNNING = "running"  # the engine computes it, in the blocks it has now
    LEFT = "left"  # it has ended; some of it is to be stored late
    ENDED = "ended"  # and leaves nothing


OVER = (State.LEFT, State.ENDED)


def over(request_id: RequestId, verb: str) -> InputError:
    """What to raise where one that is over is to do something."""
    return InputError(f"request {request_id!r} has ended and cannot be {verb}; open a new one")


def negative(request_id: RequestId, computed_tokens: int, max_tokens: int | None) -> InputError:
    """What to raise where a question has fewer tokens than none."""
    return InputError(
        f"request {request_id!r}: computed_tokens and max_tokens must not be negative, got "
        f"{computed_tokens} and {max_tokens}"
    )
