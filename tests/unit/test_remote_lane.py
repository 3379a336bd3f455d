"""Blocking calls in a row: in order, one at a time, and none behind one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvferry.tiers.remote.mooncake import SerialExecutor

LONG = 30.0


@pytest.fixture
def lane() -> Iterator[SerialExecutor[int]]:
    made: SerialExecutor[int] = SerialExecutor("test-lane")
    yield made
    made.close()


def test_calls_run_in_order_in_one_thread_and_what_they_raise_is_theirs(
    lane: SerialExecutor[int],
) -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> int:
        seen.append((number, threading.get_ident()))
        if number == 3:
            raise ValueError("three")
        return number

    calls = [lane.submit(lambda number=number: note(number)) for number in range(6)]  # type: ignore[misc]
    with pytest.raises(ValueError, match="three"):
        calls.pop(3).result(LONG)
    assert [call.result(LONG) for call in calls] == [0, 1, 2, 4, 5]
    assert [number for number, _ in seen] == list(range(6))
    assert len({thread for _, thread in seen}) == 1


def test_a_call_that_was_left_stands_in_nobodys_way(lane: SerialExecutor[int]) -> None:
    gate, has_begun = threading.Event(), threading.Event()

    def hang() -> int:
        has_begun.set()
        gate.wait(LONG)
        return 1

    hung, behind = lane.submit(hang), lane.submit(lambda: 2)
    assert has_begun.wait(LONG)
    assert not behind.done()
    lane.abandon(hung, never_begun=-1)
    assert behind.result(LONG) == 2
    assert lane.submit(lambda: 3).result(LONG) == 3
    assert not hung.done()
    gate.set()
    assert hung.result(LONG) == 1, "it ends whenever it ends"


def test_a_call_that_was_left_before_it_began_never_begins(lane: SerialExecutor[int]) -> None:
    gate = threading.Event()
    begun: list[int] = []
    first = lane.submit(lambda: int(gate.wait(LONG)))
    second = lane.submit(lambda: begun.append(2) or 2)  # type: ignore[func-returns-value]
    third = lane.submit(lambda: 3)
    lane.abandon(second, never_begun=-1)
    assert second.result(LONG) == -1
    gate.set()
    assert (first.result(LONG), third.result(LONG)) == (1, 3)
    assert not begun
    lane.abandon(third, never_begun=-1)
    assert third.result() == 3, "it is over: nothing to leave"


def test_a_closed_lane_serves_and_keeps_no_thread(lane: SerialExecutor[int]) -> None:
    lane.close()
    assert lane.submit(lambda: 1).result(LONG) == 1
    assert lane.submit(lambda: 2).result(LONG) == 2
