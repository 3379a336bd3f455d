"""A ring in device memory: slots that are filled, emptied and filled again.

::

    quarters         |    0    |    1    |    2    |    3    |
    one direction    |      slot 0       |      slot 1       |     fewer, larger copies
    both at once     | store 0 | store 1 | load 0  | load 1  |     neither waits for the other

Slots may share memory, so a slot is free when all its quarters are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.device.driver import Driver, Priority
from kvferry.device.job import Direction
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

ALIGNMENT = 4096
NUM_QUARTERS = 4


@dataclass(eq=False)
class Quarter:
    """A quarter of the ring's memory, and the event after which nobody uses it any more."""

    address: int
    freed_by: int | None = None


@dataclass(eq=False)
class RingSlot:
    """Memory for one chunk, the stream its kernels run on, and an event for each step.

    A store gathers into the slot and copies out of it; a load copies into it and scatters.
    """

    quarters: tuple[Quarter, ...]
    num_bytes: int
    stream: int
    gathered: int
    copied_out: int
    copied_in: int
    scattered: int
    used_at: int = 0

    @property
    def address(self) -> int:
        return self.quarters[0].address

    def busy_until(self) -> Iterator[int]:
        """The events to wait for before the slot may be written."""
        yield from dict.fromkeys(q.freed_by for q in self.quarters if q.freed_by is not None)

    def free_after(self, event: int) -> None:
        """Say what the last step of this use is."""
        for quarter in self.quarters:
            quarter.freed_by = event


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``.

    Whoever takes a slot holds ``lock`` until all its work on it is queued, so that the events
    always speak of whole uses: two threads, one per direction, use the same ring.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self.lock = threading.Lock()
        self.inbound = 0
        """The stream on which loads are copied into slots."""
        self._quarter_bytes = max(ALIGNMENT, num_bytes // NUM_QUARTERS // ALIGNMENT * ALIGNMENT)
        self._driver = driver
        self._alone: list[RingSlot] = []
        self._shared: dict[Direction, list[RingSlot]] = {}
        self._latest: dict[Direction, int] = {}
        self._clock = 0
        self._give_back: list[tuple[Callable[[int], None], int]] = []

    def open(self) -> None:
        """Take the ring's memory, once; DriverError leaves nothing taken."""
        if self._alone:
            return
        with self.lock:
            if self._alone:
                return
            try:
                self._take_all()
            except DriverError:
                self.close()
                raise

    def next(self, direction: Direction) -> RingSlot:
        """The slot to use next; call while holding ``lock``."""
        slots = self._shared[direction] if self._is_other_at_work(direction) else self._alone
        slot = min(slots, key=_used_at)
        self._clock += 1
        slot.used_at = self._clock
        store = direction is Direction.STORE
        self._latest[direction] = slot.copied_out if store else slot.scattered
        return slot

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self._alone, self._shared, self._latest = [], {}, {}
        while self._give_back:
            give, handle = self._give_back.pop()
            try:
                give(handle)
            except DriverError as error:
                log.warning("part of the ring was not given back: %s", error)

    def _is_other_at_work(self, direction: Direction) -> bool:
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        event = self._latest.get(other)
        return event is not None and not self._driver.event_is_done(event)

    def _take_all(self) -> None:
        size = self._quarter_bytes
        base = self._take(self._driver.alloc_device(NUM_QUARTERS * size), self._driver.free_device)
        a, b, c, d = (Quarter(base + number * size) for number in range(NUM_QUARTERS))
        self.inbound = self._stream()
        streams = [self._stream() for _ in range(NUM_QUARTERS)]
        alone = [self._slot((a, b), streams[0]), self._slot((c, d), streams[2])]
        self._shared = {
            Direction.STORE: [self._slot((a,), streams[0]), self._slot((b,), streams[1])],
            Direction.LOAD: [self._slot((c,), streams[2]), self._slot((d,), streams[3])],
        }
        self._alone = alone

    def _slot(self, quarters: tuple[Quarter, ...], stream: int) -> RingSlot:
        driver = self._driver
        events = (
            self._take(driver.create_event(timing=False), driver.destroy_event) for _ in range(4)
        )
        return RingSlot(quarters, len(quarters) * self._quarter_bytes, stream, *events)

    def _stream(self) -> int:
        driver = self._driver
        return self._take(driver.create_stream(Priority.HIGH), driver.destroy_stream)

    def _take(self, handle: int, give: Callable[[int], None]) -> int:
        self._give_back.append((give, handle))
        return handle


def _used_at(slot: RingSlot) -> int:
    return slot.used_at
