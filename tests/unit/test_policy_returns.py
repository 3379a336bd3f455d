"""The policy that learns when conversations return: what it learns, keeps and survives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.published_trace import PUBLISHED, needs_published

from kvferry.cache.leases import as_slots
from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.policies.lru import Lru
from kvferry.cache.policies.returns import Returns, Segments
from kvferry.cache.policies.returns_history import Records, RequestHistory
from kvferry.cache.policies.returns_model import (
    ENDS,
    Hazards,
    HintKind,
    TurnKind,
    ValueTable,
    conversation,
    with_hint,
)
from kvferry.cache.pool import Pool
from kvferry.cache.replay import PoolReplay, Tokens
from kvferry.sim.simulation import Simulation, Trial, simulate

NEW = conversation(turn=1, gap=None, grown=0, kind=TurnKind.NEW)
Request = tuple[float, list[int]]


def learned(age: float, chance: float, count: int = 2000) -> Hazards:
    """From conversations of which so many return, all at about this age."""
    table, records, rng = ValueTable(), Records(1 << 14), Random(1)
    row, now, waiting = table.row(NEW), 0.0, []
    for _ in range(count):
        now += 1.0
        number = records.add(now, row)
        if rng.random() < chance:
            waiting.append((now + age * rng.uniform(0.9, 1.1), number))
        while waiting and waiting[0][0] <= now:
            at, returning = waiting.pop(0)
            records.returns(returning, at)
        records.teach(table.learn, now)
    return table.hazards


@pytest.mark.parametrize(("age", "chance"), [(5.0, 0.3), (100.0, 0.5), (20.0, 0.9)])
def test_it_learns_when_conversations_return(age: float, chance: float) -> None:
    chances = learned(age, chance).chances(np.array([NEW]))[0]
    returned = 1 - np.prod(1 - chances[: ENDS.searchsorted(4 * age)])
    assert returned == pytest.approx(chance, abs=0.12)
    assert 0.5 * age < ENDS[int(chances[: ENDS.searchsorted(4 * age)].argmax())] < 2.5 * age


def test_a_newcomer_that_is_worth_less_than_all_is_refused() -> None:
    now = [0.0]
    pool = Pool(8, Returns, clock=lambda: now[0])
    for turn in range(300):  # one that returns every ten seconds, others that never do
        now[0] += 5.0
        one_shot = keys([1000 + turn, 5000 + turn])
        for chat in (keys(range(6)), one_shot) if turn % 2 else (one_shot,):
            pool.asked(chat, 512 * len(chat), pool.lookup(chat))
            lease = pool.reserve(chat)
            if lease is not None:
                lease.commit()
    assert pool.match(keys(range(6))) == 6
    big = keys(range(9000, 9008))
    pool.asked(big, 4096, as_slots(()))
    lease = pool.reserve(big)
    assert lease is None or len(lease) <= 2
    assert pool.match(keys(range(6))) == 6


def test_a_long_silence_is_learned_of_bit_by_bit() -> None:
    table, records = ValueTable(), Records(4096)
    for at in range(4000):
        records.add(float(at), table.row(NEW))
    steps = 0
    while records.teach(table.learn, 1e9):
        steps += 1
    assert 4000 / 256 <= steps < 40


def test_records_are_bounded_and_the_last_are_remembered() -> None:
    records = Records(100)
    numbers = [records.add(float(at), 1, length=at) for at in range(1000)]
    assert numbers[0] < records.first
    for number in numbers[-100:]:
        at = number - records.first
        assert at >= 0
        assert records.facts(at).length == number
    records.returns(numbers[0], 2000.0)


def test_a_conversation_that_goes_on_is_known_also_where_nothing_of_it_is_here() -> None:
    heard = RequestHistory(64)
    first = heard.asked(keys(range(1000, 1010)), 5000, 0.0)
    second = heard.asked(keys(range(1000, 1014)), 7000, 30.0)
    at = second - heard.records.first
    assert at >= 0
    assert heard.records.facts(at).turn == 2, "its second turn"
    third = heard.asked(keys([1000, *range(2000, 2010)]), 5000, 40.0)
    at = third - heard.records.first
    assert at >= 0
    assert heard.records.facts(at).turn == 1, "one that shares a block with it is another"
    assert first < second < third


def test_an_answer_begins_the_wait_anew() -> None:
    heard = RequestHistory(64)
    record = heard.asked(keys(range(5)), 2500, 0.0)
    before, after = heard.answered(keys(range(7)), 900, 20.0)
    assert before == record != after
    assert heard.row_and_time(after, 99.0)[1] == 20.0
    going_on = heard.asked(keys(range(9)), 4500, 25.0)
    at = going_on - heard.records.first
    assert at >= 0
    assert heard.records.facts(at).turn == 2


def memory_of(heard: RequestHistory) -> int:
    arrays = [
        each
        for part in (heard.records, heard._recent, heard.table, heard.table.hazards)
        for each in vars(part).values()
        if isinstance(each, np.ndarray)
    ]
    return sum(array.nbytes for array in arrays)


def test_what_is_stale_does_not_pile_up() -> None:
    segments = Segments(8, lambda segment: None)
    kept = segments.new(as_slots([0]))
    moving = segments.new(as_slots([1, 2, 3]))
    for _ in range(1000):
        segments.leave(as_slots([2, 3]))
        segments.push(moving, as_slots([2, 3]))
        segments.leave(as_slots([1]))
        segments.push(kept, as_slots([1]))
        segments.leave(as_slots([1]))
        segments.push(moving, as_slots([1]))
    assert sum(len(slots) for pieces in segments._pieces for _, slots in pieces) < 200


def chats(seed: int, count: int, gap: float, stay: float) -> Iterator[Request]:
    """Conversations of a few blocks, of which a share comes back after about ``gap`` seconds."""
    rng, fresh = Random(seed), iter(range(1, 10**9))
    due: list[tuple[float, list[int], float]] = []
    now = 0.0
    for _ in range(count):
        now += 1.0
        kept = (
            stay if rng.random() < 0.5 else 0.0
        )  # half of them never do, as their first turn says
        chat = [0, *(next(fresh) for _ in range(5))]
        due.append((now, chat, kept))
        due.sort(key=lambda each: each[0])
        while due and due[0][0] <= now:
            _, chat, kept = due.pop(0)
            yield now, chat
            if rng.random() < kept:
                due.append((now + gap * rng.uniform(0.8, 1.2), [*chat, next(fresh)], 0.9))
                due.sort(key=lambda each: each[0])


def hit_ratio(
    make: EvictionPolicyMaker,
    requests: Iterator[Request],
    num_slots: int,
    said: Callable[[list[int]], Evidence | None] = lambda chat: None,
) -> float:
    replay, hits, blocks = PoolReplay(num_slots, make), 0, 0
    for at, chat in requests:
        hits += replay.serve(keys(chat), len(chat), at, said(chat), Tokens(512 * len(chat), 200))[0]
        blocks += len(chat)
    replay.pool.check_integrity()
    return hits / blocks


def test_it_keeps_those_that_return_where_lru_drops_all_just_before() -> None:
    size = 600  # a second brings some 25 blocks, a return takes 60 seconds
    lru = hit_ratio(Lru, chats(1, 800, 60.0, 0.9), size)
    learning = hit_ratio(Returns, chats(1, 800, 60.0, 0.9), size)
    assert learning > 1.5 * lru


def test_what_is_said_to_be_over_goes_and_what_goes_on_stays() -> None:
    going_on: set[int] = set()
    last: dict[int, int] = {}
    every = list(chats(2, 700, 60.0, 0.9))
    for number, (_, chat) in enumerate(every):
        if chat[1] in last:
            going_on.add(last[chat[1]])
        last[chat[1]] = number
    numbers = iter(range(len(every)))

    def evidence(chat: list[int]) -> Evidence:
        number = next(numbers)
        return Evidence(ended=number not in going_on, continues=number in going_on)

    plain = hit_ratio(Returns, iter(every), 400)
    hinted = hit_ratio(Returns, iter(every), 400, evidence)
    assert hinted > plain + 0.03


def test_false_hints_are_seen_through() -> None:
    every = list(chats(3, 700, 60.0, 0.9))
    plain = hit_ratio(Returns, iter(every), 300)
    lying = hit_ratio(Returns, iter(every), 300, lambda chat: Evidence(continues=True))
    assert lying > plain - 0.05, "what is said of all says nothing"


def test_a_scan_does_not_push_out_what_returns() -> None:
    def requests() -> Iterator[Request]:
        fresh = iter(range(10**6, 10**9))
        for at, chat in chats(4, 700, 20.0, 0.9):
            yield at, chat
            if 300 < at < 500:
                for _ in range(4):
                    yield at, [next(fresh) for _ in range(20)]

    assert hit_ratio(Returns, requests(), 300) > hit_ratio(Lru, requests(), 300) + 0.03


def going_on(within: float | None) -> Any:
    return np.array([with_hint(NEW, HintKind.CONTINUES, within)])


@pytest.mark.parametrize("within", [2.0, 60.0, 3000.0])
def test_a_hint_to_continue_holds_until_its_deadline(within: float) -> None:
    hazards, plain = Hazards(), Hazards().value(np.array([NEW]))[0]
    chances, worth = hazards.chances(going_on(within))[0], hazards.value(going_on(within))[0]
    end = int(ENDS.searchsorted(within))
    assert 1 - np.prod(1 - chances[: end + 2]) > 0.8
    assert worth[end - 2] > 2 * plain[end - 2]
    assert worth[end + 3 :] == pytest.approx(plain[end + 3 :]), "it fades once that time is over"


def test_a_deadline_counts_from_when_it_was_said() -> None:
    heard = RequestHistory(64)
    record = heard.asked(keys(range(5)), 2500, 0.0)
    heard.hinted(record, HintKind.CONTINUES, 130.0)  # said later, of thirty seconds more, say
    at = record - heard.records.first
    assert at >= 0
    assert heard.table.features(heard.records.facts(at).row)[-1] == going_on(130.0)[0, -1]
    assert going_on(130.0)[0, -1] != going_on(30.0)[0, -1]
    for endless in (float("inf"), 1e12):
        heard.hinted(record, HintKind.CONTINUES, endless)


def test_a_tool_that_answers_in_time_is_waited_for_and_no_longer() -> None:
    now = [0.0]
    pool = Pool(8, Returns, clock=lambda: now[0])

    def asks(chat: Any) -> None:
        pool.asked(chat, 512 * len(chat), pool.lookup(chat))
        lease = pool.reserve(chat)
        if lease is not None:
            lease.commit()

    def others(first: int, count: int) -> None:
        for at in range(count):  # conversations that never return
            now[0] += 1.0
            asks(keys([first + 10 * at + each for each in range(4)]))

    waiting = keys(range(4))
    others(10_000, 200)
    asks(waiting)
    pool.hint(waiting, Evidence(continues=True, within=16.0))
    others(1000, 12)
    assert pool.match(waiting) == 4, "kept through its tool's call"
    others(2000, 40)
    assert pool.match(waiting) == 0, "which never ended"


def test_a_clock_that_jumps_harms_nothing() -> None:
    rng = Random(6)
    now, latest = [0.0], 0.0
    pool = Pool(60, Returns, clock=lambda: now[0])
    for at, chat in chats(6, 600, 10.0, 0.9):
        now[0] = rng.choice([at, -at, 0.0, 1e12, at, at])
        pool.asked(keys(chat), 10**15, as_slots(()))
        lease = pool.reserve(keys(chat))
        pool.answered(keys(chat), 10**15)
        if lease is not None:
            lease.commit()
        pool.check_integrity()
        policy = pool.eviction.policy
        assert isinstance(policy, Returns)
        assert policy._now >= latest
        latest = policy._now
    worth = pool.eviction.policy._history.table.value  # type: ignore[attr-defined]
    assert np.isfinite(worth).all()
    assert (worth >= 0).all()


def test_many_conversations_take_no_more_memory_than_few() -> None:
    heard = RequestHistory(1000)
    heard.records = Records(2000)
    sizes, rng = [], Random(7)
    for at in range(12_000):
        heard.asked(keys([3 * at, 3 * at + 1, 3 * at + 2]), rng.randint(1, 10**6), at * 0.01)
        if at % 6000 == 5999:
            sizes.append(memory_of(heard))
    assert sizes[0] == sizes[1]
    assert len(heard.table._rows) < 12_000


@needs_published
@pytest.mark.parametrize(
    ("blocks", "hints", "floor", "others"),
    [
        (1000, 0.0, 0.083, "LRU .045, ARC .053, S3-FIFO .058"),
        (3000, 0.0, 0.135, "LRU .067, ARC .087, S3-FIFO .095"),
        (10_000, 0.0, 0.235, "LRU .215, ARC .226, S3-FIFO .201"),
        (3000, 0.5, 0.17, "LRU .102"),
    ],
)
def test_on_the_public_trace_it_is_as_far_ahead_as_it_is_said_to_be(
    blocks: int, hints: float, floor: float, others: str
) -> None:
    trials = (Trial("returns", (blocks,)),)
    asked = Simulation(paths=(PUBLISHED,), trials=trials, bound=False, jobs=1, hints=hints)
    assert simulate(asked).scores[0].whole.hit_ratio >= floor, others


def test_what_goes_on_stays_where_few_conversations_fit() -> None:
    """Of those looked at few may go next, or what is worth most is among them.

    Seen red with four that go next of whatever is looked at.
    """
    now = [0.0]
    pool = Pool(40, Returns, clock=lambda: now[0])

    def comes(number: int, evidence: Evidence | None = None) -> None:
        now[0] += 0.3
        own = keys(range(100 * number, 100 * number + 6))
        pool.asked(own, 96, pool.lookup(own))
        lease = pool.reserve(own)
        assert lease is not None
        lease.commit()
        pool.answered(own, 4)
        if evidence is not None:
            pool.hint(own, evidence)

    def num_here(number: int) -> int:
        return len(pool.lookup(keys(range(100 * number, 100 * number + 6))))

    comes(1, Evidence(continues=True, within=60.0))
    comes(2)
    comes(3, Evidence(ended=True))
    for number in range(4, 16):
        comes(number)
    assert (num_here(1), num_here(2), num_here(3)) == (6, 0, 0)
    pool.check_integrity()
