"""Events that are made once and used again."""

from __future__ import annotations

import logging
import threading

from kvferry.device.driver.base import Driver
from kvferry.errors import DriverError

log = logging.getLogger(__name__)


class EventPool:
    """Owns every event it ever handed out, until ``close``. Safe to use from several threads."""

    def __init__(self, driver: Driver, *, timing: bool) -> None:
        self._driver = driver
        self._timing = timing
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._all: set[int] = set()

    def take(self) -> int:
        """An event nobody else holds; DriverError when a new one is needed and refused."""
        with self._lock:
            if self._free:
                return self._free.pop()
            event = self._driver.create_event(timing=self._timing)
            self._all.add(event)
            return event

    def give(self, event: int) -> None:
        """Return an event whose last record is done, or that nothing will query any more."""
        with self._lock:
            self._free.append(event)

    def close(self) -> None:
        """Destroy every event, held or not: the driver lets pending ones end first."""
        with self._lock:
            events, self._all, self._free = self._all, set(), []
        for event in events:
            try:
                self._driver.destroy_event(event)
            except DriverError as error:
                log.warning("an event was not given back: %s", error)
