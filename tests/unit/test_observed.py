"""What is learned beside the engine: recordings, and the curve of what more memory would buy."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

import kvferry
from kvferry.cache.policies import policy_named
from kvferry.cache.replay import PoolReplay
from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.hints import Hints
from kvferry.sim.simulation import Simulation, Trial, simulate
from kvferry.telemetry.observer import (
    TIMES,
    MemoryCurve,
    ObservedRequest,
    Observer,
    Recorder,
    TierSizes,
)
from kvferry.telemetry.traces import TraceReader, TraceWriter, keys_of_numbers
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat, serve
from kvferry.tools.words import memory_words


def observed(
    numbers: list[int], at: float = 0.0, found: int = 0, **more: object
) -> ObservedRequest:
    chain = keys_of_numbers(np.array(numbers, dtype=np.uint64))
    return ObservedRequest(at, chain, len(numbers), 16 * len(numbers), found, None)


class Pupil:
    needs_all = True

    def __init__(self, broken: bool = False) -> None:
        self.learned: list[ObservedRequest] = []
        self.threads: set[str] = set()
        self.hurried = self.closed = 0
        self.broken = broken
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def learn(self, request: ObservedRequest) -> None:
        self.may_go_on.wait(20)
        if self.broken:
            raise ZeroDivisionError
        self.threads.add(threading.current_thread().name)
        self.learned.append(request)

    def idle(self) -> None:
        pass

    def hurry(self) -> None:
        self.hurried += 1

    def close(self) -> None:
        self.closed += 1


def test_requests_are_looked_at_in_order_on_a_thread_of_its_own() -> None:
    pupil = Pupil()
    observer = Observer([pupil], pause=lambda seconds: None)
    sent = [observed([n]) for n in range(100)]
    for request in sent:
        observer.see(request)
    observer.close()
    observer.close()
    assert pupil.learned == sent
    assert pupil.threads == {"kvferry-observer"}
    assert pupil.closed == 1


def test_a_consumer_that_raises_is_dropped_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Pupil(broken=True), Pupil()
    observer = Observer([bad, good], pause=lambda seconds: None)
    for n in range(20):
        observer.see(observed([n]))
    observer.close()
    assert len(good.learned) == 20
    assert caplog.text.count("Pupil stopped after an error of its own") == 1


def test_the_engine_never_waits_and_nothing_grows() -> None:
    pupil = Pupil()
    pupil.may_go_on.clear()
    observer = Observer([pupil], pause=lambda seconds: None)
    request = observed([1])
    for _ in range(10_000):
        observer.see(request)
    assert not pupil.learned, "the pupil is stuck with the first, and no caller waited for it"
    assert observer.num_missed > 5000
    assert len(observer._waiting) <= 4096
    pupil.may_go_on.set()
    deadline = time.monotonic() + 20
    while not pupil.hurried and time.monotonic() < deadline:
        time.sleep(0.01)
    observer.close()
    assert pupil.hurried >= 1


def test_closing_drops_what_waits_for_a_student_that_does_not_need_all() -> None:
    slow, quick = Pupil(), Pupil()
    slow.needs_all = False
    observer = Observer([slow, quick], pause=lambda seconds: None)
    for n in range(100):
        observer.see(observed([n]))
    began = time.monotonic()
    observer.close()
    assert time.monotonic() - began < 1.0
    assert (len(slow.learned), len(quick.learned)) == (0, 100)
    assert slow.closed == quick.closed == 1


def test_it_looks_at_several_in_a_burst_and_then_rests_as_it_has_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs 1.5 ms of a clock that only learning moves: so three of them are a burst."""
    now, rests, looked = [0.0], [], []

    class Slow(Pupil):
        def learn(self, request: ObservedRequest) -> None:
            super().learn(request)
            now[0] += 1.5e-3

    def rest(seconds: float) -> None:
        rests.append(seconds)
        looked.append(len(pupil.learned))

    monkeypatch.setattr("kvferry.telemetry.observer.time.thread_time", lambda: now[0])
    pupil = Slow()
    observer = Observer([pupil], pause=rest)
    observer._waiting.extend(observed([n]) for n in range(8))
    observer._look()
    assert looked == [3, 6]
    assert rests == pytest.approx([19 * 4.5e-3] * 2)


def recorded(path: Path, *requests: ObservedRequest, **more: int) -> None:
    recorder = Recorder(path, block_tokens=16, most_bytes=more.get("most_bytes", 1 << 20), now=0.0)
    for request in requests:
        recorder.learn(request)
    recorder.close()


