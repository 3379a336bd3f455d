"""Which blocks of a message follow each other: told to tiers that find blocks by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk, story

from kvferry.cache import reach
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.runs import run_numbers
from kvferry.scheduler.tier import KeyedTier, WriteMode
from kvferry.tiers.movers import SharedMover
from kvferry.types import HOST, NO_SLOTS, Question, Rank, TierName, Transfer, TransferId

STORE = TierName("store")


def keyed(write: WriteMode) -> KeyedTier:
    return KeyedTier(STORE, write, remember=10.0, capacity=1000)


def joined(message: Transfer | Question) -> set[tuple[Key, Key]]:
    """Placement of which the message says that one follows the other."""
    told, runs = list(Keys(message.keys)), message.runs  # type: ignore[arg-type]
    assert runs is not None
    assert len(runs) == len(told)
    return {(told[n - 1], told[n]) for n in range(1, len(told)) if runs[n] == runs[n - 1]}


def following(
    desk: Desk, chains: Sequence[Keys], message: Transfer | Question
) -> set[tuple[Key, Key]]:
    """Placement in the message that really do."""
    matcher = desk.scheduler.matcher
    after: set[tuple[Key, Key]] = set()
    for chain in chains:
        for number, group in enumerate(desk.groups):
            if isinstance(group, reach.FullAttention):  # a window's blocks lie by themselves
                after.update(pairwise(matcher.all_keys(number, chain)))
    told = list(Keys(message.keys))  # type: ignore[arg-type]
    return {pair for pair in pairwise(told) if pair in after}


def put_in_host(desk: Desk, chain: Keys, at: int) -> None:
    """One block of a chain is there before the others are stored."""
    own = desk.scheduler.matcher.all_keys(0, chain)[at : at + 1]
    lease = desk.pool.reserve(own, chained=False)
    assert lease is not None
    lease.commit()


@given(
    st.lists(
        st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12).map(sorted),
        min_size=1,
        max_size=5,
    )
)
def test_a_run_is_numbers_in_a_row_of_one_chain(chains: list[list[int]]) -> None:
    at = np.concatenate([np.array(chain) for chain in chains])
    starts = np.cumsum([0, *map(len, chains[:-1])])
    whose = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    runs = run_numbers(at, starts)
    for n in range(1, len(at)):
        follows = whose[n] == whose[n - 1] and at[n] == at[n - 1] + 1
        assert (runs[n] == runs[n - 1]) == follows


def test_a_question_tells_it_for_every_request_of_what_is_a_chain() -> None:
    window = reach.SlidingWindow(4, window=9)
    desk = Desk(reach.FullAttention(4), window, tiers=[keyed(WriteMode.THROUGH)], slots=128)
    chains = [story(1, 6), story(2, 5)]
    for name, told in zip("ab", chains, strict=True):
        desk.match(name, told)
    desk.plan()
    (question,) = desk.asked
    assert joined(question) == following(desk, chains, question)
    assert len(joined(question)) == 5 + 4


def test_what_is_known_leaves_a_gap_that_nothing_follows_over() -> None:
    desk = Desk(tiers=[keyed(WriteMode.THROUGH)], slots=32)
    told = story(1, 6)
    put_in_host(desk, told, 2)
    desk.match("b", told)
    desk.plan()
    (question,) = desk.asked
    assert len(question) == 5
    assert joined(question) == following(desk, [told], question)
    assert len(joined(question)) == 3


class _Mover:
    """Takes note of what it is given."""

    def __init__(self) -> None:
        self.given: list[Transfer | Question] = []

    def submit(self, transfer: Transfer) -> None:
        self.given.append(transfer)

    ask = submit


def test_each_ranks_part_of_a_run_is_a_run() -> None:
    """Whose a block is, its key alone says: so who reads has the same parts as who wrote."""
    told = keys(range(12))
    runs = np.repeat(np.array([7, 9]), 6)
    slots = np.arange(12)
    for rank in range(2):
        mover = _Mover()
        part = SharedMover(mover, rank=Rank(rank), num_ranks=2)  # type: ignore[arg-type]
        transfer = Transfer(
            TransferId(1), HOST, STORE, slots, NO_SLOTS, keys=told.array, within=1.0, runs=runs
        )
        part.submit(transfer)
        part.ask(Question(TransferId(2), STORE, told.array, 1.0, runs))
        part.ask(Question(TransferId(3), STORE, told.array, 1.0))
        own = [at for at, key in enumerate(told) if int.from_bytes(key[:8], "little") % 2 == rank]
        written, asked, untold = mover.given
        for message in (written, asked):
            assert message.runs is not None
            assert message.runs.tolist() == [runs[at] for at in own]
        assert untold.runs is None
