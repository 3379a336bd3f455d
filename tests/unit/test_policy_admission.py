"""Only what was asked for often enough is worth storing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk, story

from kvferry.cache.policies.admission import SeenOften
from kvferry.cache.pool import Pool
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import TierName


def test_a_threshold_of_one_admits_everything_at_once() -> None:
    admission = SeenOften(1, num_keys=100)
    assert admission.admits(keys(range(5))).all()
    admission.see(keys(range(5)))  # costs and remembers nothing
    assert not admission._counters.any()


@pytest.mark.parametrize("threshold", [2, 3, 7])
def test_admitted_at_the_threshold_not_before(threshold: int) -> None:
    admission = SeenOften(threshold, num_keys=100)
    for _ in range(threshold - 1):
        admission.see(keys([1, 2]))
        assert not admission.admits(keys([1, 2])).any()
    admission.see(keys([2]))
    assert admission.admits(keys([1, 2])).tolist() == [False, True]


def test_sharing_counters_never_refuses_what_was_seen_often() -> None:
    """Far more keys than it was made for: mistakes are early admissions only."""
    admission = SeenOften(2, num_keys=16)
    often, once = keys(range(500)), keys(range(10_000, 10_500))
    admission.see(often)
    admission.see(often)
    admission.see(once)
    assert admission.admits(often).all()


def test_few_keys_are_told_apart() -> None:
    admission = SeenOften(2, num_keys=1000)
    admission.see(keys(range(1000)))
    admission.see(keys(range(1000)))
    admission.see(keys(range(5000, 6000)))
    assert admission.admits(keys(range(5000, 6000))).mean() < 0.01


def test_old_fame_fades() -> None:
    admission = SeenOften(4, num_keys=16)
    for _ in range(4):
        admission.see(keys([1]))
    for start in range(0, 40_000, 400):
        admission.see(keys(range(100 + start, 500 + start)))
    assert int(admission._counters.min()) < 255
    assert admission._seen <= admission._halve_after + 400


def test_counters_stop_at_their_end_instead_of_starting_over() -> None:
    admission = SeenOften(1000, num_keys=16)
    assert admission.threshold == 255
    for _ in range(300):
        admission.see(keys([3]))
    assert admission.admits(keys([3])).all()


def test_one_request_counts_once_however_often_it_asks() -> None:
    """A waiting request asks every step; that makes nothing popular."""
    desk = Desk(store_threshold=2)
    asked = story(1, 4)
    for _ in range(10):
        desk.match("a", asked)
        desk.scheduler.preempt("a")
    assert desk.store("a", asked, 16) == {}
    desk.scheduler.finish("a")
    desk.match("b", asked)
    assert desk.store("b", asked, 16) == {0: [0, 1, 2, 3]}


def test_a_shared_beginning_is_admitted_before_the_rest() -> None:
    """Two conversations with one system prompt: the prompt is stored, what follows is not."""
    desk = Desk(store_threshold=2)
    shared = story(1, 2)
    desk.match("a", shared + story(2, 2))
    desk.match("b", shared + story(3, 2))
    assert desk.store("b", shared + story(3, 2), 16) == {0: [0, 1]}


def test_what_follows_a_block_left_out_is_left_out() -> None:
    """A chain with a hole cannot be matched beyond it, so its end would only take room."""
    desk = Desk(store_threshold=2)
    whole = story(1, 4)
    desk.match("a", whole)
    admission = desk.scheduler.stores.admission
    admission.see(whole.take(np.array([0, 2, 3])))
    assert desk.store("a", whole, 16) == {0: [0]}


def test_the_threshold_holds_for_lower_tiers_too() -> None:
    """What the host refuses never reaches a tier below it."""
    below = SlotTier(TierName("below"), Pool(16), WriteMode.THROUGH)
    desk = Desk(store_threshold=2, tiers=[below])
    asked = story(1, 4)
    for request in ("a", "b"):
        desk.match(request, asked)
        desk.keep(request, asked, 16)
        desk.run()
        assert below.pool.cached(desk.scheduler.matcher.names[0].of(asked, range(4))).all() == (
            request == "b"
        )