def test_a_recording_has_no_keys_of_ours_and_equal_ones_stay_equal(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    chain = list(range(100, 140))
    first, second = observed(chain, 1.0, 64), observed([*chain, *range(200, 216)], 2.0)
    first.end(7)
    second.hints = Hints(continues=True, within=30.0, tenant="acme")
    recorded(path, first, second)
    text = path.read_bytes()
    assert b"acme" not in text
    reader = TraceReader([path])
    assert reader.block_tokens == 128
    a, b = reader
    assert (a.input_tokens, a.output_tokens, a.hit_tokens, a.num_full) == (640, 7, 64, 5)
    assert b.at == 1.0
    assert b.hints == Hints(continues=True, within=30.0)
    assert a.numbers.tolist() == b.numbers[:5].tolist()
    assert len(set(b.numbers.tolist())) == 7
    real = set(first.keys.array[:, 0].tolist()) | set(first.keys.array[:, 1].tolist())
    assert not real & set(a.numbers.tolist())
    recorded(tmp_path / "other.jsonl", observed(chain))
    (again,) = TraceReader([tmp_path / "other.jsonl"])
    assert not set(again.numbers.tolist()) & set(a.numbers.tolist()), "another secret"


def test_it_is_written_in_the_order_of_arrival_once_the_answer_is_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, block_tokens=128, most_bytes=1 << 20, now=0.0)
    slow, quick = observed([1], 0.0), observed([2], 1.0)
    recorder.learn(slow)
    recorder.learn(quick)
    quick.end(3)
    recorder._write(before=0.0)
    assert recorder.writer._written < 200, "the first is not over"
    slow.end(9)
    recorder._write(before=0.0)
    late = observed([3], 10.0)
    recorder.learn(late)
    recorder.learn(observed([4], 500.0))  # no line waits for ever
    recorder.writer.flush()
    assert [each.output_tokens for each in TraceReader([path])] == [9, 3, 0]
    recorder.close()
    assert len(list(TraceReader([path]))) == 4


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_files_are_the_owners_alone_bounded_and_read_in_order(tmp_path: Path, name: str) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / name
        requests = [observed(list(range(n, n + 16)), float(n)) for n in range(0, 3200, 16)]
        recorded(path, *requests, most_bytes=12_000)
    finally:
        os.umask(before)
    files = sorted(each for each in tmp_path.iterdir() if not each.name.startswith("."))
    assert len(files) == 4
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files)
    assert sum(each.stat().st_size for each in files) < 14_000
    reader = TraceReader(files)
    times = [each.at for each in reader]
    assert reader.num_late == 0
    assert len(times) > 50
    assert times == sorted(times)


def test_an_earlier_recording_is_kept_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, observed(list(range(16))))
    one = TraceWriter(path, block_tokens=16, most_bytes=1 << 20)
    two = TraceWriter(path, block_tokens=16, most_bytes=1 << 20)
    assert (one.path.name, two.path.name) == ("trace.jsonl", "trace.jsonl-1")
    one.close()
    two.close()
    assert len(list(TraceReader([tmp_path / "trace.jsonl.1"]))) == 1


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "folder", tmp_path, link):
        with pytest.raises(ConfigError, match="record: cannot write"):
            TraceWriter(path, block_tokens=16, most_bytes=1 << 20)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="record: expected a whole path"):
        Config(record="trace.jsonl")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl", block_tokens=16, most_bytes=1 << 20)
    assert writer._raw is not None
    os.close(writer._raw.fileno())  # whatever is written now fails
    for _ in range(3):
        writer.write(0.0, b"12345678", 16)
        writer.flush()
    writer.close()
    assert caplog.text.count("recording to") == 1


def test_the_library_does_not_say_how_long_an_answer_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    kv = [np.zeros((32, 2, 16, 2, 8), np.float32)]
    with kvferry.attach(kv, model="m", block_tokens=16, host="1MiB", record=str(path)) as ferry:
        keys = ferry.keys(list(range(320)))
        ferry.match(keys)
        ferry.wait(ferry.store(keys, list(range(20))))
        ferry.match(keys)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(line["input"], line["hit"]) for line in lines] == [(320, 0), (320, 320)]
    assert not any("output" in line for line in lines)
    assert len(list(TraceReader([path], strict=True))) == 2


