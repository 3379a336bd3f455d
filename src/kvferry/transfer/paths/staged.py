"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   bypass         [head by kernel]
            slot streams     [gather 1]▲[gather 2]──▲[gather 3]──────▲
            the job's                  [copy 1]─────[copy 2─────────][copy 3─────────]
    load    inbound        [copy 1──────────][copy 2──────────][copy 3]
            slot streams                     └▶[scatter 1]     └▶[scatter 2]
            the job's                                                  └▶[scatter 3]

The copy engines run at the full rate of the link and take nothing from the model; the kernel works
inside device memory, where a chunk takes a twentieth of the time. Copies of one direction share a
stream, because a copy engine loses some ten microseconds when it turns to another one. A copy that
waits for a kernel, or a kernel for a copy, starts that much later too: the gathers of a job run
while the job before it is copied, and only the first chunk of the first job, kept small, makes the
link wait. Until it can be copied, a kernel writes a few bytes to host memory. Only what the first
copy of a load, or the first kernel of a store, needs comes before it.

Every slot has a stream for its kernels: beside a model that fills the card, a kernel starts only
when one of the model's ends, and then all waiting chunks must go at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from kvferry.core.quantities import MiB
from kvferry.errors import DriverError
from kvferry.transfer.driver import Driver, EventPool, Handles, Priority
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import (
    Grid,
    IdBuffers,
    Kernels,
    Launcher,
    Prepared,
    RowTable,
    widest,
)
from kvferry.transfer.paths.contract import Means, Path
from kvferry.transfer.paths.direct import HostRuns
from kvferry.transfer.paths.kernel import GRID as DIRECT_GRID

log = logging.getLogger(__name__)

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


class Slots:
    """The slots of one direction: large ones used in turn, and a small one."""

    def __init__(self, large: tuple[RingSlot, ...], small: RingSlot) -> None:
        self.large, self.small = large, small
        self.in_turn = cycle(large)


class Ring:
    """Owns the memory, streams and events of its slots; takes them on ``open``.

    ::

        memory           |    0    |    1    |    2    |    3    |4|5|
        one direction    |      large 0      |      large 1      |   |    fewer, larger copies
        both at once     | store 0 | store 1 | load 0  | load 1  |s|l|    neither waits

    The small slot is for a store's first chunk and a load's last one, which nothing hides. Slots
    may share memory, so a slot is free when all its parts are.

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
        self.streams: list[int] = []
        """All its streams; empty before it is open."""

    @property
    def is_open(self) -> bool:
        return self._alone is not None

    def open(self) -> None:
        """Take the ring's memory, once; DriverError leaves nothing taken."""
        if self.is_open:
            return
        with self.lock:
            if self._alone is None:  # the other direction may have been first
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
        self.streams = []
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
        self.streams.append(self._handles.take(stream, driver.destroy_stream))
        return stream


