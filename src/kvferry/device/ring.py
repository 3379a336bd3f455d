"""A ring in device memory: slots that are filled, emptied and filled again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.device.driver import Driver, Priority
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

ALIGNMENT = 4096


@dataclass(frozen=True)
class RingSlot:
    """One slot: its memory, the stream its kernels run on, and the events that free it."""

    address: int
    stream: int
    kernel_done: int
    copied: int


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``."""

    def __init__(self, driver: Driver, slot_bytes: int, *, num_slots: int) -> None:
        self.slot_bytes = max(ALIGNMENT, slot_bytes // ALIGNMENT * ALIGNMENT)
        self._num_slots = num_slots
        self._driver = driver
        self._slots: list[RingSlot] = []
        self._turn = 0
        self._give_back: list[tuple[Callable[[int], None], int]] = []
        self.fork = 0
        """An event for whoever uses the ring: the point of a job's stream the slots start from."""

    @property
    def is_open(self) -> bool:
        return bool(self._slots)

    def open(self) -> None:
        """Take the ring's memory, once; DriverError leaves nothing taken."""
        if self._slots:
            return
        try:
            self.fork = self._event()
            base = self._take(
                self._driver.alloc_device(self._num_slots * self.slot_bytes),
                self._driver.free_device,
            )
            slots = []
            for number in range(self._num_slots):
                stream = self._take(
                    self._driver.create_stream(Priority.HIGH), self._driver.destroy_stream
                )
                address = base + number * self.slot_bytes
                slots.append(RingSlot(address, stream, self._event(), self._event()))
        except DriverError:
            self.close()
            raise
        self._slots = slots

    def next(self) -> RingSlot:
        """The slot used longest ago."""
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

    def _event(self) -> int:
        return self._take(self._driver.create_event(timing=False), self._driver.destroy_event)

    def _take(self, handle: int, give: Callable[[int], None]) -> int:
        self._give_back.append((give, handle))
        return handle
