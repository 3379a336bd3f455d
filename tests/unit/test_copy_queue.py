"""One direction's queue: the order of copies, and callers that are not held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver

from kvferry.transfer.driver import EventPool, Priority
from kvferry.transfer.engine.copy_queue import CopyQueue, PendingCopy
from kvferry.transfer.engine.flags import HostFlags
from kvferry.transfer.paths.contract import Path
from kvferry.types import TransferId


class Numbered(int):
    """A job, as far as a queue looks at one."""

    in_parts = None


class SlowPath(Path):
    """A path that notes which thread queued which job, and waits at a gate first."""

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
def queue(path: SlowPath) -> Any:
    driver = FakeDriver()
    with driver.current():
        stream = driver.create_stream(Priority.HIGH)
    pools = [EventPool(driver, timing=timing) for timing in (False, True)]
    picked: Any = path
    queue = CopyQueue(
        "load",
        driver,
        stream,
        *pools,
        pick=lambda *_: picked,
        patience=0.05,
        flags=HostFlags(driver),
        wait_for_load=lambda *_: True,
    )
    yield queue
    path.gate.set()
    queue.close(5)
    with driver.current():
        for pool in pools:
            pool.close()
        driver.destroy_stream(stream)
    driver.close()


def submit(queue: CopyQueue, path: SlowPath, number: int, *, quick: bool = False) -> PendingCopy:
    job: Any = Numbered(number)
    submission = PendingCopy(TransferId(number), job, path)
    queue.submit(submission, quick=quick)
    return submission


def test_orders_stay_in_order_though_two_queue_them(queue: CopyQueue, path: SlowPath) -> None:
    for round_ in range(50):
        path.queued.clear()
        for number in range(6):
            submit(queue, path, number, quick=number % 3 == 2)
        assert queue.flush(30), round_
        assert [job for job, _ in path.queued] == list(range(6))


def test_a_thread_that_hangs_in_the_driver_holds_a_flush_no_longer_than_its_time(
    queue: CopyQueue, path: SlowPath
) -> None:
    path.gate.clear()
    submit(queue, path, 0)
    assert path.began.wait(30)
    submit(queue, path, 1)
    began = time.monotonic()
    assert not queue.flush(0.05)
    assert time.monotonic() - began < 20
    path.gate.set()
    assert queue.flush(30)


def test_without_a_thread_the_caller_queues(
    queue: CopyQueue, path: SlowPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_has_thread", lambda: False)
    submit(queue, path, 7)
    assert path.queued == [(7, threading.current_thread().name)]


class PiecePath(SlowPath):
    """Queues every job in four pieces."""

    def pieces(self, job: Any, stream: int, ready: int | None = None) -> Iterator[None]:
        for number in range(4):
            self.queued.append(((job, number), threading.current_thread().name))
            yield


@pytest.mark.parametrize("num_begun", [1, 2, 4, 9])
def test_the_caller_of_begin_queues_the_first_pieces(
    queue: CopyQueue, num_begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_has_thread", lambda: True)  # one that never gets its turn
    monkeypatch.setattr(queue, "_num_first_pieces", num_begun)
    path = PiecePath()
    queue.hold()
    for number in range(2):
        submit(queue, path, number).num_bytes = 1
    queue.begin(0)
    queue.release()
    every = [(number, piece) for number in range(2) for piece in range(4)]
    begun = min(num_begun, 4) if num_begun <= 4 else len(every)
    assert [job for job, _ in path.queued] == every[:begun]
    assert queue.flush(30)
    assert [job for job, _ in path.queued] == every
    assert queue.num_unqueued == 0
