"""A cap on bytes a second: kept, and never in the way of others for bytes that did not move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.driven_store import BLOCK_BYTES, SAYS_NO, Busy, driven, run

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.health import Bandwidth


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=50))
def test_a_cap_is_kept_over_any_stretch(moves: list[tuple[int, float]]) -> None:
    rate, now, sent = 10**6, 1000.0, []
    cap = Bandwidth(rate)
    for num_bytes, pause in moves:
        now += pause
        while wait := cap.take(num_bytes, now):
            now += wait
        sent.append((now, num_bytes))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            passed = sum(n for _, n in sent[first:last])  # the last has only begun
            assert passed <= rate * (sent[last][0] - sent[first][0] + 0.05) + 1


@pytest.fixture
def capped() -> Iterator[Busy]:
    """A block a second."""
    with driven(bandwidth=BLOCK_BYTES) as made:
        yield made


def test_orders_given_up_while_they_wait_do_not_stop_the_line(capped: Busy) -> None:
    """Seen red where bytes were claimed before the wait: the line was taken for ever."""

    async def story() -> None:
        for _ in range(10):
            order = capped.order(8, within=1.5, way=Way.READ)
            for _ in range(16):
                await capped.settle(0.1)
                await capped.answer(SAYS_NO)
            reasons = list((await order).reasons.values())
            assert 0 < reasons.count(SAYS_NO.reason) < 8, "some, and no more than the cap lets"

    run(capped, story)
