"""A job fails halfway around the ring: its receipt waits for all that it has queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.fakes.kv import make_kv
from tests.fakes.rig import LONG, Rig

from kvferry.transfer.job import Direction
from kvferry.transfer.paths.direct import HostRuns
from kvferry.transfer.paths.staged import Ring
from kvferry.types import Outcome, TransferId

COUNT = 12
STORED = list(range(COUNT, 2 * COUNT))


@contextmanager
def opened(page: int, seed: int) -> Iterator[tuple[Rig, Ring]]:
    kv = make_kv("split", page=page, num_blocks=2 * COUNT, seed=seed)
    rig = Rig(kv, path="kernels", num_slots=2 * COUNT, seed=seed)
    for start in (rig.store, rig.load):
        start([0], [0])
        rig.drain_ok()  # everything is compiled
    yield rig, rig.ring()
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


def test_a_receipt_waits_for_what_an_interrupt_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own thread queues the copy, and the user presses Ctrl-C."""
    with opened(512, seed=0) as (rig, ring):
        rig.driver.timeline.frozen = {ring.small.stream}
        path = rig.engine._queues[Direction.STORE].path

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(path, "is_quick", lambda _: True)
            patched.setattr(HostRuns, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rig.store(STORED, STORED)
        assert rig.engine.num_in_flight == 1
        check_receipt_waits(rig, TransferId(3), ring.small.stream)


def test_a_receipt_waits_for_a_gather_that_no_copy_follows() -> None:
    """The kernel is queued when the driver refuses to say when it ends."""
    with opened(512, seed=0) as (rig, ring):
        frozen = ring.small.stream
        rig.driver.timeline.frozen = {frozen}
        rig.driver.fail("record_event", nth=4)  # after those behind compute, at the start, of ids
        check_receipt_waits(rig, rig.store(STORED, STORED), frozen)
        store_now(rig, STORED)
        rig.drain_ok()
        assert is_stored(rig, STORED)


def test_a_receipt_waits_for_ids_that_no_kernel_waits_for() -> None:
    """They are on their way when the driver refuses to say when they arrive."""
    with opened(512, seed=0) as (rig, ring):
        rig.driver.timeline.frozen = {ring.id_stream}
        rig.driver.fail("record_event", nth=3)  # after those behind compute and at the start
        check_receipt_waits(rig, rig.store(STORED, STORED), ring.id_stream)
