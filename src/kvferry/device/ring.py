"""A ring in device memory: slots that are filled, emptied and filled again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.device.driver import Driver, Priority
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

ALIGNMENT = 4096


@dataclass(frozen=True)
class RingSlot:
    """One slot: its memory, the stream its kernels run on, and an event for each thing done to it.

    A store gathers into the slot and copies out of it; a load copies into it and scatters.
    """

    address: int
    stream: int
    gathered: int
    copied_out: int
    copied_in: int
    scattered: int


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``.

    Both directions use the same slots. Whoever takes one holds ``lock`` until all its work on it is
    queued, so that the events always speak of whole uses.
    """

    def __init__(self, driver: Driver, num_bytes: int, *, num_slots: int) -> None:
        self.slot_bytes = max(ALIGNMENT, num_bytes // num_slots // ALIGNMENT * ALIGNMENT)
        self.lock = threading.Lock()
        self._num_slots = num_slots
        self._driver = driver
        self._slots: list[RingSlot] = []
        self._turn = 0
        self._give_back: list[tuple[Callable[[int], None], int]] = []

    @property
    def is_open(self) -> bool:
        return bool(self._slots)

    def open(self) -> None:
        """Take the ring's memory, once; DriverError leaves nothing taken."""
        if self._slots:
            return
        with self.lock:
            if self._slots:
                return
            try:
                self._slots = self._take_slots()
            except DriverError:
                self.close()
                raise

    def next(self) -> RingSlot:
        """The slot used longest ago; call while holding ``lock``."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        return slot

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self._slots, self._turn = [], 0
        while self._give_back:
            give, handle = self._give_back.pop()
            try:
                give(handle)
            except DriverError as error:
                log.warning("part of the ring was not given back: %s", error)

    def _take_slots(self) -> list[RingSlot]:
        driver = self._driver
        base = self._take(
            driver.alloc_device(self._num_slots * self.slot_bytes), driver.free_device
        )
        slots = []
        for number in range(self._num_slots):
            stream = self._take(driver.create_stream(Priority.HIGH), driver.destroy_stream)
            events = (
                self._take(driver.create_event(timing=False), driver.destroy_event)
                for _ in range(4)
            )
            slots.append(RingSlot(base + number * self.slot_bytes, stream, *events))
        return slots

    def _take(self, handle: int, give: Callable[[int], None]) -> int:
        self._give_back.append((give, handle))
        return handle
