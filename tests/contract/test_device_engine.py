"""What the engine promises whoever calls it: it returns at once, loses nothing, closes cleanly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import Rig, both

from kvferry.errors import ClosedError, DeadlineError, LayoutError
from kvferry.transfer.engine.gpu import GpuEngine
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.direct import DmaPath
from kvferry.types import Outcome, Receipt


class QuickPath(DmaPath):
    """Remembers which threads called it."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(driver)
        self.seen: list[str] = []

    def is_quick(self, job: CopyJob) -> bool:
        return True

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        self.seen.append(threading.current_thread().name)
        super().enqueue(job, stream, ready)


class SlowPath(QuickPath):
    """Waits for the test before it enqueues, on a thread unless ``quick``."""

    quick = False

    def __init__(self, driver: FakeDriver, gate: threading.Event) -> None:
        super().__init__(driver)
        self._gate = gate
        self.entered = threading.Event()

    def is_quick(self, job: CopyJob) -> bool:
        return self.quick

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        self.entered.set()
        assert self._gate.wait(60.0)
        super().enqueue(job, stream, ready)


def test_a_quick_path_is_queued_by_the_caller() -> None:
    rig = Rig(path=both(QuickPath))
    path: Any = rig.engine._queues[Direction.LOAD].path
    rig.load([1], [1])
    rig.load([2], [2], in_parts=True)
    assert set(path.seen) == {threading.current_thread().name}
    rig.drain_ok()


def test_a_kernel_loads_on_the_callers_thread_once_it_is_prepared() -> None:
    rig = Rig(path="kernels")
    path = rig.engine._queues[Direction.LOAD].path
    assert not any(map(path.is_quick, rig.engine._jobs.samples()))
    rig.engine.prepare()
    assert all(
        path.is_quick(job) for job in rig.engine._jobs.samples() if job.direction is Direction.LOAD
    )
    rig.load([1], [1], in_parts=True)
    assert not rig.engine._queues[Direction.LOAD].num_unqueued
    rig.drain_ok()


def test_a_slow_path_never_holds_the_caller_nor_the_other_direction() -> None:
    gate = threading.Event()
    rig = Rig(
        path=lambda driver: {
            Direction.STORE: SlowPath(driver, gate),
            Direction.LOAD: DmaPath(driver),
        }
    )
    store = rig.store([0], [0])
    load = rig.load([3], [3])
    receipts: list[Receipt] = []
    while not receipts:
        receipts = rig.engine.poll()
    assert [receipt.transfer_id for receipt in receipts] == [load]
    gate.set()
    assert list(rig.drain()) == [store]


def test_a_quick_copy_waits_its_turn_behind_a_slow_one() -> None:
    gate = threading.Event()
    rig = Rig(path=lambda driver: dict.fromkeys(Direction, SlowPath(driver, gate)))
    first = rig.store([0], [0])
    path: Any = rig.engine._queues[Direction.STORE].path
    path.quick = True
    second = rig.store([1], [0])  # the same slot: the later store must win
    gate.set()
    assert list(rig.drain()) == [first, second]
    assert rig.slot(0) == rig.kv.block(1)
    assert path.seen == ["kvferry-store"] * 2


def test_a_caller_waits_for_a_thread_that_hangs_no_longer_than_its_time() -> None:
    gate = threading.Event()
    rig = Rig(path=lambda driver: dict.fromkeys(Direction, SlowPath(driver, gate)))
    rig.load([4], [2])
    path: Any = rig.engine._queues[Direction.LOAD].path
    assert path.entered.wait(60.0)
    rig.engine.close_timeout = 0.05
    with pytest.raises(DeadlineError):
        rig.engine.order_compute_after_loads()
    gate.set()
    rig.engine.close_timeout = 60.0
    rig.engine.order_compute_after_loads()
    rig.drain_ok()
    assert rig.kv.block(2) == rig.slot(4)


def test_close_drains_and_the_receipts_stay_to_be_polled() -> None:
    rig = Rig()
    transfer = rig.store([1], [1])
    rig.engine.close()
    assert rig.slot(1) == rig.kv.block(1)
    receipts = rig.engine.poll()
    assert [(r.transfer_id, r.outcome) for r in receipts] == [(transfer, Outcome.OK)]
    assert rig.engine.poll() == []


def test_use_after_close_is_refused() -> None:
    rig = Rig()
    with rig.engine:
        pass
    with pytest.raises(ClosedError):
        rig.store([0], [0])
    with pytest.raises(ClosedError):
        rig.engine.order_compute_after_loads()


def test_a_device_that_never_ends_does_not_hold_close_for_ever() -> None:
    rig = Rig()
    rig.engine.close_timeout = 0.05
    rig.driver.timeline.frozen = {rig.compute}
    transfer = rig.store([0], [0])
    assert rig.engine.drain(0.01) == []
    rig.engine.close()
    (receipt,) = rig.engine.poll()
    assert receipt.transfer_id == transfer
    assert "still in flight" in receipt.reason
    rig.let_go()
    assert rig.driver.leaks() == {}


def test_a_block_larger_than_a_slot_is_refused_when_the_engine_is_made() -> None:
    kv = make_kv("layers")
    driver = FakeDriver()
    with pytest.raises(LayoutError, match="a block of group 0 has 144 bytes, a host slot only 100"):
        GpuEngine(
            driver,
            [kv.layout],
            host_base=4096,
            host_pitch=100,
            num_slots=1,
            compute_stream=lambda: 0,
            paths=both(DmaPath)(driver),
        )
    assert driver.calls == []


def test_compute_may_be_the_default_stream() -> None:
    rig = Rig()
    rig.engine._compute_stream = lambda: 0
    wrote = rig.fresh()
    with rig.driver.current():
        rig.driver.enqueue_host_function(0, lambda: rig.kv.set_block(1, wrote))
    rig.driver.timeline.late = {0}
    rig.store([1], [1])
    rig.drain_ok()
    assert rig.slot(1) == wrote
