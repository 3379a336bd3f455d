"""A job fails halfway around the ring that both directions share: the other's bytes stay right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import LONG, Rig

from kvferry.transfer.job import Direction
from kvferry.transfer.paths.staged import Ring
from kvferry.types import Outcome, TransferId

COUNT = 12
LOADED, STORED, LATER = (list(range(first, first + COUNT)) for first in (0, COUNT, 2 * COUNT))


class Doorman:
    """The ring's lock, that lets others go first: before a thread's ``nth`` turn, or after it."""

    def __init__(self, thread: str, nth: int, others: Callable[[], None], *, after: bool) -> None:
        self._lock = threading.Lock()
        self._thread = thread
        self._turn = 2 * nth - (0 if after else 1)  # every turn has a beginning and an end
        self._others = others

    def __enter__(self) -> None:
        self._look()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        self._look()

    def _look(self) -> None:
        if threading.current_thread().name == self._thread:
            self._turn -= 1
            if self._turn == 0:
                self._others()


class Prompt(FakeDriver):
    """Whatever can have run by the time somebody asks has run."""

    def event_is_done(self, event: int) -> bool:
        self.timeline.run_all()
        return super().event_is_done(event)


@contextmanager
def opened(page: int, seed: int) -> Iterator[tuple[Rig, Ring]]:
    kv = make_kv("split", page=page, num_blocks=3 * COUNT, seed=seed)
    rig = Rig(kv, path="staged", num_slots=3 * COUNT, seed=seed)
    rig.store([0], [0])
    rig.drain_ok()  # a ring that is open, and everything compiled
    yield rig, rig.engine._paths["staged"]._ring  # type: ignore[attr-defined]
    rig.driver.timeline.frozen = set()
    rig.close()
    assert rig.driver.leaks() == {}


def store_now(rig: Rig, places: list[int]) -> None:
    """A store that is queued when this returns, though not copied."""
    rig.host[places] = 0xEE
    rig.store(places, places)
    assert rig.engine._queues[Direction.STORE].flush(LONG)


def check_receipt_waits(rig: Rig, transfer: TransferId, frozen: int) -> None:
    """The failed transfer has no receipt before its work on the frozen stream has run."""
    rig.wait_until_queued()
    assert rig.driver.timeline.streams[frozen].queue
    for _ in range(50):
        assert rig.engine.poll() == []
    rig.driver.timeline.frozen = set()
    assert rig.drain()[transfer].outcome is Outcome.FAILED
    assert not rig.driver.timeline.streams[frozen].queue


def is_stored(rig: Rig, places: list[int]) -> bool:
    return [rig.slot(place) for place in places] == [rig.kv.block(place) for place in places]


@pytest.mark.parametrize("seed", range(3))
def test_a_failed_load_does_not_free_what_a_store_has_since_filled(seed: int) -> None:
    """The load is through with a slot, a store fills it, and then the load fails."""
    with opened(512, seed) as (rig, ring):
        lane = rig.stream(Direction.STORE)

        def others() -> None:
            rig.driver.timeline.run_all()  # the load's first chunk is where it should be
            rig.driver.timeline.frozen = {lane}
            store_now(rig, STORED)
            rig.driver.fail("event_is_done")  # the load's next call: which slot may it take?

        ring.lock = Doorman("kvferry-load", 2, others, after=False)  # type: ignore[assignment]
        load = rig.load(LOADED, LOADED)
        rig.wait_until_queued()
        store_now(rig, LATER)
        rig.driver.timeline.run_all()
        rig.driver.timeline.frozen = set()
        receipts = rig.drain()
        assert receipts.pop(load).outcome is Outcome.FAILED
        assert {receipt.outcome for receipt in receipts.values()} == {Outcome.OK}
        assert is_stored(rig, STORED)
        assert is_stored(rig, LATER)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_failed_load_has_queued_does_not_run_over_a_store(seed: int) -> None:
    """Half a chunk is on its way into a slot when the driver refuses the rest of it."""
    with opened(512, seed) as (rig, ring):
        lane = rig.stream(Direction.STORE)
        timeline = rig.driver.timeline
        timeline.frozen = {ring.inbound, lane}
        ring.lock = Doorman(  # type: ignore[assignment]
            "kvferry-load", 1, lambda: store_now(rig, STORED), after=True
        )
        rig.driver.fail("copy_async", nth=2)  # the ids; the bytes came before, the first by one
        rig.host[LOADED] = 0x11
        load = rig.load(LOADED, LOADED)
        rig.wait_until_queued()
        timeline.run_all()
        timeline.frozen = {lane}
        timeline.run_all()
        timeline.frozen = set()
        receipts = rig.drain()
        assert receipts.pop(load).outcome is Outcome.FAILED
        assert {receipt.outcome for receipt in receipts.values()} == {Outcome.OK}
        assert is_stored(rig, STORED)


def test_a_receipt_waits_for_what_an_interrupt_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without threads the user's own one copies, and the user presses Ctrl-C."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(512, seed=0) as (rig, ring):
        rig.driver.timeline.frozen = {ring.inbound}
        copy = rig.driver.copy_async

        def interrupt(dst: int, src: int, num_bytes: int, stream: int) -> None:
            if stream != ring.inbound:  # the ids; the bytes came before
                raise KeyboardInterrupt
            copy(dst, src, num_bytes, stream)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            patched.setattr(rig.driver, "copy_async", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rig.load(LOADED, LOADED)
        assert rig.driver.timeline.streams[ring.inbound].queue
        for _ in range(50):
            assert rig.engine.poll() == []
        rig.driver.timeline.frozen = set()
        (receipt,) = rig.drain().values()
        assert receipt.outcome is Outcome.FAILED
        assert not rig.driver.timeline.streams[ring.inbound].queue


def test_a_receipt_waits_for_a_head_that_nothing_followed() -> None:
    """A store's first kernel bypasses the ring: a fault before the first slot is taken finds it."""
    with opened(512, seed=0) as (rig, ring):
        rig.load([0], [0])
        rig.drain_ok()  # so that the ring must ask whether a load still has part of it
        rig.driver.timeline.frozen = {ring.bypass}
        # Asked: are the last ids read, is the model done, and then the ring.
        rig.driver.fail("event_is_done", nth=3)
        store = rig.store(STORED, STORED)
        check_receipt_waits(rig, store, ring.bypass)
        store_now(rig, STORED)
        rig.drain_ok()
        assert is_stored(rig, STORED)


