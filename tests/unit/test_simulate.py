"""Simulation of traces: hits by hand, the all-knowing bound by search, hints, parts, processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import Evidence, Residents
from kvferry.cache.policies.lru import Lru
from kvferry.cache.replay import PoolReplay
from kvferry.errors import ConfigError
from kvferry.sim.simulation import (
    PreviousUses,
    SchedulerReplay,
    Simulation,
    Trial,
    clairvoyant_hits,
    simulate,
)
from kvferry.telemetry.traces import TraceRequest
from kvferry.types import SlotArray


def request(at: float, ids: list[int], partial: bool = False) -> TraceRequest:
    tokens = 512 * len(ids) - (100 if partial else 0)
    numbers = np.array(ids, dtype=np.uint64)
    return TraceRequest(at, numbers, len(ids) - partial, tokens)


def written(folder: Path, *requests: TraceRequest) -> Path:
    path = folder / "trace.jsonl"
    lines = [
        {
            "timestamp": each.at * 1000,
            "input_length": each.input_tokens,
            "output_length": 1,
            "hash_ids": each.numbers.tolist(),
        }
        for each in requests
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def asked(path: Path, *capacities: int, **more: object) -> Simulation:
    trials = tuple(Trial("lru", (capacity,)) for capacity in capacities)
    return Simulation(**{"paths": (path,), "trials": trials, "jobs": 1, **more})  # type: ignore[arg-type]


def test_hits_evictions_and_tokens(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        request(0, [0, 1, 2]),
        request(1, [0, 1, 2, 3]),  # three hits
        request(2, [10, 11]),  # evicts from the end of the other
        request(3, [0, 1, 2, 3]),  # two left
    )
    simulated = simulate(asked(path, 4))
    (score,) = simulated.scores
    assert score.hits == [5]
    assert score.blocks == 13
    assert score.hit_tokens == 5 * 512
    assert score.evicted == 4
    assert score.stored == 8
    (best,) = simulated.bounds
    assert best.hits == [7]
    assert simulated.trace.seconds == 3


def test_a_partial_last_block_is_asked_for_and_not_stored(tmp_path: Path) -> None:
    path = written(tmp_path, request(0, [0, 1], partial=True), request(1, [0, 1], partial=True))
    (score,) = simulate(asked(path, 4)).scores
    assert (score.hits, score.blocks, score.stored) == ([1], 4, 1)
    (score,) = simulate(asked(path, 4, keep_partial=True)).scores
    assert (score.hits, score.stored) == ([2], 2)
    assert score.hit_tokens == 2 * 512 - 100, "no more than the prompt has"


def test_processes_find_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    talks = [list(range(100 * n, 100 * n + 20)) for n in range(12)]
    requests = [
        request(n, talks[rng.integers(12)][: rng.integers(1, 20)], partial=False)
        for n in range(300)
    ]
    one = asked(written(tmp_path, *requests), 20, 50, 120, hints=0.5)
    alone, together = simulate(one), simulate(replace(one, jobs=3))
    for a, b in zip(alone.scores + alone.bounds, together.scores + together.bounds, strict=True):
        assert a.as_data() | {"seconds": 0} == b.as_data() | {"seconds": 0}
    with pytest.raises(ConfigError, match="cannot be imported"):
        simulate(replace(one, jobs=2, trials=(Trial("no_module_x:y", (5,)),) * 2))


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    path = written(tmp_path, *[request(n, list(range(40 * n, 40 * n + 40))) for n in range(3000)])
    arguments = [str(path), "--capacity", "100,200,300,400,500,600", "--jobs", "2"]
    started = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "simulate", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    children: list[str] = []
    while len(children) < 2 and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.05)
        children = [each for each in children_of(started.pid) if "spawn_main" in told(each)]
    assert len(children) == 2
    started.kill()
    started.wait()
    while any("spawn_main" in told(each) for each in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in children if "spawn_main" in told(each)]


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def told(pid: str) -> str:
    """The command line of a process, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def chats(count: int, seed: int = 3) -> list[TraceRequest]:
    """Conversations that come back in turn, with a block or two more each time."""
    rng = np.random.default_rng(seed)
    lengths = dict.fromkeys(range(25), 3)
    requests = []
    for n in range(count):
        talk = int(rng.integers(25))
        lengths[talk] += int(rng.integers(1, 3))
        ids = [0, *range(1000 * talk + 1, 1000 * talk + lengths[talk])]
        requests.append(request(30.0 * n, ids, partial=n % 3 == 0))
    return requests


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_the_scheduler_does_what_the_pool_alone_does(policy: str) -> None:
    """So that figures for one tier and for several can stand side by side."""
    alone = PoolReplay(60, policy_named(policy))
    whole = SchedulerReplay((60,), policy_named(policy), Lru, write="spill", block_tokens=512)
    for each in chats(150):
        assert alone.serve(each.keys(), each.num_full, each.at, None) == whole.serve(
            each.keys(), each.num_full, each.at, None
        )
        whole.host.check_integrity()
    assert (alone.stored, alone.evicted) == (whole.stored, whole.evicted)
    assert alone.evicted > 100


