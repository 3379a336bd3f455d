"""Every life of a small request over a tier that is asked: all answers, all failures, all delays.

Two ranks, each with its own answer for each block and its own failures when blocks are read. What
the request must get follows in one line from both; whatever happens, it gets an answer in bounded
time and nothing stays claimed.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.pools import evict

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.slots import as_slots
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import KeyedTier, LowerTier, SlotTier, WriteMode, lower_tier
from kvferry.types import MatchState, Opened, Outcome, Rank, Receipt, TierName, Transfer

NAME = TierName("below")
NUM_BLOCKS = 3
Flags = tuple[bool, ...]
MASKS: list[Flags] = list(product([False, True], repeat=NUM_BLOCKS))
FULL, WINDOW = reach.FullAttention(4), reach.SlidingWindow(4, window=5)


def longest(group: reach.Group, there: list[bool]) -> int:
    """The longest hit, in blocks: all of them before its end, or only the last."""
    ends = range(NUM_BLOCKS, 0, -1)
    if isinstance(group, reach.FullAttention):
        return next((end for end in ends if all(there[:end])), 0)
    return next((end for end in ends if there[end - 1]), 0)


def receipt(order: int, rank: int, failed: list[int], length: int) -> Receipt:
    if len(failed) == length:
        return Receipt(order, Rank(rank), Outcome.FAILED, "no")  # type: ignore[arg-type]
    outcome = Outcome.PARTIAL if failed else Outcome.OK
    return Receipt(order, Rank(rank), outcome, failed=tuple(failed))  # type: ignore[arg-type]


def answer(desk: Desk, keys: Keys, there: tuple[Flags, Flags], late: int | None) -> list[Receipt]:
    """Both ranks answer what was asked; returns the receipts of a late rank."""
    held = []
    for question in desk.asked:
        places = [list(keys).index(key) for key in Keys(question.keys)]
        for rank in (0, 1):
            failed = [at for at, place in enumerate(places) if not there[rank][place]]
            one = receipt(question.id, rank, failed, len(places))
            if rank == late:
                held.append(one)
            else:
                desk.scheduler.settle([one])
    desk.asked = []
    return held


def land(
    desk: Desk, moves: list[Transfer], keys: Keys, lost: tuple[Flags, Flags], late: int | None
) -> list[Receipt]:
    held = []
    for move in moves:
        assert move.keys is not None
        places = [list(keys).index(key) for key in Keys(move.keys)]
        for rank in (1, 0):
            failed = [at for at, place in enumerate(places) if lost[rank][place]]
            one = receipt(move.id, rank, failed, len(places))
            if rank == late:
                held.append(one)
            else:
                desk.scheduler.settle([one])
            if rank == 1:
                assert not desk.pool.cached(keys).any(), "before every rank has answered"
    desk.flying = []
    return held


def live(
    group: reach.Group,
    tier: LowerTier,
    there: tuple[Flags, Flags],
    lost: tuple[Flags, Flags],
    *,
    late_answer: int | None = None,
    late_move: int | None = None,
) -> int:
    """One life; returns how many blocks the request was given."""
    desk = Desk(group, tiers=[tier], ranks=2, slots=16)
    told = story(1, NUM_BLOCKS)
    keys = desk.scheduler.matcher.names[0].of(told, range(NUM_BLOCKS))
    held: list[Receipt] = []
    for _ in range(6):
        match = desk.match("b", told)
        if match.state is not MatchState.WAIT:
            break
        moves = desk.plan()
        held += answer(desk, keys, there, late_answer)
        held += land(desk, moves, keys, lost, late_move)
        if held:
            desk.now += 100.0  # past every deadline
            desk.scheduler.settle()
    assert match.state is not MatchState.WAIT, "it waits for ever"
    desk.scheduler.settle(held)
    desk.scheduler.finish("b")
    desk.run()
    desk.check_empty()
    return match.num_tokens // 4


@pytest.mark.parametrize("group", [FULL, WINDOW], ids=["full", "window"])
def test_every_answer_and_every_failure(group: reach.Group) -> None:
    for there in product(MASKS, MASKS):
        known = [a and b for a, b in zip(*there, strict=True)]
        hoped = longest(group, known)
        needed = range(hoped) if group is FULL else range(max(0, hoped - 1), hoped)
        losses = product(MASKS[::3], MASKS) if hoped else [(MASKS[0], MASKS[0])]
        for first, second in losses:
            lost = [a or b for a, b in zip(first, second, strict=True)]
            came = [at in needed and not lost[at] for at in range(NUM_BLOCKS)]
            given = live(group, KeyedTier(NAME), there, (first, second))
            assert given == longest(group, came), (there, first, second)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("what", ["answer", "move"])
def test_a_rank_that_is_late(what: str, late: int) -> None:
    none: Flags = (False,) * NUM_BLOCKS
    for there in product(MASKS, MASKS):
        for lost in MASKS:
            given = live(
                FULL,
                KeyedTier(NAME),
                there,
                (lost, none),
                late_answer=late if what == "answer" else None,
                late_move=late if what == "move" else None,
            )
            assert given == 0


def test_the_same_where_places_are_ours() -> None:
    for first, second in product(MASKS, MASKS):
        tier = SlotTier(NAME, Pool(8), WriteMode.THROUGH)
        desk = Desk(tiers=[tier], ranks=2, slots=16)
        told = story(1, NUM_BLOCKS)
        keys = desk.scheduler.matcher.names[0].of(told, range(NUM_BLOCKS))
        desk.keep("a", told, 4 * NUM_BLOCKS)
        desk.run()
        assert evict(desk.pool, 16) == NUM_BLOCKS
        assert desk.match("b", told).state is MatchState.WAIT
        land(desk, desk.plan(), keys, (first, second), None)
        lost = [a or b for a, b in zip(first, second, strict=True)]
        came = longest(FULL, [not gone for gone in lost])
        assert desk.match("b", told).num_tokens == 4 * came
        assert not (tier.pool.cached(keys) & lost).any(), "what failed is offered again"
        desk.scheduler.finish("b")
        desk.check_empty()


@pytest.mark.parametrize("moved", [None, 0, 1])
def test_what_ranks_recovered_of_a_request_in_every_way(moved: int | None) -> None:
    """A request gets what both ranks still have, at the same places, up to the first that lacks."""
    for first, second in product(MASKS, MASKS):
        told = story(1, NUM_BLOCKS)
        sets = []
        for rank, there in enumerate((first, second)):
            at = [place for place in range(NUM_BLOCKS) if there[place]]
            places = [place + 4 * (rank == 1 and place == moved) for place in at]
            keys = told.take(np.array(at, dtype=np.int64))
            sets.append(Opened(8, keys.array, as_slots(places)))
        tier = lower_tier(NAME, 8, WriteMode.THROUGH, recovered=sets)
        both = [
            a and b and at != moved for at, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        assert tier.pool is not None
        assert tier.pool.counts.cached == sum(both)
        desk = Desk(tiers=[tier], ranks=2, slots=16)
        hoped = longest(FULL, both)
        assert (desk.match("b", told).state is MatchState.WAIT) == bool(hoped)
        land(desk, desk.plan(), told, (MASKS[0], MASKS[0]), None)
        assert desk.match("b", told).num_tokens == 4 * hoped
        desk.scheduler.finish("b")
        desk.run()
        desk.check_empty()
        desk.keep("c", told, 4 * NUM_BLOCKS)  # what was lost is written again, beside the rest
        desk.run()
        assert tier.pool.cached(told).all()
        desk.check_empty()
