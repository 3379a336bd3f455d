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


def test_an_abandoned_call_does_not_block_the_next(lane: SerialExecutor[int]) -> None:
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
