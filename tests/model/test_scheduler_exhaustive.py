"""Every interleaving of two requests and up to two ranks, for sizes small enough to see it all.

Each test prints how many states and transitions it visited and asserts a minimum, so that the
exploration cannot shrink unnoticed. Every state is checked as in the random tests, every copy
checks that its memory is its own, every load that its bytes are right, and every end that nothing
is left behind.

One-line breaks that this exploration was seen to catch: a flight that lands at its first receipt, a
failed receipt taken for a good one, device blocks released at the deadline instead of the landing.
"""

from __future__ import annotations

import pytest
from tests.model.explore import Scenario, explore
from tests.model.simulation import Shape

from kvferry.cache.reach import FullAttention, SlidingWindow

FULL = (FullAttention(4),)
SAME = ((1,), (1,))
SHARED = ((1, 2), (1, 3))
LONGER = ((1, 2), (1,))

TWO_RANKS = Shape(FULL, SAME, num_ranks=2, num_slots=2, num_device_blocks=3)

SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "a shared beginning": (
        Scenario(Shape(FULL, SHARED, num_ranks=2, num_slots=3, num_device_blocks=5)),
        1500,
    ),
    "a copy fails": (Scenario(TWO_RANKS, (2, 1), {"fail": 1}), 500),
    "deadlines pass": (Scenario(TWO_RANKS, (1, 1), {"expire": 1}), 300),
    "preempted": (Scenario(TWO_RANKS, (2, 1), {"preempt": 1}), 800),
    "aborted": (Scenario(TWO_RANKS, (2, 1), {"abort": 1}), 350),
    "everything is forgotten": (Scenario(TWO_RANKS, (1, 1), {"reset": 1}), 200),
    "both ranks die": (Scenario(TWO_RANKS, (1, 1), {"lose": 2}), 150),
    "one slot for two": (
        Scenario(
            Shape(FULL, ((1,), (2,)), num_ranks=1, num_slots=1, num_device_blocks=3),
            (2, 1),
            pins=True,
        ),
        100,
    ),
    "evicted while pinned": (
        Scenario(
            Shape(FULL, LONGER, num_ranks=1, num_slots=2, num_device_blocks=4),
            (1, 1),
            {"evict": 1},
            pins=True,
        ),
        100,
    ),
    "a window besides": (
        Scenario(
            Shape(
                (FullAttention(4), SlidingWindow(4, window=4)),
                LONGER,
                num_ranks=1,
                num_slots=4,
                num_device_blocks=4,
            )
        ),
        100,
    ),
}


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs by counting, or no state would ever be met twice."""
    monkeypatch.setattr("kvferry.scheduler.scheduler.new_epoch", lambda before: before + 1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, least = SCENARIOS[name]
    report = explore(scenario)
    with capsys.disabled():
        print(f"\n  {name}: {report}")
    assert report.states >= least
    assert report.ends > 0
    assert report.loads > 0, "no load ever landed: nothing was tested"
    for disturbance in scenario.disturbances:
        assert report.actions["copy" if disturbance == "fail" else disturbance] > 0
