"""One direction's lane: who queues an order, in which order, and who is not held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver

from kvferry.transfer.driver.base import EventPool, Priority
from kvferry.transfer.engine.copy_queue import CopyQueue, PendingCopy
from kvferry.transfer.engine.flags import HostFlags
from kvferry.transfer.paths.contract import Path
from kvferry.types import TransferId


class Numbered(int):
    """A job, as far as a lane looks at one."""

    in_parts = None


class SlowPath(Path):
    """A path that notes who queued what, and waits at a gate first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.queued: list[tuple[Any, str]] = []

    @classmethod
    def open(cls, means: Any) -> SlowPath:
        return cls()

    def enqueue(self, job: Any, stream: int, ready: int | None = None) -> None:
        self.began.set()
        assert self.gate.wait(30)
        self.queued.append((job, threading.current_thread().name))


@pytest.fixture
def path() -> SlowPath:
    return SlowPath()


@pytest.fixture
def lane(path: SlowPath) -> Any:
    driver = FakeDriver()
    with driver.current():
        stream = driver.create_stream(Priority.HIGH)
    pools = [EventPool(driver, timing=timing) for timing in (False, True)]
    picked: Any = path
    lane = CopyQueue(
        "load",
        driver,
        stream,
        *pools,
        pick=lambda *_: picked,
        patience=0.05,
        flags=HostFlags(driver),
        wait_for_load=lambda *_: True,
    )
    yield lane
    path.gate.set()
    lane.close(5)
    with driver.current():
        for pool in pools:
            pool.close()
        driver.destroy_stream(stream)
    driver.close()


def submit(lane: CopyQueue, path: SlowPath, number: int, *, quick: bool = False) -> PendingCopy:
    job: Any = Numbered(number)
    submission = PendingCopy(TransferId(number), job, path)
    lane.submit(submission, quick=quick)
    return submission


def test_who_flushes_queues_what_the_thread_has_not_taken(
    lane: CopyQueue, path: SlowPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_has_thread", lambda: True)  # one that never gets its turn
    for number in range(3):
        submit(lane, path, number)
    assert not path.queued
    assert lane.flush(30)
    assert path.queued == [(number, threading.current_thread().name) for number in range(3)]


def test_orders_stay_in_order_though_two_queue_them(lane: CopyQueue, path: SlowPath) -> None:
    for round_ in range(50):
        path.queued.clear()
        for number in range(6):
            submit(lane, path, number, quick=number % 3 == 2)
        assert lane.flush(30), round_
        assert [job for job, _ in path.queued] == list(range(6))


def test_a_quick_order_does_not_overtake_one_that_waits(lane: CopyQueue, path: SlowPath) -> None:
    path.gate.clear()
    submit(lane, path, 0)
    assert path.began.wait(30)
    submit(lane, path, 1, quick=True)  # returns at once: the thread is inside the one before
    assert not path.queued
    path.gate.set()
    assert lane.flush(30)
    assert [job for job, _ in path.queued] == [0, 1]


def test_a_thread_that_hangs_in_the_driver_holds_a_flush_no_longer_than_its_time(
    lane: CopyQueue, path: SlowPath
) -> None:
    path.gate.clear()
    submit(lane, path, 0)
    assert path.began.wait(30)
    submit(lane, path, 1)
    began = time.monotonic()
    assert not lane.flush(0.05)
    assert time.monotonic() - began < 20
    path.gate.set()
    assert lane.flush(30)


def test_without_a_thread_the_caller_queues(
    lane: CopyQueue, path: SlowPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_has_thread", lambda: False)
    submit(lane, path, 7)
    assert path.queued == [(7, threading.current_thread().name)]


def test_what_is_queued_where_it_is_asked_for_wakes_nobody(
    lane: CopyQueue, path: SlowPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(lane, path, 0)  # the thread is there
    assert lane.flush(30)
    woken: list[int] = []
    monkeypatch.setattr(lane._changed, "notify_all", lambda: woken.append(1))
    lane.hold()
    submission = submit(lane, path, 1)
    lane.begin(1 << 20)
    lane.release()
    assert submission.queued
    assert not woken, "a thread that has nothing to do would take turns with its caller"
    lane.hold()
    submit(lane, path, 2)
    monkeypatch.undo()
    lane.release()  # nobody else would queue it
    assert lane.flush(30)
    assert [job for job, _ in path.queued] == [0, 1, 2]


def test_who_waits_for_an_order_hears_that_it_is_queued(lane: CopyQueue, path: SlowPath) -> None:
    path.gate.clear()
    submission = submit(lane, path, 0)
    assert path.began.wait(30)
    heard: list[bool] = []
    end = time.monotonic() + 600
    waiter = threading.Thread(
        target=lambda: heard.append(lane.wait_until_queued(submission, end)), daemon=True
    )
    waiter.start()
    while not lane._queued._waiters:  # type: ignore[attr-defined]
        time.sleep(1e-3)
    path.gate.set()
    waiter.join(30)
    assert heard == [True]


class PiecePath(SlowPath):
    """Queues every job in four pieces."""

    def pieces(self, job: Any, stream: int, ready: int | None = None) -> Iterator[None]:
        for number in range(4):
            self.queued.append(((job, number), threading.current_thread().name))
            yield


@pytest.mark.parametrize("num_begun", [1, 2, 4, 9])
def test_who_begins_a_copy_queues_its_first_pieces(
    lane: CopyQueue, num_begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "_has_thread", lambda: True)  # one that never gets its turn
    monkeypatch.setattr(lane, "_num_first_pieces", num_begun)
    path = PiecePath()
    lane.hold()
    for number in range(2):
        submit(lane, path, number).num_bytes = 1
    lane.begin(0)
    lane.release()
    every = [(number, piece) for number in range(2) for piece in range(4)]
    begun = min(num_begun, 4) if num_begun <= 4 else len(every)
    assert [job for job, _ in path.queued] == every[:begun]
    assert lane.flush(30)
    assert [job for job, _ in path.queued] == every
    assert lane.num_unqueued == 0
