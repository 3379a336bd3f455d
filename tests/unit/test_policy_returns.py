"""The policy that learns when conversations return: what it learns, keeps and believes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.conftest import PROFILE
from tests.fakes.crafted_keys import keys
from tests.fakes.published_trace import PUBLISHED, needs_published

import kvferry
from kvferry.cache.policies import learned, policy_named
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.policies.returns import Returns, Senders
from kvferry.cache.policies.returns_model import ReturnModel, row_of
from kvferry.cache.pool import Pool
from kvferry.cache.replay import PoolReplay
from kvferry.sim.simulation import Simulation, Trial, simulate
from kvferry.telemetry.traces import keys_of_numbers

NEW = row_of(1, 0, None, 1000)
OTHERS = ("lru", "arc", "s3fifo", "wtinylfu")


@pytest.mark.parametrize(("age", "chance"), [(5.0, 0.3), (100.0, 0.5), (20.0, 0.9)])
def test_it_learns_when_conversations_return(age: float, chance: float) -> None:
    """A block is worth most a little before most of them return, and little after that."""
    model, rng = ReturnModel(), Random(1)
    row, now, waiting = NEW, 0.0, list[tuple[float, int]]()
    for _ in range(3000):
        now += 1.0
        number = model.add(now, row)
        if rng.random() < chance:
            waiting.append((now + age * rng.uniform(0.9, 1.1), number))
        while waiting and waiting[0][0] <= now:
            at, returning = waiting.pop(0)
            model.close(returning, at)
        model.learn(now)
    ages = np.array([age / 16, 0.8 * age, 4 * age])
    early, soon, late = model.values(np.array([row] * 3), ages).tolist()
    assert soon > early > late


def test_what_it_learned_fades() -> None:
    model = ReturnModel()
    for at in range(50):
        model.close(model.add(float(at), NEW), float(at))
    model.learn(50.0)
    seen = model.learned[1].max()
    for at in range(100, 1801, 100):
        model.learn(50.0 + at)
    assert model.learned[1].max() == pytest.approx(seen / 2)
    model.learn(1e9)
    assert model.learned[1].max() > 0.45 * seen, "a silence says nothing against it"


def test_of_what_is_asked_for_at_the_same_time_the_oldest_goes_first() -> None:
    pool = Pool(4, Returns, clock=lambda: 0.0)
    for number in (1, 2, 3, 4, 1, 5, 6):
        asked = keys([number])
        pool.asked(asked, 512, pool.lookup(asked))
        lease = pool.reserve(asked)
        if lease is not None:
            lease.commit()
    assert [pool.match(keys([number])) for number in range(1, 7)] == [1, 0, 0, 1, 1, 1]


def test_it_learns_that_a_document_returns_behind_which_the_questions_differ() -> None:
    now = [0.0]
    pool = Pool(8, Returns, clock=lambda: now[0])
    policy = pool.eviction.policy
    assert isinstance(policy, Returns)
    for number in range(600):  # each is asked for twice
        now[0] += 10.0
        document = number // 2 * 100
        asked = keys([*range(document, document + 9), 1_000_000 + number])
        pool.asked(asked, 512 * 10, pool.lookup(asked))
        pool.catch_up()
    row, age = np.array([row_of(1, 0, None, 512 * 10)]), np.array([8.0])
    assert policy.model.values(row, age) > 2 * ReturnModel().values(row, age)


def test_a_long_silence_is_learned_of_bit_by_bit() -> None:
    model = ReturnModel()
    for at in range(4000):
        model.add(float(at), NEW)
    steps, before = 0, np.zeros(1)
    while not np.array_equal(before, model.learned[0]):
        before = model.learned[0].copy()
        model.learn(1e9)
        steps += 1
    assert 4000 / 256 <= steps < 40


def test_records_are_bounded_and_the_last_are_remembered() -> None:
    model = ReturnModel()
    first = model.add(0.0, 1)
    last = [model.add(float(at), 1) for at in range(100_000)][-1]
    assert first < model._first <= last - (1 << 15) + 1
    for record in (first, last):
        model.close(record, 2e5)
        model.change(record, 2)
    assert len(model._time) <= 1 << 16


def test_a_newcomer_that_is_worth_less_than_all_is_refused_unless_it_must_stay() -> None:
    now = [0.0]
    pool = Pool(8, Returns, clock=lambda: now[0])
    for turn in range(300):  # one that returns every ten seconds, others that never do
        now[0] += 5.0
        one_shot = keys([1000 + turn, 5000 + turn])
        for chat in (keys(range(8)), one_shot) if turn % 2 else (one_shot,):
            pool.asked(chat, 512 * len(chat), pool.lookup(chat))
            lease = pool.reserve(chat)
            if lease is not None:
                lease.commit()
    assert pool.match(keys(range(8))) == 8
    big = keys(range(9000, 9002))
    pool.asked(big, 1024, pool.lookup(big))
    assert pool.reserve(big) is None
    assert pool.match(keys(range(8))) == 8
    lease = pool.reserve(big, must_stay=True)
    assert lease is not None
    assert len(lease) == 2
    too_many = pool.reserve(keys(range(9200, 9208)), must_stay=True)
    assert too_many is None or len(too_many) < 8, "no more than fits into the bound on pins"


def test_a_sender_that_is_often_wrong_is_believed_less_and_forgiven() -> None:
    senders = Senders()
    for _ in range(3):
        senders.judge("liar", right=False)
    assert senders.believes("liar"), "so few say little"
    for _ in range(9):
        senders.judge("liar", right=False)
        senders.judge("honest", right=True)
    assert not senders.believes("liar")
    assert senders.believes("honest")
    assert senders.believes("")
    for _ in range(60):
        senders.judge("liar", right=True)
    assert senders.believes("liar")
    for number in range(5000):
        senders.judge(f"other {number}", right=True)
    assert len(senders._trust) == 4096


def chats(seed: int, count: int) -> list[tuple[float, list[int], bool, float]]:
    """Requests of chats that grow: when, their blocks, whether it was the last, until the next."""
    rng, found, base = Random(seed), [], 0
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(0.5)
        base += 1000
        then, length = at, rng.randint(4, 12)
        while True:
            goes_on = rng.random() < 0.5
            gap = rng.uniform(40, 160)
            found.append((then, list(range(base, base + length)), not goes_on, gap))
            if not goes_on:
                break
            then, length = then + gap, length + rng.randint(1, 4)
    return sorted(found)


def told(liars: float, *, silent: bool = False) -> dict[str, float]:
    """Hit ratios by kind of sender, where this share of 16 senders says the opposite."""
    counts: dict[str, list[int]] = {}
    for seed in range(3, 9):  # of one alone chance moves the silent by a twentieth
        tell(counts, chats(seed, 1000), liars, silent=silent)
    return {kind: hits / asked for kind, (hits, asked) in counts.items()}


def tell(
    counts: dict[str, list[int]],
    requests: list[tuple[float, list[int], bool, float]],
    liars: float,
    *,
    silent: bool,
) -> None:
    replay = PoolReplay(450, Returns)
    for at, blocks, is_over, gap in requests:
        number = blocks[0] // 1000
        evidence, kind = None, "silent"
        if number % 2 and not silent:
            sender = number // 2 % 16
            lies = sender < 16 * liars
            kind = "liar" if lies else "honest"
            over = is_over != lies
            within = None if over else gap + 1 if not is_over else 60.0
            evidence = Evidence(over, not over, within, f"sender {sender}")
        (hit,) = replay.serve(keys(blocks), len(blocks), at, evidence, 512 * len(blocks))
        count = counts.setdefault(kind, [0, 0])
        count[0] += hit
        count[1] += len(blocks)


def test_hints_help_those_that_give_them_and_lies_hurt_hardly_any_other() -> None:
    without, honest, lied_to = told(0.0, silent=True), told(0.0), told(0.25)
    assert honest["honest"] > 1.3 * without["silent"]
    assert lied_to["honest"] > 0.97 * honest["honest"]
    assert lied_to["silent"] > 0.98 * honest["silent"]
    assert lied_to["liar"] < honest["honest"]


# -- floors: traces that are made, of which some were never looked at while it was designed --------


@cache
def trace(kind: str) -> list[Any]:
    bench = str(Path(__file__).parents[2] / "bench")
    sys.path.insert(0, bench)
    try:
        from made_traces import made
    finally:
        sys.path.remove(bench)
    return made(kind, scale=SCALES.get(kind, 0.25))[: LENGTHS.get(kind, NUM_LINES)]


NUM_LINES = 2500 if PROFILE == "soak" else 1500
SCALES = {"agents": 0.1, "regime": 0.15, "diurnal": 0.1, "load": 0.15, "chance": 1.0}
LENGTHS = {"regime": 3700, "chance": 4000, "api": 3000}  # so many that chance matters little
SIZES = {
    "agents": 150,
    "api": 150,
    "batch": 150,
    "chance": 3000,
    "diurnal": 100,
    "load": 100,
    "rag": 300,
    "regime": 150,
    "scans": 150,
    "tenants": 100,
}


def hit_ratio(policy: str, lines: list[Any], num_slots: int) -> float:
    replay, hits, blocks = PoolReplay(num_slots, policy_named(policy)), 0, 0
    for line in lines:
        asked = keys_of_numbers(np.array(line["hash_ids"], dtype=np.uint64))
        whole = line["input_length"] // 512
        hits += replay.serve(asked, whole, line["timestamp"] / 1000, None, line["input_length"])[0]
        blocks += len(asked)
    return hits / blocks


@pytest.mark.parametrize("kind", SIZES)
def test_it_is_never_far_below_the_best_of_the_others(kind: str) -> None:
    lines, num_slots = trace(kind), SIZES[kind]
    best = max(hit_ratio(policy, lines, num_slots) for policy in OTHERS)
    assert hit_ratio("returns", lines, num_slots) >= 0.98 * best


def test_after_a_change_it_is_as_good_as_a_fresh_one() -> None:
    """Minutes 10 to 30 behind the moment at which what foretells a return is the opposite."""
    lines, num_slots = trace("regime"), 150
    change = 3600.0

    def late(policy: PoolReplay, start: float) -> int:
        hits = 0
        for line in lines:
            at = line["timestamp"] / 1000
            if at >= start:
                asked = keys_of_numbers(np.array(line["hash_ids"], dtype=np.uint64))
                whole, tokens = line["input_length"] // 512, line["input_length"]
                (hit,) = policy.serve(asked, whole, at, None, tokens)
                hits += hit * (change + 600 <= at < change + 1800)
        return hits

    assert lines[-1]["timestamp"] / 1000 > change + 1800
    learned, fresh = PoolReplay(num_slots, Returns), PoolReplay(num_slots, Returns)
    assert late(learned, 0.0) >= 0.95 * late(fresh, change)


@needs_published
def test_on_the_public_trace_it_is_as_far_ahead_as_it_is_said_to_be() -> None:
    floors = {1000: 0.085, 3000: 0.143, 10_000: 0.240, 30_000: 0.334}
    trials = tuple(Trial("returns", (size,)) for size in floors)
    asked = Simulation(paths=(PUBLISHED,), trials=trials, bound=False, jobs=1)
    for score, floor in zip(simulate(asked).scores, floors.values(), strict=True):
        assert score.hit_ratio >= floor


# -- across restarts ------------------------------------------------------------------------------


def taught() -> Returns:
    pool = Pool(64, Returns, clock=iter(np.arange(1e5).tolist()).__next__)
    for number in range(200):
        asked = keys([number % 20, 100 + number])
        pool.asked(asked, 64, pool.lookup(asked))
        pool.catch_up()
    policy = pool.eviction.policy
    assert isinstance(policy, Returns)
    return policy


def test_what_was_learned_is_for_the_next_process() -> None:
    policy, other = taught(), Pool(8, Returns).eviction.policy
    assert isinstance(other, Returns)
    row = np.array([NEW])
    before = other.model.values(row, np.zeros(1))
    packed = learned.pack(policy)
    assert len(packed) < 1 << 16
    assert learned.unpack(other, packed)
    for one, two in zip(policy.learned, other.learned, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    assert other.model.values(row, np.zeros(1)) != before


@pytest.mark.parametrize("harm", ["flip", "cut", "version", "empty", "nan"])
def test_what_is_damaged_is_discarded(harm: str) -> None:
    policy, bad = Pool(8, Returns).eviction.policy, taught()
    assert isinstance(policy, Returns)
    if harm == "nan":
        bad.learned[0][3] = np.nan
    found = bytearray(learned.pack(bad))
    if harm == "flip":
        found[len(found) // 2] ^= 1
    elif harm == "version":
        found[15] ^= 3
    before = [array.copy() for array in policy.learned]
    harmed = {"cut": bytes(found[:-4]), "empty": b""}.get(harm, bytes(found))
    assert not learned.unpack(policy, harmed)
    assert all(map(np.array_equal, policy.learned, before))


def test_a_policy_that_learns_nothing_leaves_nothing() -> None:
    policy = Pool(8).eviction.policy
    assert learned.pack(policy) == b""
    assert not learned.unpack(policy, learned.pack(taught()))


def test_a_library_with_a_disk_goes_on_with_what_it_learned(tmp_path: Path) -> None:
    def life() -> float:
        kv = [np.zeros((16, 16, 4), np.uint8)]
        with kvferry.attach(
            kv, model="m", block_tokens=16, host="64KiB", disk=str(tmp_path), disk_size="64MiB"
        ) as ferry:
            policy: Any = ferry._scheduler.pool.eviction.policy
            start = float(policy.learned[0][0])
            policy.learned[0][0] = 1.5
            return start

    assert life() != 1.5
    assert life() == 1.5
