"""Event log of one pool: plain records that readers pull when they have time.

::

    lookup, lease or request  --append-->  EventLog  --take-->  readers: policy feed, counters, ...

Appending runs no code of a reader. So ending a lease and answering a request never wait for the
eviction policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS, SlotArray

MANY_EVENTS = 32
"""Unread events at which a pool call drains the policy feed: about a millisecond of work."""


class EventKind(IntEnum):
    """Kind of an event; the comments name the fields of :class:`PoolEvent` that are set."""

    LOOKUP = 0  # a request asked for blocks: request, keys, slots (of its hit), tokens
    LOAD = 1  # a load of blocks to the device was ordered: request, slots
    STORE = 2  # blocks were committed: slots
    USE = 3  # blocks served a request, or a store added blocks after them: slots
    RETURN = 4  # a claim that was no use ended, and blocks may be evicted again: slots
    HINT = 5  # a request's blocks got a hint: keys, detail (an Evidence)
    EVICT = 6  # blocks cannot be matched any more: keys, slots (that the policy may hold)
    FOUND = 7  # a lower tier has these blocks: keys
    LOST = 8  # a lower tier no longer has these blocks: keys, or None for all
    PROMOTED = 9  # blocks were copied from a lower tier to the host: keys
    RESULT = 10  # another result of a request: request, detail
    PROMOTE = 11  # a promotion from a lower tier was ordered: keys, detail (the tier's name)


ALL_KINDS = tuple(EventKind)


class PoolEvent(NamedTuple):
    """One record of the log. ``keys`` may be a function that returns them on demand."""

    at: float
    kind: EventKind
    slots: SlotArray = NO_SLOTS
    keys: Keys | Callable[[], Keys] | None = None
    tokens: int = 0
    request: str = ""
    detail: object = None

    def all_keys(self) -> Keys:
        """Return the keys, calling the function where ``keys`` is one."""
        keys = self.keys
        if isinstance(keys, Keys):
            return keys
        return Keys.empty() if keys is None else keys()


class Reader:
    """Queue of unread events for one consumer; holds only the kinds that the consumer asked for."""

    __slots__ = ("_log", "events")

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.events: deque[PoolEvent] = deque()
        """Events appended since the last :meth:`take`, the oldest first."""

    def take(self) -> list[PoolEvent]:
        """Return the events since the last call, the oldest first. Safe on another thread."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def close(self) -> None:
        """Stop appending events for this reader."""
        every = self._log.queues
        every[:] = [[each for each in queues if each is not self.events] for queues in every]


class EventLog:
    """Appends each event to its readers' queues. Owns the list of queues and keeps no event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.queues: list[list[deque[PoolEvent]]] = [[] for _ in ALL_KINDS]
        """For each kind, the queues of the readers that asked for it."""

    def reader(self, kinds: tuple[EventKind, ...] = ALL_KINDS) -> Reader:
        """Return a reader of the events of these kinds that are appended from now on."""
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
        """Append an event with the current time of the pool's clock, if any reader wants it."""
        queues = self.queues[kind]
        if queues:
            event = PoolEvent(self._clock(), kind, slots, keys, tokens, request, detail)
            for queue in queues:
                queue.append(event)