def _whole_pages(num_bytes: int) -> int:
    return max(ALIGNMENT, num_bytes // ALIGNMENT * ALIGNMENT)


GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

FIRST, HEAD, TAIL = 4 * MiB, 4 * MiB, 3 * MiB
"""A store's first chunk, whose gather no copy hides; the bytes a kernel writes to host memory until
that chunk can be copied (fewer end too soon where the host is slow, more delay the gathers: writes
over the link fill the way to memory); and a load's last chunk, whose scatter no copy hides. The
first and the last use the ring's small slot."""

SCATTERED_HEADS = 3
"""Times the head where host slots are no neighbours: a batch of copies takes that long to queue."""

MIN_SENT_IDS = 64
"""From this many blocks on, ids are worth a copy to the device even where it may be late."""


class StagedPath(Path):
    """Copies through a ring of ``ring_bytes`` device memory, taken on first use.

    Owns the ring, tables and id buffers.
    """

    COMMON = (
        *(widest(to_packed=way, warps=GRID.warps, linear=True) for way in (False, True)),
        widest(to_packed=True, warps=DIRECT_GRID.warps),
    )

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        *,
        ring_bytes: int,
        edges: tuple[int, int, int] = (FIRST, HEAD, TAIL),
    ) -> None:
        self._driver = driver
        self._first, self._head, self._tail = edges
        self._kernels = Kernels(driver, launcher, GRID, linear=True)
        self._direct = Kernels(driver, launcher, DIRECT_GRID)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._ring = Ring(driver, ring_bytes)
        self._events = EventPool(driver, timing=False)

    @classmethod
    def open(cls, means: Means) -> StagedPath:
        assert means.launcher is not None, "opened only where kernels can be launched"
        return cls(means.driver, means.launcher, ring_bytes=means.ring_bytes)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        for _ in self.pieces(job, stream, ready):
            pass

    def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
        """Queue a chunk per step."""
        prepared = self._kernels.get(job)
        ring = self._ring
        ring.open()
        trip = _Trip(job, prepared, stream, ready)
        is_store = job.direction is Direction.STORE
        try:
            if is_store:
                self._begin_store(trip)
            step = self._store_chunk if is_store else self._load_chunk
            while trip.chunk.num_left:
                if trip.slots:
                    yield
                with ring.lock:
                    try:
                        step(trip)
                    except BaseException:
                        # Before the lock goes: to the other direction the slot would look free,
                        # and what is queued for it would run over the bytes that one puts there.
                        self._join_after_fault(trip)
                        raise
            if trip.head and not self._driver.stream_is_idle(ring.bypass):
                self._join((ring.bypass,), stream)
        except BaseException:  # an interrupt too: the pieces before it are queued all the same
            with ring.lock:
                self._join_after_fault(trip)
            raise
        finally:
            for barrier in trip.barriers:
                barrier.close()
            self._ids[job.direction].fence(stream)

    @property
    def streams(self) -> Sequence[int]:
        return self._ring.streams

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        if job.direction is Direction.STORE:
            self._direct.get(job)
        self._ids[job.direction].prepare()
        self._ring.open()

    def is_prepared(self, job: CopyJob, num_before: int) -> bool:
        if not self._ring.is_open or self._kernels.find(job) is None:
            return False
        return self._ids[job.direction].num_free(len(job.device_blocks)) > num_before

    def close(self) -> None:
        with self._driver.current():
            self._ring.close()
            self._events.close()
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()
            self._direct.close()

    # -- the two directions ------------------------------------------------------------------

    def _begin_store(self, trip: _Trip) -> None:
        job, stream = trip.job, trip.stream
        direct = self._direct.get(job)  # before the lock: a new kernel takes long to load
        ids = self._ids[job.direction]
        address = ids.write(job)
        barrier = StreamBarrier(self._driver, self._events, stream, trip.ready)
        trip.barriers = (barrier,)
        barrier.mark()
        if ids.was_idle and barrier.is_open:  # else an earlier job or the model hides the start
            self._store_head(trip, direct, address)
        trip.prepared.begin(job, address)
        trip.barriers = (barrier, StreamBarrier(self._driver, self._events, self._ring.inbound))

    def _store_head(self, trip: _Trip, direct: Prepared, ids: int) -> None:
        """Write the first bytes straight to host memory while the first chunk is made ready.

        The kernel waits for no event: call it only where the job has nothing left to come after.
        """
        job, chunk = trip.job, trip.chunk
        num_bytes = self._head if len(job.run_heads) == 1 else SCATTERED_HEADS * self._head
        if job.num_bytes <= num_bytes + self._first:
            return  # almost the whole job: two kernels would slow each other down
        if direct.rows.shape.row_bytes != trip.prepared.rows.shape.row_bytes:
            return  # host slots are aligned worse than the ring, so rows differ
        chunk.fit(num_bytes)
        arguments = direct.begin(job, ids)
        arguments.packed_base, arguments.packed_pitch = job.host_base, job.host_pitch
        arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
        trip.head = True
        self._direct.launch(direct, self._ring.bypass)

    def _store_chunk(self, trip: _Trip) -> None:
        driver, chunk, stream = self._driver, trip.chunk, trip.stream
        is_first = not trip.slots
        slot = self._ring.next(trip.job.direction, 0 if is_first else None)
        chunk.fit(min(slot.num_bytes, self._first) if is_first else slot.num_bytes)
        trip.slots[slot] = None
        self._gather(trip, slot)
        driver.stream_wait_event(stream, slot.gathered)
        # After the launch: the card need not wait for it.
        runs = trip.runs = trip.runs or HostRuns(trip.job)
        runs.store(driver, chunk.start, chunk.end, slot.address, stream)
        driver.record_event(slot.copied_out, stream)
        slot.free_after(slot.copied_out)
        if not is_first:  # the second gather is awaited too soon to spend time on this
            self._send_ids_if_idle(trip)

    def _gather(self, trip: _Trip, slot: RingSlot) -> None:
        for barrier in trip.barriers:
            barrier.hold(slot.stream)
        self._wait_until_free(slot, slot.stream)
        trip.aim(slot)
        self._kernels.launch(trip.prepared, slot.stream)
        self._driver.record_event(slot.gathered, slot.stream)

    def _send_ids_if_idle(self, trip: _Trip) -> None:
        """Let the gathers to come read ids on the device, if no load's copies would delay them."""
        ids, inbound = self._ids[trip.job.direction], self._ring.inbound
        is_worth_it = len(trip.job.device_blocks) >= MIN_SENT_IDS and trip.chunk.num_left
        if is_worth_it and not ids.is_sent and self._driver.stream_is_idle(inbound):
            trip.prepared.arguments.ids = ids.send(inbound)
            trip.barriers[-1].mark()

    def _load_chunk(self, trip: _Trip) -> None:
        slot = self._copy_in(trip)
        trip.aim(slot)
        if trip.chunk.num_left:
            self._scatter(trip, slot, trip.barriers, slot.stream)
        else:
            self._scatter_last(trip, slot)

    def _copy_in(self, trip: _Trip) -> RingSlot:
        driver, ring, chunk = self._driver, self._ring, trip.chunk
        left, inbound = chunk.num_left, ring.inbound
        slot = ring.next(trip.job.direction, left)
        chunk.fit(slot.num_bytes, keep=self._tail if left > 2 * self._tail else 0)
        trip.slots[slot] = None
        self._wait_until_free(slot, inbound)
        runs = trip.runs = trip.runs or HostRuns(trip.job)
        # Not behind the barrier: a leased slot does not change, so it may be read before the job's
        # stream has finished waiting. Only scatters write blocks that compute may still read.
        runs.load(driver, chunk.start, chunk.end, slot.address, inbound)
        if not trip.barriers:  # after the first copy: the link need not wait for it
            self._begin_scatters(trip)
        driver.record_event(slot.copied_in, inbound)
        return slot

    def _begin_scatters(self, trip: _Trip) -> None:
        job, ring = trip.job, self._ring
        sent = StreamBarrier(self._driver, self._events, ring.for_ids)
        barrier = StreamBarrier(self._driver, self._events, trip.stream, trip.ready)
        trip.barriers = (sent, barrier)
        ids = self._ids[job.direction]
        ids.write(job)
        # Not where the bytes go: between two large copies, a small one and the wait for it cost
        # the link some ten microseconds (one NVIDIA H200).
        trip.prepared.begin(job, ids.send(ring.for_ids))
        sent.mark()
        barrier.mark()

    def _scatter_last(self, trip: _Trip, slot: RingSlot) -> None:
        """The last kernel is what the job waits for, so it runs where the job does.

        The others are waited for before it, not after: when its bytes arrive, theirs have long been
        in place, and nothing is left between the kernel and the job's end.
        """
        for other in trip.slots:
            if other is not slot:
                self._driver.stream_wait_event(trip.stream, other.scattered)
        self._scatter(trip, slot, trip.barriers[:1], trip.stream)

    def _scatter(
        self, trip: _Trip, slot: RingSlot, after: Iterable[StreamBarrier], stream: int
    ) -> None:
        for barrier in after:
            barrier.hold(stream)
        self._driver.stream_wait_event(stream, slot.copied_in)
        self._kernels.launch(trip.prepared, stream)
        self._driver.record_event(slot.scattered, stream)
        slot.free_after(slot.scattered)

    # -- what waits for what -----------------------------------------------------------------

    def _wait_until_free(self, slot: RingSlot, stream: int) -> None:
        for event in slot.busy_until():
            # Asking costs no more than waiting, and spares the card a semaphore between copies.
            if not self._driver.event_is_done(event):
                self._driver.stream_wait_event(stream, event)

    def _join(self, streams: Iterable[int], stream: int) -> None:
        """Bring what ``streams`` hold before anything queued on ``stream`` from now on."""
        event = self._events.take()
        try:
            for other in streams:
                self._driver.record_event(event, other)
                self._driver.stream_wait_event(stream, event)
        finally:
            self._events.give(event)

    def _join_after_fault(self, trip: _Trip) -> None:
        """Order everything queued already before the failed job's receipt.

        If the driver refuses to order it, wait for it here: the memory that a stray copy or kernel
        still touches is reused afterwards. Then the trip has nothing queued any more.
        """
        driver, ring, stream = self._driver, self._ring, trip.stream
        slots, head = tuple(trip.slots), trip.head
        trip.slots.clear()
        trip.head = False
        if not slots and not head:
            return
        streams = dict.fromkeys(
            (ring.inbound, ring.bypass, ring.for_ids, *(slot.stream for slot in slots))
        )
        try:
            self._join(streams, stream)
            for slot in slots:
                # The other direction may have used it since: then it is free after that as well.
                self._wait_until_free(slot, stream)
                driver.record_event(slot.copied_out, stream)
                slot.free_after(slot.copied_out)
            return
        except DriverError as error:
            log.warning("a failed copy cannot be fenced, so it is waited for: %s", error)
        for each in (*streams, stream):
            try:
                driver.synchronize_stream(each)
            except DriverError as error:
                # A device that refuses this too is lost: nothing runs on it any more.
                log.error("a copy could not be waited for: %s", error)