@pytest.mark.parametrize("write", ["spill", "through"])
def test_what_the_host_drops_is_found_below(tmp_path: Path, write: str) -> None:
    path = written(tmp_path, *chats(150))
    capacities = ((40,), (40, 60), (40, 60, 400), (500,))
    trials = tuple(Trial("lru", capacity, write) for capacity in capacities)
    simulated = simulate(asked(path, trials=trials))
    host, two, three, all_fits = simulated.scores
    assert [len(each.hits) for each in (host, two, three)] == [1, 2, 3]
    assert abs(two.hits[0] - host.hits[0]) < 0.1 * host.hits[0], "about what the host alone has"
    assert two.hits[1] > 50
    assert three.hits[2] > 50
    assert sum(host.hits) < sum(two.hits) < sum(three.hits) <= sum(all_fits.hits)
    assert sum(three.hits) > 0.9 * sum(all_fits.hits)
    assert [score.trial.capacity for score in simulated.bounds] == [(40,), (100,), (500,)]


def test_tiers_have_a_policy_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, *chats(60))
    trials = tuple(
        Trial("lru", (20, 60), tier_policy=policy) for policy in ("lru", f"{__name__}:Counted")
    )
    Counted.made.clear()
    simulated = simulate(asked(path, trials=trials, bound=False))
    assert Counted.made == [60], "the tier's, not the host's"
    assert simulated.scores[0].as_data()["tier_policy"] == "lru"


class Counted(Lru):
    made: ClassVar[list[int]] = []

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self.made.append(residents.num_slots)


def best_by_search(requests: list[list[int]], capacity: int) -> int:
    """The most hits over all ways to choose what is kept after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for ids in requests:
        after: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            leading = next((n for n, each in enumerate(ids) if each not in cached), len(ids))
            there = sorted(cached | set(ids))
            for kept in combinations(there, min(capacity, len(there))):
                state = frozenset(kept)
                after[state] = max(after.get(state, -1), hits + leading)
        states = after
    return max(states.values())


# Blocks of a tree: a block's number says all that comes before it.
PATHS = ([0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5], [6], [6, 7], [6, 7, 8])


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.sampled_from(PATHS), min_size=1, max_size=8), capacity=st.integers(1, 4)
)
def test_the_bound_is_the_best_there_is(requests: list[list[int]], capacity: int) -> None:
    future = PreviousUses.of([request(n, ids) for n, ids in enumerate(requests)])
    assert clairvoyant_hits(future, capacity).sum() == best_by_search(requests, capacity)


class Told(Lru):
    """Writes down what it is told."""

    heard: list[tuple[int, Evidence]]

    def __init__(self, residents: object) -> None:
        super().__init__(residents)  # type: ignore[arg-type]
        Told.heard = []

    def hint(self, slots: SlotArray, evidence: Evidence) -> None:
        Told.heard.append((len(slots), evidence))


def test_hints_say_whether_a_conversation_goes_on(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        request(0, [0, 1, 2]),
        request(1, [0, 50, 51]),  # shares a beginning, is no continuation
        request(10, [0, 1, 2, 3]),
        request(30, [0, 1, 2, 3, 4]),
    )
    trial = (Trial(f"{__name__}:Told", (100,)),)
    simulate(asked(path, hints=1.0, trials=trial))
    assert Told.heard[::2] == Told.heard[1::2], "once when it comes and once when it is over"
    assert Told.heard[::2] == [
        (3, Evidence(continues=True, within=10.0)),
        (3, Evidence(ended=True)),
        (4, Evidence(continues=True, within=20.0)),
        (5, Evidence(ended=True)),
    ]
    simulate(asked(path, hints=0.0, trials=trial))
    assert Told.heard == []


def test_a_share_of_conversations_is_told_of_as_a_whole(tmp_path: Path) -> None:
    talks = [request(n % 200, list(range(1000 * (n % 200), 1000 * (n % 200) + 2 + n // 200)))
             for n in range(600)]  # fmt: skip
    path = written(tmp_path, *talks)
    trial = (Trial(f"{__name__}:Told", (10_000,)),)
    simulate(asked(path, hints=0.5, trials=trial))
    assert 400 < len(Told.heard) < 800
    assert len(Told.heard) % 6 == 0
    before = Told.heard
    simulate(asked(path, hints=0.5, trials=trial))
    assert Told.heard == before
