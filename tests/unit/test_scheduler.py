"""The scheduler's calls, right and wrong: what each answers, and that a bad one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.fakes.by_name import ByName
from tests.fakes.crafted_keys import keys

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention, SlidingWindow
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, InputError
from kvferry.scheduler.journal import Reason
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.types import DEVICE, HOST, MatchState, Outcome, Plan, Rank, Receipt, TransferId

HYBRID = (FullAttention(4), SlidingWindow(4, window=6))


def scheduler_of(*groups: reach.Group, num_slots: int = 16, num_ranks: int = 1, **more: Any):
    return ByName(
        Pool(num_slots),
        groups or (FullAttention(4),),
        config=Config(load_policy="always"),
        num_ranks=num_ranks,
        clock=more.pop("clock", lambda: 0.0),
        **more,
    )


def receipts(plan: Plan, num_ranks: int = 1, outcome: Outcome = Outcome.OK) -> list[Receipt]:
    ranks = [Rank(rank) for rank in range(num_ranks)]
    return [Receipt(t.id, rank, outcome, "why") for t in plan.transfers for rank in ranks]


def stored(scheduler: ByName, chain: Keys, request: str = "writer") -> None:
    tables = [list(range(len(chain))) for _ in scheduler.groups]
    scheduler.store(request, chain, tables, 4 * len(chain))
    scheduler.settle(receipts(scheduler.plan()))
    scheduler.finish(request)


def snapshot(scheduler: ByName) -> tuple[object, ...]:
    """Everything a refused call must leave alone."""
    scheduler.check_integrity()
    pool = scheduler.pool
    return (
        scheduler.stats(),
        pool.num_leases,
        pool.table.state.tobytes(),
        pool.table.readers.tobytes(),
        scheduler.num_queued,
        scheduler.num_in_flight,
        [(request, request._hit, request.progress.stored[:]) for request in scheduler.requests],
    )


def test_loads_go_before_stores() -> None:
    scheduler = scheduler_of()
    stored(scheduler, keys(range(2)))
    scheduler.store("b", keys(range(10, 12)), [[0, 1]], 8)
    scheduler.match("c", keys(range(2)))
    scheduler.load("c", [[4, 5]])
    assert [t.dst for t in scheduler.plan().transfers] == [DEVICE, HOST]


def test_a_window_that_lands_later_is_seen_by_waiting_requests() -> None:
    scheduler = scheduler_of(*HYBRID)
    chain = keys(range(4))
    scheduler.store("a", chain[:3], [[0, 1, 2], [0, 1, 2]], 12)
    plan = scheduler.plan()
    full, window = receipts(plan)
    scheduler.settle([full])
    assert scheduler.match("b", chain).state is MatchState.MISS
    scheduler.settle([window])
    assert scheduler.match("b", chain).num_tokens == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_ranks": 0}, "at least 1, got 0"),
        ({"num_ranks": -2}, "at least 1, got -2"),
        ({"hash_block_tokens": 3}, "blocks of 4 tokens.*hash block of 3"),
        ({"block_bytes": (1, 2)}, "2 block sizes for 1 groups"),
    ],
)
def test_settings_that_cannot_be_right(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        scheduler_of(**arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.store("b", keys(range(4)), [[0, 1, 2, 3]], 16), "1 block tables for 2 groups"),
        (lambda s: s.store("b", keys(range(4)), [[0] * 4] * 3, 16), "3 block tables for 2 groups"),
        (
            lambda s: s.store("b", keys(range(4)), [[0, 1, 2, 3], [0, 1, 2]], 16),
            "group 1's block table has 3 blocks, the first 16 tokens need 4",
        ),
        (
            lambda s: s.store("b", keys(range(4)), [[0, 1, 2, 3], [0, 1, 2, -7]], 16),
            "group 1's block table holds -7",
        ),
        (lambda s: s.load("hit", [[0, 1, 2]]), "1 block tables for 2 groups"),
        (lambda s: s.load("hit", [[0, 1, 2], [0, 1]]), "group 1's block table has 2 .* needs 3"),
        (lambda s: s.load("hit", [[0, NO_BLOCK, 2], [0, 1, 2]]), "holds -1; a block is 0 or more"),
        (lambda s: s.match("b", keys(range(4)), computed_tokens=-1), "not be negative, got -1"),
        (lambda s: s.match("b", keys(range(4)), max_tokens=-4), "not be negative, got 0 and -4"),
    ],
)
def test_a_bad_call_is_refused_and_changes_nothing(
    call: Callable[[ByName], object], words: str
) -> None:
    scheduler = scheduler_of(*HYBRID, num_ranks=2)
    chain = keys(range(100, 103))
    scheduler.store("writer", chain, [[0, 1, 2]] * 2, 12)
    scheduler.settle(receipts(scheduler.plan(), 2))
    assert scheduler.match("hit", chain).num_tokens == 12
    scheduler.match("b", Keys.empty())
    before = snapshot(scheduler)
    with pytest.raises(InputError, match=words):
        call(scheduler)
    after = snapshot(scheduler)
    if "match" not in call.__code__.co_names:
        assert after == before
    assert scheduler.load("hit", [[5, 6, 7]] * 2), "the hit was not lost"


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        (Receipt(TransferId(9), Rank(0), Outcome.OK), "transfer 9, but only 1"),
        (Receipt(TransferId(-1), Rank(0), Outcome.OK), "transfer -1, but only 1"),
        (Receipt(TransferId(0), Rank(2), Outcome.OK), "rank 2, but ranks are 0 to 1"),
    ],
)
def test_a_receipt_that_answers_nothing_changes_nothing(receipt: Receipt, words: str) -> None:
    scheduler = scheduler_of(num_ranks=2)
    scheduler.store("a", keys(range(2)), [[0, 1]], 8)
    good = receipts(scheduler.plan(), 2)
    before = snapshot(scheduler)
    with pytest.raises(InputError, match=words):
        scheduler.settle([*good, receipt])
    assert snapshot(scheduler) == before
    assert scheduler.settle(good).released


def test_close_ends_everything_and_use_after_is_refused() -> None:
    scheduler = scheduler_of(num_ranks=2)
    chain = keys(range(4))
    scheduler.store("a", chain[:2], [[0, 1]], 8)
    scheduler.settle(receipts(scheduler.plan(), 2))
    scheduler.match("pinned", chain)
    scheduler.match("loading", chain)
    scheduler.load("loading", [[4, 5]])
    scheduler.plan()
    scheduler.store("a", chain, [[0, 1, 2, 3]], 16)
    scheduler.close()
    scheduler.close()
    scheduler.check_integrity()
    assert scheduler.pool.num_leases == 0
    assert scheduler.num_in_flight == scheduler.num_queued == 0
    for call in (
        lambda: scheduler.match("x", chain),
        lambda: scheduler.load("x", [[0]]),
        lambda: scheduler.store("x", chain, [[0]], 4),
        scheduler.plan,
        scheduler.settle,
        scheduler.reset,
    ):
        with pytest.raises(ClosedError, match="scheduler is closed"):
            call()
    scheduler.finish("x")
    scheduler.preempt("x")


def test_what_the_short_look_lacks_a_match_does_not_find_either() -> None:
    """Every set of four blocks, every length. Seen red with the key one slot further looked up."""
    chain = keys(range(4))
    for present in product([False, True], repeat=4):
        scheduler = scheduler_of()
        for number in np.flatnonzero(present):
            lease = scheduler.pool.reserve(chain[number : number + 1])
            assert lease is not None
            lease.commit()
        for computed_tokens, max_tokens in product(range(0, 17, 4), range(1, 17)):
            about = {"computed_tokens": computed_tokens, "max_tokens": max_tokens}
            missing = scheduler.matcher.next_missing(chain, len(chain), computed_tokens, max_tokens)
            found = scheduler.match("reader", chain, **about)
            scheduler.finish("reader")
            if missing is not None:
                assert found.state is MatchState.MISS
            elif computed_tokens + 4 <= max_tokens:
                assert found.state is MatchState.HIT


@pytest.mark.parametrize(
    "touch",
    [
        lambda s: s.drain_events(),
        lambda s: s.explain("reader"),
        lambda s: s.stats(),
        lambda s: s.reset(),
        lambda s: s.close(),
    ],
    ids=["drain", "explain", "stats", "reset", "close"],
)
def test_a_miss_is_answered_at_once_and_counted_when_the_log_is_drained(
    touch: Callable[[ByName], object],
) -> None:
    scheduler = scheduler_of()
    assert scheduler.match("reader", keys(range(3)), computed_tokens=4).state is MatchState.MISS
    assert len(scheduler.book.events) == 1
    assert scheduler.book.counts.queries == 0
    touch(scheduler)
    assert len(scheduler.book.events) == 0
    assert (scheduler.stats().queries, scheduler.stats().asked_tokens) == (1, 8)
    explanation = scheduler.explain("reader")
    assert explanation is not None
    assert (explanation.reason, explanation.first_missing) == (Reason.NEVER_STORED, 4)
    assert scheduler.stats().queries == 1, "counted once"


def test_what_a_reader_of_the_log_raises_comes_with_the_next_request() -> None:
    scheduler = scheduler_of()
    book: Any = scheduler.book
    scheduler.match("reader", keys(range(3)))

    def fails(*_: object, **__: object) -> None:
        del book._explain
        raise RuntimeError("cannot remember")

    book._explain = fails
    scheduler.plan()
    assert scheduler.stats().queries == 1
    with pytest.raises(RuntimeError, match="cannot remember"):
        scheduler.match("other", keys(range(3)))
    assert scheduler.match("other", keys(range(3))).state is MatchState.MISS
