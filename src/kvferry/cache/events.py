"""What happened in one pool, as plain records that readers pull when they have time.

::

    lookup, lease or request  --append-->  EventLog  --take-->  readers: policy feed, counters, ...

Appending runs no code of a reader. So a lease ends, and a request is answered, without waiting for
the eviction policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS, SlotArray

MANY_EVENTS = 32
"""The backlog of the policy feed from which a lookup or a touch drains it: about a millisecond."""


class EventKind(IntEnum):
    """What happened; the comments name the fields of :class:`PoolEvent` that are set."""

    LOOKUP = 0  # a request asked for blocks: request, keys, slots (of its hit), tokens
    LOAD = 1  # blocks are copied to the device: request, slots
    STORE = 2  # blocks were committed: slots
    USE = 3  # blocks served a request, or others were stored behind them: slots
    RETURN = 4  # blocks may be evicted again, without having been used: slots
    HINT = 5  # a hint was given for a request's blocks: keys, detail (an Evidence)
    EVICT = 6  # blocks cannot be matched any more: keys, slots (unknown to the policy so far)
    FOUND = 7  # a lower tier has these blocks: keys
    LOST = 8  # a lower tier does not have these blocks any more: keys, or None for all
    PROMOTED = 9  # blocks were copied from a lower tier to the host: keys
    RESULT = 10  # something else became known of a request: request, detail
    PROMOTE = 11  # blocks are on their way up from a lower tier: keys, detail (its name)


ALL_KINDS = tuple(EventKind)


class PoolEvent(NamedTuple):
    """One record. ``keys`` may be a function, for a reader that needs them."""

    at: float
    kind: EventKind
    slots: SlotArray = NO_SLOTS
    keys: Keys | Callable[[], Keys] | None = None
    tokens: int = 0
    request: str = ""
    detail: object = None

    def all_keys(self) -> Keys:
        """The keys, made now where the record has only a function."""
        keys = self.keys
        if isinstance(keys, Keys):
            return keys
        return Keys.empty() if keys is None else keys()


class Reader:
    """One consumer's place in the log. It sees only the kinds that it asked for."""

    __slots__ = ("_log", "events")

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.events: deque[PoolEvent] = deque()
        """What was appended since the last :meth:`take`, the oldest first."""

    def take(self) -> list[PoolEvent]:
        """All records since the last call, the oldest first. Another thread may call this."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def close(self) -> None:
        """Append nothing for this reader any more."""
        every = self._log.queues
        every[:] = [[each for each in queues if each is not self.events] for queues in every]


class EventLog:
    """Appends records for its readers. Owns one queue for each reader, and keeps nothing else."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.queues: list[list[deque[PoolEvent]]] = [[] for _ in ALL_KINDS]
        """By kind, those of the readers that asked for it."""

    def reader(self, kinds: tuple[EventKind, ...] = ALL_KINDS) -> Reader:
        """A reader of what is appended from now on."""
        reader = Reader(self)
        for kind in kinds:
            self.queues[kind].append(reader.events)
        return reader

    def append(
        self,
        kind: EventKind,
        slots: SlotArray = NO_SLOTS,
        keys: Keys | Callable[[], Keys] | None = None,
        *,
        tokens: int = 0,
        request: str = "",
        detail: object = None,
    ) -> None:
        """Append a record of now, by the pool's clock."""
        queues = self.queues[kind]
        if queues:
            event = PoolEvent(self._clock(), kind, slots, keys, tokens, request, detail)
            for queue in queues:
                queue.append(event)
