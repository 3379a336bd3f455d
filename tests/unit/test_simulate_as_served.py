"""What ``simulate`` counts is what the library serves: every policy, request by request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.cache.policies import policy_named
from kvferry.cache.replay import PoolReplay
from kvferry.core.keys import Keys
from kvferry.settings.eviction import POLICIES
from kvferry.sim.simulation import Simulation, Trial, simulate
from kvferry.telemetry.traces import TraceReader

BENCH = Path(__file__).parents[2] / "bench"
BLOCK_TOKENS, NUM_SLOTS, DEVICE_BLOCKS = 16, 96, 256


@pytest.fixture(scope="module")
def requests() -> list[tuple[float, list[int]]]:
    """The times of some requests, and their tokens."""
    sys.path.insert(0, str(BENCH))
    try:
        from made_traces import made
    finally:
        sys.path.remove(str(BENCH))
    lines = made("agents", block_tokens=512, scale=0.3)[:600]
    found = []
    for line in lines:
        ids = line["hash_ids"][: line["input_length"] // 512]
        found.append((line["timestamp"] / 1000, [n for n in ids for _ in range(BLOCK_TOKENS)]))
    return [each for each in found if each[1]]


class Served:
    """A library with a clock of our own."""

    def __init__(self, ferry: Any) -> None:
        self.ferry, self.now = ferry, 0.0
        pool = ferry._scheduler.pool
        for part in (pool.log, pool.eviction, pool.eviction.feed):
            part._clock = lambda: self.now
        self.pool = pool

    def serve(self, at: float, tokens: list[int]) -> int:
        self.now = at
        ferry = self.ferry
        keys = ferry.keys(tokens)
        hit = ferry.match(keys)
        found = len(hit)
        if found:
            assert ferry.wait(ferry.load(hit, list(range(found)))).ok
        if found < len(keys):
            blocks = list(range(found, len(keys)))
            ferry.wait(ferry.store(keys, blocks, first=found))
        return found


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    kv = [np.zeros((DEVICE_BLOCKS, BLOCK_TOKENS, 4), np.uint8)]
    block_bytes = kv[0][0].nbytes
    with kvferry.attach(
        kv,
        model="m",
        block_tokens=BLOCK_TOKENS,
        host=f"{NUM_SLOTS * block_bytes}B",
        policy=request.param,
        load_policy="always",
    ) as ferry:
        yield Served(ferry)


@pytest.mark.parametrize(
    ("served", "policy"), [(name,) * 2 for name in POLICIES], indirect=["served"]
)
def test_the_library_hits_and_stores_what_simulate_says(
    served: Served, policy: str, requests: list[tuple[float, list[int]]]
) -> None:
    replay = PoolReplay(served.pool.num_slots, policy_named(policy))
    hits = 0
    for at, tokens in requests:
        found = served.serve(at, tokens)
        keys: Keys = served.ferry.keys(tokens)
        assert (found,) == replay.serve(keys, len(keys), at, num_tokens=len(tokens))
        assert served.pool.num_reserved == replay.stored
        hits += found
    assert hits
    assert served.pool.counts.evicted == replay.evicted > 0


def test_a_trace_without_lengths_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * at, "hash_ids": [1, 2, 3 + at % 2]} for at in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, *_ = TraceReader([path])
    assert (first.input_tokens, first.num_full) == (3 * 512, 3)
    (score,) = simulate(
        Simulation(paths=(path,), trials=(Trial("lru", (10,)),), bound=False, jobs=1)
    ).scores
    assert score.hits == [2 + 3 + 3]
    saved = score.as_data()["seconds_saved"]
    assert saved == pytest.approx(8 * 512 * (50e-6 - 2.6e-6), abs=1e-3)
