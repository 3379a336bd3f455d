"""Load or compute: by policy, or by what was measured."""

from __future__ import annotations

import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.pools import evict

from kvferry.cache.policies.load_or_compute import BusyTime, LoadOrCompute, Verdict
from kvferry.cache.pool import Pool
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import FIRST_RANK, MatchState, Outcome, Receipt, TierName

DISK = TierName("disk")


def measured(*, bandwidth: float, prefill: float) -> LoadOrCompute:
    worth = LoadOrCompute("auto")
    worth.note_load(int(bandwidth), 1.0)
    worth.note_prefill(int(prefill), 1.0)
    return worth


def test_always_needs_no_measurement() -> None:
    worth = LoadOrCompute("always")
    worth.note_load(1, 1000.0)
    worth.note_prefill(1000, 0.001)
    assert worth.decide(100, 1 << 30, 0).verdict is Verdict.LOAD_ALWAYS


def test_one_bad_measurement_does_not_end_all_loads() -> None:
    """Only loads measure the link, so a first load that was slow must not be the last."""
    worth = measured(bandwidth=1, prefill=100)
    verdicts = []
    for _ in range(200):
        decision = worth.decide(100, 500, 0)
        verdicts.append(decision.verdict)
        if decision.load:
            worth.note_load(500, 0.001)  # the link was fast all the time
    assert verdicts.count(Verdict.LOAD_TO_MEASURE) == 1
    assert verdicts.index(Verdict.LOAD_TO_MEASURE) == 1  # the second hit already
    assert verdicts[-1] is Verdict.LOAD_FASTER


def test_a_link_that_stays_slow_is_measured_ever_more_rarely_and_never_while_busy() -> None:
    worth = measured(bandwidth=1, prefill=100)
    loads = []
    for number in range(1, 160):
        if worth.decide(100, 500, 0).load:
            loads.append(number)
            worth.note_load(500, 500.0)
    assert loads == [2, 6, 14, 30, 62, 94, 126, 158]
    assert not any(worth.decide(100, 500, 1).load for _ in range(100))


def timed_load(desk: Desk, request: str, keys, seconds: float) -> None:
    """Load a hit; the rank says that it took so long."""
    match = desk.match(request, keys)
    assert match.state is MatchState.HIT
    blocks = len(desk.load(request, match.num_tokens)[0])
    (transfer,) = desk.plan()
    desk.flying.clear()
    desk.scheduler.settle(
        [Receipt(transfer.id, FIRST_RANK, Outcome.OK, "", blocks * 1000, seconds)]
    )
    desk.scheduler.finish(request)


def test_a_hit_slower_to_load_than_to_compute_is_a_miss_that_says_so() -> None:
    desk = Desk(block_bytes=[1000], load_policy="auto")
    desk.scheduler.note_prefill(1000, 1.0)
    told = story(1, 4)
    desk.keep("a", told, 16)
    timed_load(desk, "b", told, seconds=1e-3)  # 4 MB/s: 1 ms for 16 tokens, computing takes 16
    assert desk.match("c", told).state is MatchState.HIT
    assert desk.scheduler.stats().verdicts == {"load_unmeasured": 1, "load_faster": 1}
    for number in range(20):
        desk.scheduler.hits.worth.note_load(1000, 10.0)  # the link is someone else's now
        desk.scheduler.finish(f"x{number}")
    desk.scheduler.preempt("c")
    assert desk.match("c", told).state is MatchState.MISS
    why = desk.scheduler.explain("c")
    assert why is not None
    assert why.reason.value == "load_slower"
    assert why.decision is not None
    assert why.decision.verdict is Verdict.COMPUTE_FASTER
    assert desk.scheduler.stats().verdicts["compute_faster"] == 1
    desk.scheduler.finish("c")
    desk.check_empty()  # a hit that is declined is let go


