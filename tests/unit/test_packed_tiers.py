"""Tiers that keep several blocks of a chain in one object, which has the name of the last.

Whether such a tier finds a block hangs on who asks: on what follows the block in his chain.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk
from tests.fakes.packed_store import MOST, STORE, PackedStore, brought, packing, promoted

from kvferry.cache import reach
from kvferry.cache.events import EventKind
from kvferry.core.keys import Keys
from kvferry.scheduler.runs import Wanted, run_numbers, with_furthest
from kvferry.scheduler.tier import Answer, KeyedTier, PackedTier, WriteMode, WriteOrder
from kvferry.types import Health, Rank, TierName

SYSTEM = list(range(10))
A = keys([*SYSTEM, *range(100, 160)])
B = keys([*SYSTEM, *range(200, 260)])


def served(chain: Keys, most: int = 8) -> tuple[Desk, PackedStore]:
    """A server that knows nothing yet, over a store that another wrote a chain to."""
    store = PackedStore()
    store.put(chain, most)
    return Desk(tiers=[packing()], slots=512), store


def num_asked(desk: Desk, store: PackedStore, chain: Keys) -> int:
    """How many names a request makes the store look up, who comes now."""
    before = store.num_heads
    brought(desk, "whoever", chain, store)
    desk.scheduler.finish("whoever")
    desk.pool.reset()  # others have taken its place in the host since
    return store.num_heads - before


def test_a_chain_that_parts_asks_nothing_where_no_object_could_have_its_names() -> None:
    desk, store = Desk(tiers=[packing()], slots=512), PackedStore()
    assert num_asked(desk, store, A) == len(A)
    assert num_asked(desk, store, A[:MOST] + B[10:]) == 0, "the first block can be in none"
    assert num_asked(desk, store, A[: MOST - 1] + B[10:]) == MOST - 1 + len(B[10:])
    assert num_asked(desk, store, A) == 0, "others who asked changed nothing"
    assert num_asked(desk, store, A + B[10:]) == 0, "nor could it if the prompt has grown"
    assert num_asked(desk, store, A[: MOST - 1]) == MOST - 1


@pytest.mark.parametrize("what", ["away", "reset"])
def test_a_no_is_forgotten_with_all_else(what: str) -> None:
    desk, store = Desk(tiers=[packing()], slots=512), PackedStore()
    first = num_asked(desk, store, A)
    if what == "away":
        for reason in ("away", ""):
            desk.scheduler.note_health(Health(Rank(0), STORE, reason))
    else:
        desk.scheduler.reset()
    assert num_asked(desk, store, A) == first


def test_a_no_that_comes_when_the_block_was_written_meanwhile_is_forgotten() -> None:
    """Else it would be believed for longer than that the block was written."""
    tier, runs = packing(), np.zeros(len(A), dtype=np.int64)
    tier.reserve(WriteOrder(A, chained=True), 0.0)
    tier.moved(A, np.ones(len(A), dtype=bool), upward=False, now=0.0)
    tier.answered(Answer(A, np.zeros(len(A), dtype=bool), runs=runs), 5.0)
    assert tier.lookup(A, 9.0).readable.all()
    assert tier.lookup(A, 11.0, runs).unknown.all()


def test_where_no_no_is_remembered_each_asks_once() -> None:
    tier = PackedTier(STORE, WriteMode.THROUGH, most_in_one=MOST, remembers_noes=False)
    desk, store = Desk(tiers=[tier], slots=512), PackedStore()
    store.put(A[:8], 8)
    assert brought(desk, "a", A, store) == 8
    heads = store.num_heads
    for _ in range(3):
        assert desk.match("a", A).num_tokens == 32
        store.serve(desk)
    assert store.num_heads == heads, "he was told"
    desk.scheduler.finish("a")
    store.put(A, 8)
    assert brought(desk, "b", A, store) == len(A)


def test_what_is_not_there_pushes_out_nothing_that_we_sent() -> None:
    """Seen red with one memory for both: what was written went down again."""
    tier = packing()
    tier.reserve(WriteOrder(A, chained=True), 0.0)
    tier.moved(A, np.ones(len(A), dtype=bool), upward=False, now=0.0)
    for first in range(1000, 5000, 100):  # four times what it remembers
        unknown = keys(range(first, first + 100))
        runs = np.zeros(len(unknown), dtype=np.int64)
        tier.answered(Answer(unknown, np.zeros(len(unknown), dtype=bool), runs=runs), 20.0)
        assert not tier.lookup(unknown, 21.0, runs).unknown.any()
    assert tier.known(A, 21.0).all()
    assert tier.reserve(WriteOrder(A, chained=True), 21.0) is None
    tier.reset()
    assert tier.lookup(unknown, 21.0, runs).unknown.all()
    assert not tier.known(A, 21.0).any()


def test_a_no_says_of_no_block_that_it_is_gone() -> None:
    tier = packing()
    lost = tier.log.reader((EventKind.LOST,))
    tier.answered(Answer(A, np.zeros(len(A), dtype=bool)), 0.0)
    assert not any(len(event.all_keys()) for event in lost.take())
    tier.moved(A[:2], np.array([True, False]), upward=True, now=0.0)
    assert [list(event.all_keys()) for event in lost.take()] == [[A[1]]], "it could not be read"


def test_a_no_and_a_yes_for_one_block_in_one_question() -> None:
    tier = packing()
    twice = A[:4] + A[:4]
    there = np.array([True, False, False, False, False, True, False, True])
    for answer in (there, there[::-1].copy()):
        tier.reset()
        asked = twice if answer is there else twice[::-1]
        tier.answered(Answer(asked, answer), 0.0)
        assert tier.lookup(A[:4], 1.0).readable.tolist() == [True, True, False, True]
        assert not tier.lookup(A[:4], 1.0).unknown.any()


def test_what_two_share_is_written_twice_and_no_more() -> None:
    store = PackedStore()
    one = Desk(tiers=[packing()], slots=512)
    sizes = []
    for number in range(1, 6):
        one.keep(str(number), keys([*SYSTEM, *range(number * 100, number * 100 + 20)]), 120)
        moves = [move for move in one.plan() if move.dst == STORE]
        store.take(moves, 8)
        one.land()
        store.serve(one)
        sizes.append(sorted(len(move) for move in moves))
    assert sizes == [[30], [10, 20], [20], [20], [20]]


def test_a_conversation_that_goes_on_elsewhere_writes_only_what_is_new() -> None:
    """Its end was found and nothing behind it: so an object ends there."""
    desk, store = served(B[:30])
    assert brought(desk, "b", B, store) == 30
    desk.scheduler.finish("b")
    desk.keep("c", B, 280)
    sizes = [len(move) for move in desk.plan() if move.dst == STORE]
    assert sizes == [40]


def test_what_lies_behind_is_only_asked_for() -> None:
    chain = keys(range(40))
    desk, store = served(chain)
    desk.match("b", chain, most=39)
    desk.plan()
    (question,) = desk.asked
    assert list(Keys(question.keys)) == list(chain[: 9 + MOST - 1])
    store.say(desk)
    desk.match("b", chain, most=39)
    (going,) = promoted(desk.plan())
    assert list(going) == list(chain[:9])
    desk.land()
    assert desk.match("b", chain, most=39).num_tokens == 36
    why = desk.scheduler.explain("b")
    assert why is not None
    assert why.asked_blocks == 9


def test_only_full_attention_and_only_tiers_with_packs_are_asked_for_it() -> None:
    chain = keys(range(40))
    single = KeyedTier(TierName("single"))
    window = reach.SlidingWindow(4, window=9)
    desk = Desk(reach.FullAttention(4), window, tiers=[single, packing()], slots=512)
    desk.match("b", chain, most=40)
    desk.plan()
    sizes = {question.tier: len(question) for question in desk.asked}
    assert sizes == {"single": 20, STORE: 20 + MOST - 1}


@given(
    common=st.integers(0, 12),
    own=st.integers(0, 12),
    other=st.integers(0, 12),
    most=st.integers(1, 6),
    gap=st.integers(0, 24),
)
def test_a_question_answers_what_it_names_with_all_that_follows(
    common: int, own: int, other: int, most: int, gap: int
) -> None:
    ours = list(range(common + own))
    at = np.array([n for n in range(len(ours)) if n != gap], dtype=np.int64)
    asked = keys([*range(common), *range(100, 100 + other)])
    wanted = Wanted(keys(ours).take(at), at, np.zeros_like(at))
    runs = run_numbers(at, np.zeros(1, dtype=np.int64)) if len(at) else at
    expected = [
        all(at[m] < common for m in range(n, min(n + most, len(at))) if runs[m] == runs[n])
        for n in range(len(at))
    ]
    if len(at):
        assert wanted.answered_by(asked, most).tolist() == expected


@given(
    common=st.integers(0, 9),
    own=st.integers(0, 9),
    other=st.integers(0, 9),
    most=st.integers(1, 6),
    breaks=st.tuples(st.sets(st.integers(0, 18)), st.sets(st.integers(0, 18))),
)
def test_two_remember_the_same_where_the_same_blocks_follow(
    common: int, own: int, other: int, most: int, breaks: tuple[set[int], set[int]]
) -> None:
    chains = [range(common + own), [*range(common), *range(100, 100 + other)]]
    told = []
    for chain, starts in zip(chains, breaks, strict=True):
        runs = np.cumsum([at in starts for at in range(len(chain))])
        following = [
            [n for n, run in zip(chain[at : at + most], runs[at:], strict=False) if run == runs[at]]
            for at in range(len(chain))
        ]
        told += list(zip(with_furthest(keys(chain), runs, most), following, strict=True))
    for one, ones in told:
        for another, others in told:
            # A run is as good as told by its ends.
            assert (one == another) == ((ones[0], ones[-1]) == (others[0], others[-1]))
