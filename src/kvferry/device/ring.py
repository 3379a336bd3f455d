"""A ring in device memory: slots that are filled, emptied and filled again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.device.driver import Driver, Priority
from kvferry.device.job import Direction
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

ALIGNMENT = 4096


@dataclass(eq=False)
class RingSlot:
    """One slot: its memory, the stream its kernels run on, and an event for each step.

    A store gathers into the slot and copies out of it; a load copies into it and scatters. Kernels
    of one slot are in order by their stream; copies are ordered by the events.
    """

    address: int
    stream: int
    gathered: int
    copied_out: int
    copied_in: int
    scattered: int
    freed_by: int | None = None
    """The event after which the slot is free: the last step of its last use."""
    used_at: int = field(default=0)


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``.

    Both directions use the same slots. Whoever takes one holds ``lock`` until all its work on it is
    queued, so that the events always speak of whole uses.
    """

    def __init__(self, driver: Driver, num_bytes: int, *, num_slots: int) -> None:
        self.slot_bytes = max(ALIGNMENT, num_bytes // num_slots // ALIGNMENT * ALIGNMENT)
        self.lock = threading.Lock()
        self.inbound = 0
        """The stream on which loads are copied into slots."""
        self._num_slots = num_slots
        self._driver = driver
        self._slots: list[RingSlot] = []
        self._latest: dict[Direction, RingSlot] = {}
        self._clock = 0
        self._give_back: list[tuple[Callable[[int], None], int]] = []

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

    def next(self, direction: Direction) -> RingSlot:
        """The slot to use next; call while holding ``lock``.

        The one used longest ago. While the other direction is at work each keeps to its own half:
        taking turns on the same slots would make each wait for the other's copies.
        """
        half = max(1, self._num_slots // 2)
        slots = self._slots
        if self._is_other_at_work(direction):
            slots = slots[:half] if direction is Direction.STORE else slots[-half:]
        slot = min(slots, key=lambda slot: slot.used_at)
        self._clock += 1
        slot.used_at = self._clock
        self._latest[direction] = slot
        return slot

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self._slots, self._latest = [], {}
        while self._give_back:
            give, handle = self._give_back.pop()
            try:
                give(handle)
            except DriverError as error:
                log.warning("part of the ring was not given back: %s", error)

    def _is_other_at_work(self, direction: Direction) -> bool:
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        slot = self._latest.get(other)
        if slot is None or slot is self._latest.get(direction):
            return False
        event = slot.scattered if other is Direction.LOAD else slot.copied_out
        return not self._driver.event_is_done(event)

    def _take_slots(self) -> list[RingSlot]:
        driver = self._driver
        base = self._take(
            driver.alloc_device(self._num_slots * self.slot_bytes), driver.free_device
        )
        self.inbound = self._stream()
        slots = []
        for number in range(self._num_slots):
            stream = self._stream()
            events = (
                self._take(driver.create_event(timing=False), driver.destroy_event)
                for _ in range(4)
            )
            slots.append(RingSlot(base + number * self.slot_bytes, stream, *events))
        return slots

    def _stream(self) -> int:
        driver = self._driver
        return self._take(driver.create_stream(Priority.HIGH), driver.destroy_stream)

    def _take(self, handle: int, give: Callable[[int], None]) -> int:
        self._give_back.append((give, handle))
        return handle