def test_bytes_waiting_on_the_link_count_against_a_load() -> None:
    """The second of two equal hits finds the link busy and computes."""
    desk = Desk(block_bytes=[1000], load_policy="auto")
    desk.scheduler.note_prefill(1000, 1.0)
    for number in (1, 2, 3):
        desk.keep(f"s{number}", story(number, 4), 16)
    timed_load(desk, "warm", story(3, 4), seconds=12e-3)  # a load takes 12 ms, computing 16
    assert desk.match("a", story(1, 4)).state is MatchState.HIT
    desk.load("a", 16)
    assert desk.match("b", story(2, 4)).state is MatchState.MISS
    desk.run()
    desk.scheduler.preempt("b")
    assert desk.match("b", story(2, 4)).state is MatchState.HIT


def test_each_link_has_a_speed_of_its_own() -> None:
    worth = measured(bandwidth=1000, prefill=100)
    assert worth.decide(100, 900, 0, DISK).verdict is Verdict.LOAD_UNMEASURED
    worth.note_load(10, 1.0, DISK)
    assert worth.bandwidth == 1000
    assert worth.bandwidth_of(DISK) == 10
    assert worth.decide(100, 900, 0).load
    assert not worth.decide(100, 900, 0, DISK).load
    decision = worth.decide(100, 5, 4, DISK)  # its own way, and the one to the device
    assert decision.load_seconds == pytest.approx(0.9 + 0.005)


def test_now_and_then_a_slow_tier_is_tried_again() -> None:
    worth = measured(bandwidth=1e9, prefill=100)
    worth.note_load(1, 1.0, DISK)
    verdicts = [worth.decide(10, 1000, 0, DISK).verdict for _ in range(64)]
    assert verdicts.count(Verdict.LOAD_TO_MEASURE) == 5


def test_transfers_beside_each_other_count_once() -> None:
    busy = BusyTime()
    for _ in range(4):
        busy.begin(10.0)
    assert busy.end(100, 11.0) == (100, 1.0)
    assert busy.end(100, 11.0) == (0, 0.0)
    assert busy.end(100, 11.5) == (200, 0.5)
    assert busy.end(0, 12.0) == (0, 0.5)
    busy.begin(50.0)  # it had nothing to do meanwhile
    assert busy.end(7, 51.0) == (7, 1.0)


def below(**settings: object) -> Desk:
    """A conversation on a tier, and nothing of it in the host."""
    tier = SlotTier(DISK, Pool(64), WriteMode.THROUGH)
    desk = Desk(tiers=[tier], slots=64, block_bytes=[1000], load_policy="auto")
    desk.scheduler.note_prefill(1000, 1.0)
    desk.keep("a", story(1, 8), 32)
    desk.run()
    evict(desk.pool, 64)
    return desk


def test_a_tier_slower_than_computing_is_not_read() -> None:
    """Eight blocks of four tokens: 0.032 s to compute, the time to read is unknown at first."""
    desk = below()
    assert desk.match("b", story(1, 8)).state is MatchState.WAIT
    desk.plan()
    desk.now += 8.0  # a thousand bytes a second
    desk.land()
    assert desk.match("b", story(1, 8)).num_tokens == 32
    desk.scheduler.finish("b")
    evict(desk.pool, 64)
    match = desk.match("c", story(1, 8))
    assert match.state is MatchState.MISS
    assert not desk.plan()
    why = desk.scheduler.explain("c")
    assert why is not None
    assert why.reason.value == "load_slower"
    assert why.lower_tokens == 32
    assert why.decision is not None
    assert why.decision.load_seconds == pytest.approx(8.0)
    assert why.decision.compute_seconds == pytest.approx(0.032)
    desk.scheduler.finish("c")
    desk.check_empty()


def test_pieces_are_cut_by_bytes() -> None:
    tier = SlotTier(DISK, Pool(2000), WriteMode.THROUGH)
    for num_bytes, pieces in ((0, 7), (100_000, 2), (1 << 20, 13), (64 << 20, 50)):
        desk = Desk(tiers=[tier], slots=1000, block_bytes=[num_bytes])
        assert -(-200 // desk.scheduler.lower.piece_slots) == pieces
