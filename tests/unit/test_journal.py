"""The journal: what it says of a request, and that it stays small."""

from __future__ import annotations

import json

import numpy as np
from tests.fakes.by_name import ByName

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.core.identity import Namespace, chain
from kvferry.scheduler.journal import MOST_COPIES, MOST_REQUESTS, Reason
from kvferry.telemetry.source import entry_as_data
from kvferry.types import FIRST_RANK, Outcome, Rank, Receipt

NAMESPACE = Namespace(model="m", dtype="float32", layout="test", geometry="g", block_tokens=4)


def tokens(first: int, count: int = 16):
    return chain(NAMESPACE, np.arange(first, first + count))


def answer(scheduler: ByName, outcome: Outcome = Outcome.OK, ranks: int = 1) -> None:
    receipts = [
        Receipt(t.id, Rank(rank), outcome, "the card fell off" if rank else "", 10, 0.5, "dma")
        for t in scheduler.plan().transfers
        for rank in range(ranks)
    ]
    scheduler.settle(receipts)


def test_a_request_is_told_with_its_copies():
    scheduler = ByName(Pool(8), (FullAttention(4),))
    scheduler.store("a", tokens(0), ((0, 1, 2, 3),), 16)
    answer(scheduler)
    scheduler.match("b", tokens(0))
    scheduler.load("b", ((4, 5, 6, 7),))
    answer(scheduler)
    scheduler.finish("b")
    entry = scheduler.journal("b")
    assert entry is not None
    assert entry.explanation is not None
    assert entry.explanation.reason is Reason.NOTHING_MISSED
    (copy,) = entry.copies
    assert (copy.src, copy.dst, copy.num_blocks, copy.paths) == ("host", "device", 4, ("dma",))
    stored = scheduler.journal("a")
    assert stored is not None
    assert stored.explanation is None
    assert [copy.dst for copy in stored.copies] == ["host"]
    assert scheduler.recent() == ("a", "b")
    assert json.loads(json.dumps(entry_as_data("b", entry)))["copies"][0]["paths"] == ["dma"]


def test_failed_copies_say_why_and_ranks_are_summed():
    scheduler = ByName(Pool(8), (FullAttention(4),), num_ranks=2)
    scheduler.store("a", tokens(0), ((0, 1, 2, 3),), 16)
    answer(scheduler, ranks=2)
    scheduler.match("b", tokens(0))
    scheduler.load("b", ((4, 5, 6, 7),))
    answer(scheduler, Outcome.FAILED, ranks=2)
    entry = scheduler.journal("b")
    assert entry is not None
    (copy,) = entry.copies
    assert "rank 0" in copy.reason
    assert copy.num_bytes == 20
    assert copy.seconds == 0.5


def test_a_copy_that_is_overdue_is_told_once():
    now = [0.0]
    scheduler = ByName(Pool(8), (FullAttention(4),), clock=lambda: now[0])
    scheduler.store("a", tokens(0), ((0, 1, 2, 3),), 16)
    answer(scheduler)
    scheduler.match("b", tokens(0))
    scheduler.load("b", ((4, 5, 6, 7),))
    (transfer,) = scheduler.plan().transfers
    now[0] = 1000.0
    scheduler.settle()
    scheduler.settle([Receipt(transfer.id, FIRST_RANK, Outcome.OK)])
    entry = scheduler.journal("b")
    assert entry is not None
    assert ["no answer in time" in copy.reason for copy in entry.copies] == [True]


def test_a_request_counts_once_however_often_it_asks_and_again_when_its_name_is_reused():
    scheduler = ByName(Pool(8), (FullAttention(4),))
    for _ in range(3):
        scheduler.match("a", tokens(0))
        scheduler.match("a", tokens(0), computed_tokens=4)
        scheduler.finish("a")
    stats = scheduler.stats()
    assert stats.queries == 3
    assert dict(stats.missed) == {Reason.NEVER_STORED.value: 3}


def test_a_name_used_again_starts_a_new_entry():
    scheduler = ByName(Pool(8), (FullAttention(4),))
    for _ in range(2):
        scheduler.match("a", tokens(0))
        scheduler.store("a", tokens(0), ((0, 1, 2, 3),), 16)
        answer(scheduler)
        scheduler.finish("a")
        scheduler.reset()
    entry = scheduler.journal("a")
    assert entry is not None
    assert len(entry.copies) == 1


def test_it_forgets_the_oldest_and_stays_small():
    scheduler = ByName(Pool(64), (FullAttention(4),))
    for number in range(MOST_REQUESTS + 10):
        scheduler.match(f"r{number}", tokens(number))
        scheduler.finish(f"r{number}")
    assert len(scheduler.recent()) == MOST_REQUESTS
    assert scheduler.journal("r0") is None
    assert scheduler.explain(f"r{MOST_REQUESTS + 9}") is not None
    keys = tokens(5000, 4 * (MOST_COPIES + 8))
    for number in range(1, MOST_COPIES + 9):
        scheduler.store("long", keys[:number], (tuple(range(number)),), 4 * number)
        answer(scheduler)
    entry = scheduler.journal("long")
    assert entry is not None
    assert len(entry.copies) == MOST_COPIES
