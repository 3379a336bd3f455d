"""The driver says no, at every call we make: a failed receipt, the next transfer works, no leak."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from tests.fakes.driver import NOT_SUPPORTED, FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import PATHS, Rig, both

from kvferry.errors import DriverError
from kvferry.transfer.driver import Addresses, BatchForm
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.direct import DmaPath
from kvferry.types import Outcome


def one_round(rig: Rig) -> list[Outcome]:
    """A store, then a load when its receipt is there."""
    outcomes = []
    for start in (lambda: rig.store([1, 2], [3, 4]), lambda: rig.load([3, 4], [5, 6])):
        transfer = start()
        outcomes.append(rig.drain()[transfer].outcome)
    return outcomes


def transfer_works(rig: Rig) -> None:
    stored = [rig.kv.block(b) for b in (1, 2)]
    rig.store([1, 2], [0, 1])
    rig.drain_ok()
    rig.load([0, 1], [5, 6])
    rig.drain_ok()
    assert [rig.kv.block(b) for b in (5, 6)] == stored


def calls_of_a_round(path: str) -> tuple[int, list[str]]:
    """Which calls one round makes, and how many came before it."""
    rig = Rig(path=path, seed=5)
    before = len(rig.driver.calls)
    assert one_round(rig) == [Outcome.OK] * 2
    calls = rig.driver.calls[before:]
    rig.close()
    return before, calls


@pytest.mark.parametrize("path", PATHS)
def test_every_call_refused_once(path: str) -> None:
    before, calls = calls_of_a_round(path)
    assert {"record_event", "stream_wait_event", "event_is_done", "current"} <= set(calls)
    for index in range(len(calls)):
        rig = Rig(path=path, seed=5)
        rig.driver.fail_at(before + index)
        outcomes = one_round(rig)
        # Threads and polls do not meet in the same order twice: see which call it was this time.
        refused = rig.driver.calls[before + index : before + index + 1]
        # What the driver will not take back is lost, but it is not the transfer's fault.
        give_back = bool(refused) and refused[0].startswith(("destroy", "free"))
        failed = bool(refused) and not give_back
        assert outcomes.count(Outcome.FAILED) == failed, refused
        transfer_works(rig)
        for events in (rig.engine._order_events, rig.engine._timing_events):
            assert sorted(events._free) == sorted(event for _, event in events._all._taken)
        rig.close()
        assert sum(rig.driver.leaks().values()) == give_back, refused


class Spiteful(FakeDriver):
    """Refuses a copy of its choice, and then perhaps the fence that should follow."""

    copies_until_refusal = 0
    refuses_fence_too = True
    fences_to_refuse = 0

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self._count_down()
        super().copy_async(dst, src, num_bytes, stream)

    def copy_batch_async(
        self, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
    ) -> None:
        self._count_down()
        super().copy_batch_async(dsts, srcs, sizes, stream)

    def _count_down(self) -> None:
        if self.copies_until_refusal:
            self.copies_until_refusal -= 1
            if not self.copies_until_refusal:
                self.fences_to_refuse = int(self.refuses_fence_too)
                raise DriverError("copy: refused", code=1)

    def record_event(self, event: int, stream: int) -> None:
        if self.fences_to_refuse:
            self.fences_to_refuse -= 1
            raise DriverError("record_event: refused", code=1)
        super().record_event(event, stream)


@pytest.mark.parametrize("fence", ["fenced", "fence refused"])
@pytest.mark.parametrize(
    "nth",
    [1, 2, 3],
)
def test_a_receipt_waits_for_the_streams_of_the_ring(nth: int, fence: str) -> None:
    """A copy is refused, perhaps the fence too, behind what a ring's own streams already hold."""
    for seed in range(2):
        driver = Spiteful(seed=seed)
        rig = Rig(make_kv("split", page=1024), path="kernels", driver=driver, seed=seed)
        transfer_works(rig)
        driver.timeline.late = rig.ring_streams()
        driver.copies_until_refusal = nth
        driver.refuses_fence_too = fence == "fence refused"
        blocks, places = [1, 2, 3, 4], [3, 5, 7, 1]
        transfer = rig.store(blocks, places)
        receipt = rig.drain()[transfer]
        assert receipt.outcome is Outcome.FAILED
        assert "copy: refused" in receipt.reason
        assert not any(driver.timeline.streams[s].queue for s in driver.timeline.late)
        transfer_works(rig)
        rig.close()
        assert driver.leaks() == {}


