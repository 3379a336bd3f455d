"""Which compute streams may wait at a gate: those that share no channel with our streams.

A driver has a few channels to the card (8, unless told otherwise) and puts streams on them as it
likes. What one stream waits for holds up all work queued later on its channel: with an event that
is at worst slow, with a gate it is for ever, if the held work is what should open the gate. (On one
NVIDIA H200, 2026-11-16, a gate on the default stream held nobody up; gates on 32 others held all.)
No call tells, so it is tried out once for each compute stream, while that has nothing to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kvferry.device.driver.base import Driver
from kvferry.device.driver.events import EventPool
from kvferry.device.engine.gates import Gates

log = logging.getLogger(__name__)

TRIAL_SECONDS = 2e-3
"""An idle stream gets there in some ten microseconds."""


class Channels:
    """Owns what was found out about compute streams; leaves gates and streams to the engine."""

    def __init__(self, driver: Driver, gates: Gates, events: EventPool) -> None:
        self._driver = driver
        self._gates = gates
        self._events = events
        self._is_apart: dict[int, bool] = {}
        self._unknown: int | None = None

    def is_apart(self, compute: int) -> bool:
        """Whether a gate on this stream holds up none of ours; no, as long as it was not tried."""
        found = self._is_apart.get(compute)
        if found is None:
            self._unknown = compute
        return bool(found)

    def wants_trial(self, compute: int) -> bool:
        """Whether somebody asked for this one, and it was not tried yet."""
        return compute == self._unknown and compute not in self._is_apart

    def try_out(self, compute: int, streams: Iterable[int]) -> None:
        """Hold ``compute``, which is idle, and see whether ``streams``, idle too, still work."""
        gate = self._gates.shut() if self._gates.is_prepared else None
        if gate is None:
            return
        self._unknown = None
        self._is_apart[compute] = False
        events: list[int] = []
        try:
            self._gates.hold(gate, compute)
            for stream in streams:
                events.append(self._events.take())
                # Copies have channels of their own.
                self._gates.copy_some(stream)
                self._driver.record_event(events[-1], stream)
            end = time.monotonic() + TRIAL_SECONDS
            waiting = list(events)
            while waiting and time.monotonic() < end:
                waiting = [event for event in waiting if not self._driver.event_is_done(event)]
            self._is_apart[compute] = not waiting
        except Exception as error:
            log.warning("whether compute may wait at gates could not be tried: %s", error)
        finally:
            gate.open_now()
            for event in events:  # whoever records one of them anew makes it say the new thing
                self._events.give(event)
