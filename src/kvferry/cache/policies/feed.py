"""What happened in a pool, told to its eviction policy: late, in order, each with its own time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.cache.events import ALL_KINDS, EventLog, PoolEvent, Reader
from kvferry.cache.policies.contract import EvictionPolicy, Evidence, HearsHints, HearsRequests
from kvferry.types import SlotArray

_LOOKUP, _, _STORE, _USE, _RETURN, _HINT, _EVICT = ALL_KINDS[:7]


class PolicyFeed:
    """Tells the eviction policy of one pool what happened, in order and with the time of each.

    Owns the policy and its backlog. The pool drains it before victims are selected, and before
    chains grow: the policy asks for both as they were.
    """

    def __init__(self, log: EventLog, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._then: float | None = None
        self._reader: Reader | None = None
        self.failure: Exception | None = None
        """The first exception of the policy since the last :meth:`raise_failure`."""
        self.has_failed = False
        """Whether the policy has raised, and so may lack slots, since room was last made."""
        self.events: deque[PoolEvent] = deque()
        """What the policy has not been told yet, the oldest first."""
        self.policy: EvictionPolicy
        self.hearer: HearsRequests | None = None
        self.hint_hearer: HearsHints | None = None

    def now(self) -> float:
        """The policy's time: while it is told of an event, when that happened."""
        return self._clock() if self._then is None else self._then

    def feed(self, policy: EvictionPolicy) -> None:
        """Tell this policy from now on, instead of the one before, which has heard of all."""
        self.policy = policy
        as_object: object = policy
        self.hearer = as_object if isinstance(as_object, HearsRequests) else None
        self.hint_hearer = as_object if isinstance(as_object, HearsHints) else None
        kinds = [_STORE, _USE, _RETURN, _EVICT]
        if self.hearer is not None:
            kinds.append(_LOOKUP)
        if self.hint_hearer is not None:
            kinds.append(_HINT)
        if self._reader is not None:
            self._reader.close()
        self._reader = self._log.reader(tuple(kinds))
        self.events = self._reader.events

    def drain(self) -> None:
        """Tell the policy all that waits. What it raises is kept for :meth:`raise_failure`."""
        events = self.events
        while events:
            event = events[0]  # an interrupt leaves it there, to be told again
            self._then = event.at
            try:
                if event.kind is _USE:
                    self.policy.use(event.slots)
                elif event.kind is _STORE:
                    self.policy.insert(event.slots)
                else:
                    self._tell(event, event.slots)
            except Exception as error:
                self.failure = self.failure or error
                self.has_failed = True
            finally:
                self._then = None
            events.popleft()

    def raise_failure(self) -> None:
        """Raise the first exception of the policy since the last call."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _tell(self, event: PoolEvent, slots: SlotArray) -> None:
        kind, policy = event.kind, self.policy
        if kind is _RETURN:
            policy.put_back(slots[~policy.holds(slots)])
        elif kind is _EVICT:
            if len(slots):
                policy.discard(slots)
        elif kind is _LOOKUP and self.hearer is not None:
            self.hearer.asked(event.all_keys(), event.tokens, slots)
        elif self.hint_hearer is not None and isinstance(event.detail, Evidence):
            self.hint_hearer.hint(event.all_keys(), event.detail)