def test_a_server_records_what_simulates_to_what_it_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    shape = ModelShape(
        vocab=97, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, hidden=16
    )
    chat = Chat(
        num_conversations=14, num_turns=4, opening_tokens=700, question_tokens=200,
        answer_tokens=8, num_users=2, vocab=97,
    )  # fmt: skip
    config = Config(record=str(path), load_policy="always", policy="lru")
    with (
        Runner(Decoder(shape), num_blocks=220) as runner,
        Offloader(runner, host_bytes=900 * 1024, config=config) as offloader,
    ):
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        serve(engine, chat)
        engine.drain()
        num_slots, evicted = offloader.host.num_slots, offloader.stats().pool.evicted
    assert evicted > 100, "it must have had to choose"
    requests = list(TraceReader([path]))
    assert len(requests) == 56
    asked = sum(each.input_tokens for each in requests)
    found = sum(each.hit_tokens or 0 for each in requests) / asked
    assert sum(each.output_tokens for each in requests) > 0
    simulated = simulate(
        Simulation(paths=(path,), trials=(Trial("lru", (num_slots // 8,)),), jobs=1, bound=False)
    )
    (score,) = simulated.scores
    assert 0.2 < found < 0.9
    assert abs(score.whole.token_ratio - found) < 0.12


def chats(count: int) -> list[ObservedRequest]:
    """Conversations of a few hundred blocks behind one that all share; some come back soon."""
    rng = np.random.default_rng(11)
    lengths: dict[int, int] = {}
    requests = []
    for n in range(count):
        talk = int(max(0, n - rng.geometric(0.02)))
        lengths[talk] = lengths.get(talk, int(rng.integers(40, 200))) + 8
        own = range(10_000 * (talk + 1), 10_000 * (talk + 1) + lengths[talk])
        requests.append(observed([*range(20), *own], at=2.0 * n))
    return requests


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_small_pools_hit_as_large_ones(policy: str) -> None:
    requests, blocks = chats(250), 3000
    tier = TierSizes("host", tuple(blocks * times for times in TIMES))
    curve = MemoryCurve([tier], policy_named(policy), block_tokens=16)
    for request in requests:
        curve.learn(request)
    curve.idle()
    told = curve.points["host"]
    for times in TIMES:
        whole = PoolReplay(round(blocks * times), policy_named(policy))
        hits = sum(whole.serve(r.keys, len(r.keys), r.at, None)[0] for r in requests)
        real = hits / sum(len(r.keys) for r in requests)
        assert abs(told[times] - real) < 0.06, (times, told[times], real)
    assert told[0.5] < told[4.0] - 0.1, "or there would be nothing to see"


def test_a_block_that_all_share_counts_once_for_each_of_them() -> None:
    """It is one key, so it is sampled or it is not; either way it is a fifth of what is asked."""
    tier = TierSizes("host", tuple(8192 * times for times in TIMES))
    curve = MemoryCurve([tier], policy_named("lru"), block_tokens=16)
    for shared in range(2):  # two blocks in turn: the chances that both are sampled are small
        for n in range(1000):
            own = 10 + 4 * (n + 1000 * shared)
            curve.learn(observed([shared, *range(own, own + 4)], at=float(n)))
    curve.idle()
    for share in curve.points["host"].values():
        assert abs(share - 0.2) < 0.08


def test_the_curve_is_bounded_and_can_make_do_with_less() -> None:
    tier = TierSizes("host", tuple(1e6 * times for times in TIMES))
    curve = MemoryCurve([tier], policy_named("lru"), block_tokens=16)
    (each,) = curve._tiers
    assert [replay.pool.num_slots for replay in each._pools] == [512, 1024, 2048, 4096]
    for _ in range(20):
        curve.hurry()
    assert [replay.pool.num_slots for replay in each._pools] == [32, 64, 128, 256]
    curve.learn(observed(list(range(50_000))))
    curve.idle()
    assert curve.points == {}, "too little to say anything"


def test_a_ferry_tells_its_curve_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.telemetry.observer._REST", 0)
    kv = [np.zeros((64, 4096), dtype=np.float32)]
    settings: dict[str, Any] = {"block_tokens": 16, "memory_curve": "on"}
    with kvferry.attach(kv, model="m", host="4MiB", tiers="memory:2MiB", **settings) as ferry:
        scheduler = ferry._scheduler
        for n in range(80):
            chain = keys(range(8 * (n % 10), 8 * (n % 10) + 8))
            ferry.release(ferry.match(chain))
            ferry.wait(ferry.store(chain, range(8)))
        deadline = time.monotonic() + 60
        while not scheduler.stats().memory_curve and time.monotonic() < deadline:
            time.sleep(0.05)
        curve = scheduler.stats().memory_curve
        assert set(curve) == {"host", "memory"}
        assert set(curve["host"]) == set(TIMES)
        assert curve["host"][4.0] >= curve["host"][0.5]
    names = [thread.name for thread in threading.enumerate()]
    assert "kvferry-observer" not in names


def test_the_gain_of_twice_the_memory_is_said_in_words() -> None:
    words = "twice the host memory: about 61% instead of 44% of prompt tokens"
    assert memory_words("host", {"1": 0.44, "2": 0.61}) == words
    assert memory_words("host", {}) == memory_words("host", {"1": 0.4}) == ""
