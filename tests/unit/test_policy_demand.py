"""How far ahead to look follows what was taken lately."""

from __future__ import annotations

from kvferry.cache.policies.admission import Watermark


def test_a_burst_is_answered_at_once_and_remembered_a_while() -> None:
    mark = Watermark(most=1000)
    mark.demand(10)
    assert mark.depth == 40
    mark.demand(0)
    assert 20 <= mark.depth < 40
    for _ in range(50):
        mark.demand(0)
    assert mark.depth == 0


def test_between_least_and_most() -> None:
    mark = Watermark(least=5, most=8)
    assert mark.depth == 5
    mark.demand(1000)
    assert mark.depth == 8
