"""A ring in device memory: slots that are filled, emptied and filled again.

::

    memory           |    0    |    1    |    2    |    3    |4|5|
    one direction    |      large 0      |      large 1      |   |     fewer, larger copies
    both at once     | store 0 | store 1 | load 0  | load 1  |s|l|     neither waits for the other

The small slot at the end is for a store's first chunk and a load's last one, which nothing hides.
Slots may share memory, so a slot is free when all its parts are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import Driver, Handles, Priority
from kvferry.transfer.job import Direction

ALIGNMENT = 4096
NUM_LARGE, NUM_SMALL = 4, 2
SMALL_SHARE = 32
"""A small part is this fraction of the ring: 2 MiB of 64, or as long as a kernel takes to start."""


@dataclass(eq=False)
class RingPart:
    """A part of the ring's memory, and the event after which it is free."""

    address: int
    freed_by: int | None = None


@dataclass(eq=False)
class RingSlot:
    """Memory for one chunk, the stream its kernels run on, and an event for each step.

    A store gathers into the slot and copies out of it; a load copies into it and scatters.
    """

    parts: tuple[RingPart, ...]
    num_bytes: int
    stream: int
    gathered: int
    copied_out: int
    copied_in: int
    scattered: int

    @property
    def address(self) -> int:
        return self.parts[0].address

    def busy_until(self) -> set[int]:
        """The events to wait for before the slot may be written."""
        return {part.freed_by for part in self.parts if part.freed_by is not None}

    def free_after(self, event: int) -> None:
        """Set the last step of this use."""
        for part in self.parts:
            part.freed_by = event


@dataclass(eq=False)
class Slots:
    """The slots of one direction: large ones used in turn, and a small one."""

    large: tuple[RingSlot, ...]
    small: RingSlot
    in_turn: Iterator[RingSlot] = field(init=False)

    def __post_init__(self) -> None:
        self.in_turn = cycle(self.large)


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``.

    Hold ``lock`` from taking a slot until all work on it is queued, so that the events always mean
    whole uses: two threads, one per direction, use the same ring.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self.lock = threading.Lock()
        self.inbound = 0
        """The stream on which loads are copied into slots."""
        self.bypass = 0
        """The stream of a kernel that bypasses the ring."""
        self.for_ids = 0
        """The stream on which a load's ids are sent, so that they do not queue behind bytes."""
        self._small_bytes = _whole_pages(num_bytes // SMALL_SHARE)
        self._large_bytes = _whole_pages((num_bytes - NUM_SMALL * self._small_bytes) // NUM_LARGE)
        self._driver = driver
        self._alone: Slots | None = None
        self._shared: dict[Direction, Slots] = {}
        self._latest: dict[Direction, int] = {}
        self._handles = Handles()
        self._streams: list[int] = []

    @property
    def is_open(self) -> bool:
        return self._alone is not None

    @property
    def streams(self) -> list[int]:
        """All its streams; empty before it is open."""
        return self._streams

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

    def next(self, direction: Direction, num_bytes: int | None = None) -> RingSlot:
        """The slot to use next, the small one if ``num_bytes`` fit it; hold ``lock`` meanwhile."""
        slots = self._shared[direction] if self._is_other_at_work(direction) else self._alone
        assert slots is not None, "a ring is opened before it is used"
        is_small = num_bytes is not None and num_bytes <= slots.small.num_bytes
        slot = slots.small if is_small else next(slots.in_turn)
        store = direction is Direction.STORE
        self._latest[direction] = slot.copied_out if store else slot.scattered
        return slot

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self._alone, self._shared, self._latest = None, {}, {}
        self._streams = []
        self._handles.close()

    def _is_other_at_work(self, direction: Direction) -> bool:
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        event = self._latest.get(other)
        if event is None:
            return False
        if self._driver.event_is_done(event):
            del self._latest[other]  # no need to ask until it takes a slot again
            return False
        return True

    def _take_all(self) -> None:
        driver, large, small = self._driver, self._large_bytes, self._small_bytes
        size = NUM_LARGE * large + NUM_SMALL * small
        base = self._handles.take(driver.alloc_device(size), driver.free_device)
        a, b, c, d = (RingPart(base + number * large) for number in range(NUM_LARGE))
        end = base + NUM_LARGE * large
        s, t = (RingPart(end + number * small) for number in range(NUM_SMALL))
        self.inbound, self.bypass, self.for_ids = (self._stream() for _ in range(3))
        streams = [self._stream() for _ in range(NUM_LARGE + NUM_SMALL)]
        slot = self._slot
        alone = Slots(
            (slot((a, b), 2 * large, streams[0]), slot((c, d), 2 * large, streams[2])),
            slot((s, t), 2 * small, streams[4]),
        )
        self._shared = {
            Direction.STORE: Slots(
                (slot((a,), large, streams[0]), slot((b,), large, streams[1])),
                slot((s,), small, streams[4]),
            ),
            Direction.LOAD: Slots(
                (slot((c,), large, streams[2]), slot((d,), large, streams[3])),
                slot((t,), small, streams[5]),
            ),
        }
        self._alone = alone

    def _slot(self, parts: tuple[RingPart, ...], num_bytes: int, stream: int) -> RingSlot:
        driver = self._driver
        events = (
            self._handles.take(driver.create_event(timing=False), driver.destroy_event)
            for _ in range(4)
        )
        return RingSlot(parts, num_bytes, stream, *events)

    def _stream(self) -> int:
        driver = self._driver
        stream = driver.create_stream(Priority.HIGH)
        self._streams.append(self._handles.take(stream, driver.destroy_stream))
        return stream


def _whole_pages(num_bytes: int) -> int:
    return max(ALIGNMENT, num_bytes // ALIGNMENT * ALIGNMENT)