def test_a_receipt_waits_for_a_head_that_cannot_be_asked_about() -> None:
    """All is queued, and then the driver refuses to say whether the first kernel has run."""
    with opened(512, seed=0) as (rig, ring):
        rig.driver.__class__ = Prompt  # an idle card: so there is a head
        rig.driver.timeline.frozen = {ring.bypass}
        rig.driver.fail("stream_is_idle", nth=2)  # after the model's: whether it is busy
        store = rig.store(STORED, STORED)
        check_receipt_waits(rig, store, ring.bypass)


def test_a_receipt_waits_for_ids_that_no_kernel_waits_for() -> None:
    """They are on their way when the driver refuses to say when they arrive."""
    with opened(512, seed=0) as (rig, ring):
        rig.driver.timeline.frozen = {ring.for_ids}
        rig.driver.fail("record_event", nth=3)  # after those behind compute and at the start
        load = rig.load(LOADED, LOADED)
        check_receipt_waits(rig, load, ring.for_ids)


def test_kernels_are_prepared_without_the_lock_of_the_ring() -> None:
    """Tables are taken and given back by calls that wait for the device."""
    rig = Rig(path="staged")
    ring = rig.engine._paths["staged"]._ring  # type: ignore[attr-defined]
    taken: list[bool] = []

    class Watched(FakeDriver):
        def alloc_host(self, num_bytes: int) -> int:
            taken.append(ring.lock.locked())
            return super().alloc_host(num_bytes)

    rig.driver.__class__ = Watched
    rig.store([1, 2], [3, 4])
    rig.drain_ok()
    assert taken
    assert not any(taken)
