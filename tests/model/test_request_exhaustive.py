"""Every order of verbs, receipts and accidents over one or two requests, up to some depth.

After every step the laws of ``request_laws`` are checked, and from every state that was reached the
world is led to its end, where nothing may be left.
"""

from __future__ import annotations

import pytest
from tests.model.request_verbs import EVENTS, VERBS, Action, Life, Scenario, explore

from kvferry.scheduler.request import State

SHARED = (Life((1, 2, 3)), Life((1, 2, 4)))
NEXT_TURN = (Life((1, 2, 3)), Life((1, 2, 4, 5), computed=8))

ONE_LOADS: tuple[Action, ...] = (("match", 0), ("load", 0))
ONE_RUNS: tuple[Action, ...] = (("match", 0), ("run", 0))

SCENARIOS: dict[str, tuple[Scenario, set[State], int]] = {
    "alone": (
        Scenario((Life((1, 2, 3)),), kept=(1, 2), num_ranks=2, depth=6),
        {State.UNKNOWN, State.MATCHED, State.LOADING, State.LOADED, State.RUNNING, State.ENDED},
        400,
    ),
    "alone and cold": (
        Scenario((Life((1, 2, 3)),), num_slots=2, depth=7),
        {State.UNKNOWN, State.RUNNING, State.MATCHED, State.LOADING},
        300,
    ),
    "two that share": (
        Scenario(SHARED, kept=(1, 2), begins=ONE_LOADS, depth=4),
        {State.WAITING, State.MATCHED, State.LOADING, State.LOADED, State.RUNNING},
        900,
    ),
    "two that share, each with blocks of its own": (
        Scenario(SHARED, kept=(1, 2), joins_loads=False, begins=ONE_LOADS, depth=3),
        {State.MATCHED, State.LOADING, State.LOADED, State.RUNNING},
        250,
    ),
    "two ranks": (
        Scenario(
            SHARED,
            kept=(1, 2),
            num_slots=3,
            num_ranks=2,
            events=(*EVENTS, "evict"),
            begins=ONE_LOADS,
            depth=4,
        ),
        {State.WAITING, State.MATCHED, State.LOADING, State.LOADED, State.RUNNING},
        1500,
    ),
    "one slot for two": (
        Scenario((Life((1, 2)), Life((3, 4))), num_slots=1, events=("fail",), depth=5),
        {State.UNKNOWN, State.RUNNING, State.ENDED},
        300,
    ),
    "what lies below": (
        Scenario(SHARED, kept=(1,), num_slots=8, below=True, begins=(("match", 0),), depth=3),
        {State.WAITING, State.MATCHED, State.RUNNING},
        250,
    ),
    "the next turn": (
        Scenario(NEXT_TURN, has_rests=True, begins=ONE_RUNS, depth=4),
        {State.LEFT, State.UNKNOWN, State.RUNNING, State.ENDED},
        600,
    ),
    "the next turn where the engine evicts": (
        Scenario(NEXT_TURN, has_rests=True, evicts=True, begins=ONE_RUNS, depth=4),
        {State.LEFT, State.UNKNOWN, State.RUNNING, State.ENDED},
        600,
    ),
}


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs by counting, or no state would ever be met twice."""
    monkeypatch.setattr("kvferry.scheduler.scheduler.new_epoch", lambda before: before + 1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_of_verbs(name: str) -> None:
    scenario, states, least = SCENARIOS[name]
    report = explore(scenario)
    print(f"\n  {name}: {report}")
    assert report.states >= least
    assert states <= set(report.seen), "not all of it was tried"
    assert set(VERBS) <= set(report.verbs)
    for event in {*scenario.events} - {"fail"}:
        assert report.verbs[event]
    assert report.verbs["answer"]
