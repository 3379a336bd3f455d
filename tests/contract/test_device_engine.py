"""What the engine promises whoever calls it: it returns at once, loses nothing, closes cleanly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.planner import FixedPlanner
from tests.fakes.rig import Rig

from kvferry.errors import ClosedError, DeadlineError, LayoutError
from kvferry.transfer.engine import gpu as engine
from kvferry.transfer.engine.gpu import GpuEngine
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.direct import DmaPath, LoopPath
from kvferry.types import Outcome, Receipt


class QuickPath(LoopPath):
    """Remembers which threads called it."""

    name = "quick"
    seen: list[str]

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(driver)
        self.seen = []

    def is_quick(self, job: CopyJob) -> bool:
        return True

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        self.seen.append(threading.current_thread().name)
        super().enqueue(job, stream, ready)


class SlowPath(DmaPath):
    """Waits for the test before it enqueues."""

    def __init__(self, driver: FakeDriver, gate: threading.Event) -> None:
        super().__init__(driver)
        self._gate = gate

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        assert self._gate.wait(60.0)
        super().enqueue(job, stream, ready)


class AskedPlanner(FixedPlanner):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("loop", "loop")
        self.seen: list[tuple[Direction, int, bool]] = []

    def choose(self, direction: Direction, *asked: Any, at_once: bool = False, **_: Any) -> str:
        _layout, num_blocks, busy, *_runs = asked
        self.seen.append((direction, num_blocks, busy))
        return "dma" if at_once else "loop"


def test_what_compute_waits_for_has_a_path_of_its_own() -> None:
    rig = Rig(num_slots=8)
    rig.engine._planner = AskedPlanner()
    loads, stores = [rig.load([1], [1]), rig.load([2], [2], in_parts=True)], []
    for waits in (True, False):
        with rig.engine.starting_here(compute_waits=waits):
            loads.append(rig.load([3], [3]))
            stores.append(rig.store([4], [4]))
    receipts = rig.drain()
    assert {receipts[store].path for store in stores} == {"loop"}
    assert [receipts[load].path for load in loads] == ["loop", "dma", "dma", "loop"]


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether jobs count as large: then their paths are picked by the lane's thread."""
    if request.param:
        monkeypatch.setattr(engine, "QUICK_BYTES", -1)
    return bool(request.param)


def test_a_quick_path_is_queued_by_the_caller_but_for_large_jobs(large: bool) -> None:
    path = None

    def make(driver: FakeDriver) -> QuickPath:
        nonlocal path
        path = QuickPath(driver)
        return path

    rig = Rig(path="quick", paths={"quick": make})
    rig.store([0], [0])
    rig.drain_ok()
    assert path is not None
    assert path.seen == ["kvferry-store" if large else threading.current_thread().name]


def test_a_slow_path_never_holds_the_caller_nor_the_other_direction() -> None:
    gate = threading.Event()

    rig = Rig(paths={"slow": lambda driver: SlowPath(driver, gate), "loop": LoopPath})
    rig.engine._planner = FixedPlanner(store="slow", load="loop")
    store = rig.store([0], [0])
    load = rig.load([3], [3])
    receipts: list[Receipt] = []
    while not receipts:
        receipts = rig.engine.poll()
    assert [receipt.transfer_id for receipt in receipts] == [load]
    gate.set()
    assert list(rig.drain()) == [store]


def test_a_quick_path_waits_its_turn_behind_a_slow_one() -> None:
    gate = threading.Event()
    quick: list[QuickPath] = []

    def make(driver: FakeDriver) -> QuickPath:
        quick.append(QuickPath(driver))
        return quick[0]

    rig = Rig(path="slow", paths={"slow": lambda driver: SlowPath(driver, gate), "quick": make})
    first = rig.store([0], [0])
    rig.engine._planner = FixedPlanner("quick", "quick")
    second = rig.store([1], [0])  # the same slot: the later store must win
    assert quick[0].seen == []
    gate.set()
    assert list(rig.drain()) == [first, second]
    assert rig.slot(0) == rig.kv.block(1)
    assert quick[0].seen == ["kvferry-store"]


def test_close_drains_and_the_receipts_stay_to_be_polled() -> None:
    rig = Rig()
    transfer = rig.store([1], [1])
    rig.engine.close()
    assert rig.slot(1) == rig.kv.block(1)
    receipts = rig.engine.poll()
    assert [(r.transfer_id, r.outcome) for r in receipts] == [(transfer, Outcome.OK)]
    assert rig.engine.poll() == []


@pytest.mark.parametrize("num_begun", [1, 2, 9])
def test_the_caller_begins_copies_and_a_thread_that_hangs_delays_it_no_longer_than_its_time(
    num_begun: int,
) -> None:
    gate, hangs, begun = threading.Event(), threading.Event(), []

    class PiecePath(DmaPath):
        def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
            for number in range(4):
                begun.append(number)
                yield
                if threading.current_thread() is not threading.main_thread():
                    hangs.set()
                    assert gate.wait(60.0)
            super().enqueue(job, stream, ready)

    rig = Rig(path="pieces", paths={"pieces": PiecePath})
    queue = rig.engine._queues[Direction.LOAD]
    queue._num_first_pieces = num_begun
    queue.hold()
    rig.load([4], [2])
    queue.begin(0)
    assert begun == [0, 1, 2, 3][:num_begun]
    rig.engine._close_timeout = 0.05
    queue.release()
    if num_begun < 4:
        assert hangs.wait(60.0)
        with pytest.raises(DeadlineError):
            rig.engine.order_compute_after_loads()
    gate.set()
    rig.engine._close_timeout = 60.0
    rig.engine.order_compute_after_loads()
    rig.drain_ok()
    assert rig.kv.block(2) == rig.slot(4)


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
    rig.engine._close_timeout = 0.05
    rig.driver.timeline.frozen = {rig.compute}
    transfer = rig.store([0], [0])
    assert rig.engine.drain(0.01) == []
    rig.engine.close()
    (receipt,) = rig.engine.poll()
    assert receipt.transfer_id == transfer
    assert "still in flight" in receipt.reason
    rig.let_go()
    assert rig.driver.leaks() == {}


def test_busy_is_whether_compute_has_work_or_will_have(large: bool) -> None:
    rig = Rig()
    planner = rig.engine._planner = AskedPlanner()
    rig.store([0, 1], [0, 1])
    rig.drain_ok()
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: None)
    rig.load([0], [0])
    rig.driver.timeline.frozen = set()
    rig.drain_ok()
    rig.engine._runs_beside = lambda: True  # between two steps compute has nothing to do
    rig.load([0], [0])
    rig.drain_ok()
    assert planner.seen == [(Direction.STORE, 2, False), *2 * [(Direction.LOAD, 1, True)]]


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
            planner=FixedPlanner("loop", "loop"),
            paths={"loop": LoopPath(driver)},
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