class ChunkCursor:
    """Goes through a job in chunks that fit ring slots; its attributes describe the current chunk.

    Rows ``first_row`` to ``last_row`` of the job are bytes ``start`` to ``end`` of its blocks.
    """

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def num_left(self) -> int:
        """The bytes after this chunk."""
        return self._total - self.end

    def fit(self, num_bytes: int, *, keep: int = 0) -> None:
        """Go on to the next chunk, of at most ``num_bytes``; leave ``keep`` bytes, or none."""
        self.first_row, self.start = self.last_row, self.end
        left = self._total - self.start
        wanted = left - keep if left > keep else left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(self.start + min(wanted, num_bytes))
        self.last_row = max(row, self.first_row + 1)
        self.end = self._rows.position_of(self.last_row)


class StreamBarrier:
    """A point that a job's kernels must come after, on whatever stream they run.

    The point is ``ready`` or, where none was given, all that ``stream`` holds at the mark.
    """

    def __init__(
        self, driver: Driver, events: EventPool, stream: int, ready: int | None = None
    ) -> None:
        self.stream = stream
        self._ready = ready
        self._driver = driver
        self._events = events
        self._event: int | None = None
        self._held: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether nothing was left to wait for at the mark."""
        return self._event is None

    def mark(self) -> None:
        """Set the point here, if anything before is still to be waited for."""
        if self._ready is not None:
            self._event = None if self._driver.event_is_done(self._ready) else self._ready
        elif not self._driver.stream_is_idle(self.stream):
            self._event = self._events.take()
            self._driver.record_event(self._event, self.stream)

    def hold(self, stream: int) -> None:
        """Keep work queued on ``stream`` from now on behind the mark."""
        if self._event is not None and stream not in self._held:
            self._driver.stream_wait_event(stream, self._event)
            self._held.add(stream)

    def close(self) -> None:
        """Every wait has captured the mark, so its event is free for the next job."""
        if self._event is not None and self._ready is None:
            self._events.give(self._event)
        self._event = None


class _Trip:
    """One job being queued: where it is cut, and what it has queued on the path's own streams.

    Made before the first copy, which the link waits for: so later needs are made later.
    """

    head = False
    """Whether a kernel that bypasses the ring has part of it."""
    runs: HostRuns | None = None
    barriers: tuple[StreamBarrier, ...] = ()
    """The points its kernels come after."""

    def __init__(self, job: CopyJob, prepared: Prepared, stream: int, ready: int | None) -> None:
        self.job = job
        self.prepared = prepared
        self.stream = stream
        self.ready = ready
        self.chunk = ChunkCursor(job, prepared.rows)
        self.slots: dict[RingSlot, None] = {}

    def aim(self, slot: RingSlot) -> None:
        """Point the next launch at the chunk at hand, in ``slot``."""
        arguments, chunk = self.prepared.arguments, self.chunk
        # The kernel counts from the job's first byte, the slot from the chunk's.
        arguments.packed_base = slot.address - chunk.start
        arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
