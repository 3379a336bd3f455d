"""For any request: what it got, and why no more."""

from __future__ import annotations

import json

import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.pools import evict

from kvferry.cache import reach
from kvferry.cache.policies.load_or_compute import Verdict
from kvferry.cache.pool import Pool
from kvferry.hints import Hints
from kvferry.scheduler.journal import Explanation, Reason
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import Health, MatchState, Rank, TierName


def why(desk: Desk, request: str) -> Explanation:
    explanation = desk.scheduler.explain(request)
    assert explanation is not None
    return explanation


def nothing_missed() -> Desk:
    desk = Desk()
    desk.keep("a", story(1, 4), 16)
    desk.match("q", story(1, 4))
    return desk


def evicted() -> Desk:
    desk = Desk(slots=4)
    desk.keep("a", story(1, 4), 16)
    desk.keep("b", story(2, 4), 16)
    desk.match("q", story(1, 4))
    return desk


def never_stored() -> Desk:
    desk = Desk()
    desk.match("q", story(1, 4))
    return desk


def below_threshold() -> Desk:
    desk = Desk(store_threshold=3)
    desk.match("a", story(1, 4))
    desk.keep("a", story(1, 4), 16)
    desk.match("q", story(1, 4))
    return desk


def in_flight() -> Desk:
    desk = Desk()
    desk.store("a", story(1, 4), 16)
    desk.plan()
    desk.match("q", story(1, 4))
    return desk


def other_namespace() -> Desk:
    desk = Desk()
    desk.keep("a", story(1, 4), 16)
    desk.scheduler.reset()
    desk.match("q", story(1, 4))
    return desk


def still_below() -> Desk:
    desk = Desk(tiers=[SlotTier(TierName("disk"), Pool(16), WriteMode.THROUGH)], slots=8)
    desk.keep("a", story(1, 8), 32)
    desk.run()
    evict(desk.pool, 8)
    desk.match("q", story(1, 8))  # brings up two of eight
    desk.run()
    desk.match("q", story(1, 8))
    return desk


def load_slower() -> Desk:
    desk = Desk(block_bytes=[1000], load_policy="auto")
    desk.scheduler.note_prefill(1000, 1.0)
    desk.keep("a", story(1, 4), 16)
    desk.scheduler.hits.worth.note_load(1, 1.0)
    desk.match("q", story(1, 4))
    return desk


def tier_away() -> Desk:
    desk = Desk(tiers=[SlotTier(TierName("disk"), Pool(16), WriteMode.THROUGH)], slots=8)
    desk.keep("a", story(1, 8), 32)
    desk.run()
    evict(desk.pool, 8)
    desk.scheduler.note_health(Health(Rank(0), TierName("disk"), "no such file"))
    desk.match("q", story(1, 8))
    return desk


def told_not_to() -> Desk:
    desk = Desk()
    desk.keep("a", story(1, 4), 16)
    hints = Hints(max_load_tokens=0)
    desk.scheduler.named["q"] = desk.scheduler.open("q", story(1, 4), hints)
    desk.match("q", story(1, 4))
    return desk


MAKERS = {
    Reason.NOTHING_MISSED: nothing_missed,
    Reason.EVICTED: evicted,
    Reason.NEVER_STORED: never_stored,
    Reason.BELOW_THRESHOLD: below_threshold,
    Reason.IN_FLIGHT: in_flight,
    Reason.OTHER_NAMESPACE: other_namespace,
    Reason.NOT_PROMOTED: still_below,
    Reason.TIER_UNAVAILABLE: tier_away,
    Reason.LOAD_SLOWER: load_slower,
    Reason.HINT: told_not_to,
}


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.value)
def test_every_reason_is_given(reason: Reason) -> None:
    desk = MAKERS[reason]()
    explanation = why(desk, "q")
    assert explanation.reason is reason
    plain = json.loads(json.dumps(explanation.as_dict()))
    assert plain["reason"] == reason.value
    assert plain["request_id"] == "q"
    assert desk.scheduler.stats().missed[reason.value] >= 1


def test_how_much_was_where() -> None:
    desk = Desk()
    desk.keep("a", story(1, 3), 12)
    desk.match("q", story(1, 3) + story(2, 2), computed=4)
    explanation = why(desk, "q")
    assert explanation.asked_tokens == 20
    assert explanation.device_tokens == 4
    assert explanation.host_tokens == 8
    assert explanation.first_missing == 12
    assert explanation.group == 0


def test_what_lies_below_is_told_apart() -> None:
    explanation = why(still_below(), "q")
    assert explanation.host_tokens == 8
    assert explanation.lower_tokens == 24
    assert explanation.first_missing == 8


def test_the_decision_comes_with_its_times() -> None:
    plain = why(load_slower(), "q").as_dict()
    decision = plain["decision"]
    assert isinstance(decision, dict)
    assert decision["verdict"] == Verdict.COMPUTE_FASTER.value
    assert decision["load_seconds"] > decision["compute_seconds"]


def test_the_group_that_stopped_it_is_named() -> None:
    desk = Desk(reach.FullAttention(4), reach.SlidingWindow(4, window=9))
    desk.scheduler.store("a", story(1, 6), [list(range(6)), [0, 1, -1, -1, -1, -1]], 24)
    desk.run()
    assert desk.match("q", story(1, 6)).num_tokens == 8
    explanation = why(desk, "q")
    assert (explanation.group, explanation.first_missing) == (1, 8)


def test_a_state_that_is_missing_is_named_though_blocks_are_smaller() -> None:
    """Hits can end only where a state is kept, two blocks apart."""
    state = reach.RecurrentState(8)
    desk = Desk(reach.FullAttention(4), state, hash_tokens=4)
    desk.scheduler.store("a", story(1, 4), [list(range(4)), [-1] * 2], 16)
    desk.run()
    assert desk.match("q", story(1, 4)).state is MatchState.MISS
    explanation = why(desk, "q")
    assert explanation.reason is Reason.NEVER_STORED
    assert explanation.group == 1