@pytest.mark.parametrize(
    ("name", "nth"), [("create_stream", 2), ("create_stream", 3), ("current", 2)]
)
def test_refused_while_opening(name: str, nth: int) -> None:
    driver = FakeDriver()
    driver.fail(name, nth)  # the first of each are the rig's own
    with pytest.raises(DriverError):
        Rig(driver=driver)
    assert driver.leaks() == {}


@pytest.mark.parametrize("name", ["destroy_stream", "destroy_event"])
def test_refused_while_closing_gives_back_the_rest(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    transfer_works(rig)
    rig.driver.fail(name)
    rig.close()
    assert sum(rig.driver.leaks().values()) == 1  # the one the driver would not take back
    assert "not given back" in caplog.text


@pytest.mark.parametrize("refused_fences", [0, 2])
def test_a_receipt_waits_for_the_part_already_queued(refused_fences: int) -> None:
    """Half a transfer is on its way when the driver refuses the rest, and perhaps its end too."""
    rig = Rig(make_kv("layers"), path="one by one", patience=60.0)
    stream = rig.stream(Direction.STORE)
    rig.driver.timeline.frozen = {stream}
    rig.driver.fail("copy_async", nth=4)
    for nth in range(refused_fences):
        rig.driver.fail("record_event", nth=3 + nth)  # after those behind compute and at the start
    transfer = rig.store([1, 2], [3, 4])
    rig.wait_until_queued()
    for _ in range(50):
        assert rig.engine.poll() == []
    rig.driver.timeline.frozen = set()
    receipt = rig.drain()[transfer]
    assert receipt.outcome is Outcome.FAILED
    assert "copy_async" in receipt.reason  # the first fault, not the last
    assert not rig.driver.timeline.streams[stream].queue


def test_a_dead_device_fails_everything_and_delays_no_caller() -> None:
    rig = Rig(patience=0.02)
    transfers = [rig.store([i], [i]) for i in range(3)] + [rig.load([5], [5])]
    rig.wait_until_queued()
    rig.driver.die()
    receipts = rig.drain()
    assert set(receipts) == set(transfers)
    later = rig.store([0], [0])
    assert rig.drain()[later].outcome is Outcome.FAILED
    rig.engine.close()  # does not raise, does not hang
    rig.opened.remove(rig)  # a dead driver takes nothing back


class BrokenPath(DmaPath):
    """Raises something that is no DriverError, as a bug would."""

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        raise ZeroDivisionError("a bug")


class BrokenQuestion(DmaPath):
    def is_quick(self, job: CopyJob) -> bool:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("broken", [BrokenPath, BrokenQuestion])
def test_a_bug_in_a_path_is_a_failed_receipt(broken: Callable[..., DmaPath]) -> None:
    rig = Rig(path=both(broken))
    transfer = rig.store([0], [0])
    receipt = rig.drain()[transfer]
    assert receipt.outcome is Outcome.FAILED
    assert "ZeroDivisionError: a bug" in receipt.reason


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "refused"])
def test_without_the_batch_copy_it_loops_and_says_so_once(
    absent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    form = BatchForm.ABSENT if absent else BatchForm.WITHOUT_FAIL_INDEX
    rig = Rig(path="dma", driver=FakeDriver(batch_form=form))
    if not absent:
        rig.driver.fail("copy_batch_async", code=NOT_SUPPORTED)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            transfer_works(rig)
    assert caplog.text.count("batch copies are not available") == 1
    assert rig.driver.batch_form is BatchForm.ABSENT
    assert rig.driver.calls.count("copy_batch_async") == (0 if absent else 1)


def test_any_other_refusal_of_the_batch_copy_is_not_papered_over() -> None:
    rig = Rig(path="dma")
    rig.driver.fail("copy_batch_async", code=1)
    transfer = rig.store([0], [0])
    assert rig.drain()[transfer].outcome is Outcome.FAILED
    assert rig.driver.batch_form is BatchForm.WITHOUT_FAIL_INDEX
    assert "copy_async" not in rig.driver.calls
    transfer_works(rig)


@pytest.mark.parametrize("name", ["record_event", "stream_wait_event", "create_event"])
def test_the_barrier_raises_when_it_cannot_hold(name: str) -> None:
    rig = Rig()
    rig.driver.timeline.frozen = {rig.stream(Direction.LOAD)}
    rig.load([0], [0])
    rig.wait_until_queued()
    if name == "create_event":  # no event left to reuse
        rig.engine._order_events.take()
    rig.driver.fail(name)
    with pytest.raises(DriverError):
        rig.engine.order_compute_after_loads()
    rig.driver.timeline.frozen = set()
    rig.drain_ok()
