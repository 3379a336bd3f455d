"""Policy feed: delivers a pool's events to its eviction policy, late and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.cache.events import ALL_KINDS, EventLog, PoolEvent, Reader
from kvferry.cache.policies.contract import EvictionPolicy, Evidence, HearsHints, HearsRequests
from kvferry.types import SlotArray

_LOOKUP, _, _STORE, _USE, _RETURN, _HINT, _EVICT = ALL_KINDS[:7]


class PolicyFeed:
    """Delivers one pool's events to its eviction policy, in order and with the time of each.

    Owns the policy and its backlog. The pool drains it before it selects victims and before chains
    change, because the policy asks for the chains as they were at each event.
    """

    def __init__(self, log: EventLog, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._then: float | None = None
        self._reader: Reader | None = None
        self.failure: Exception | None = None
        """The first exception of the policy since the last :meth:`raise_failure`."""
        self.has_failed = False
        """Whether the policy raised since room was last made, and so may lack slots."""
        self.events: deque[PoolEvent] = deque()
        """Events not yet delivered to the policy, the oldest first."""
        self.policy: EvictionPolicy
        self.hearer: HearsRequests | None = None
        self.hint_hearer: HearsHints | None = None

    def now(self) -> float:
        """Return the policy's time: the event's own while one is delivered, else the clock's."""
        return self._clock() if self._then is None else self._then

    def feed(self, policy: EvictionPolicy) -> None:
        """Deliver events to this policy from now on; the old policy's backlog must be empty."""
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
        """Deliver the backlog. Keep the policy's first exception for :meth:`raise_failure`."""
        events = self.events
        while events:
            event = events[0]  # still queued: after an interrupt it is delivered again
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
        """Raise the policy's first exception since the last call, if any."""
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
