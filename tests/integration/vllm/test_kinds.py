"""The layers of today's models, in random lives with drafts, preemption and replay.

Everything but the model is real: vLLM's scheduler, coordinator and block pool, and the connector.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.vllm_families import FAMILIES, Family, stand_in
from tests.integration.vllm.simulated import Shape, Simulation
from vllm.v1 import kv_cache_interface

from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.transfer.job import CopyJob, Direction

if not hasattr(kv_cache_interface, "CircularBufferSpec"):
    pytest.skip("this vLLM says too little of its layers", allow_module_level=True)

I64 = torch.int64
SIZE = {"num_kv_heads": 1, "head_size": 1, "head_size_v": 0, "dtype": I64}


def _shapes() -> list[Shape]:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        RSWASpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    def full(size: int, kind: Any = FullAttentionSpec, **more: Any) -> Any:
        return kind(block_size=size, **{**SIZE, **more})

    def window(size: int, width: int, kind: Any = SlidingWindowSpec, **more: Any) -> Any:
        return kind(block_size=size, sliding_window=width, dcp_sharded=False, **{**SIZE, **more})

    def state(size: int, drafts: int = 0, **more: Any) -> Any:
        return MambaSpec(
            block_size=size,
            shapes=((1,),),
            dtypes=(I64,),
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
            **more,
        )

    chunked = ChunkedLocalAttentionSpec(
        block_size=16, attention_chunk_size=64, dcp_sharded=False, **SIZE
    )
    mla = {"head_size_v": 0}
    export = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 16}
    v4 = (
        full(64, MLAAttentionSpec, tokens_per_state=4, **mla),
        full(64, MLAAttentionSpec, tokens_per_state=32, **mla),
        window(64, 128, SlidingWindowMLASpec, **mla),
        window(4, 8, SlidingWindowMLASpec, **mla),
        window(8, 32, SlidingWindowMLASpec, **mla),
    )
    ring = CircularBufferSpec(block_size=8, dcp_sharded=False, **SIZE)
    v41 = (
        full(64, MLAAttentionSpec, tokens_per_state=2, **mla),
        window(128, 100, SlidingWindowMLASpec, bounded_replay=True, **mla),
        ring,
    )
    ring4 = CircularBufferSpec(block_size=16, dcp_sharded=False, **SIZE)
    glm5 = (
        full(64, MLAAttentionSpec, **mla),
        full(64, MLAAttentionSpec, tokens_per_state=8),
        ring4,
    )
    return [
        Shape("full", (full(16),), 16),
        Shape("full, drafts", (full(16),), 16, num_drafts=3, draft_groups=(0,)),
        Shape("full, drafts of its own text", (full(16),), 16, num_drafts=3),
        Shape("context parallel", (full(16),), 16, dcp=2),
        Shape("context parallel, drafts", (full(16),), 16, 3, (0,), dcp=4),
        Shape("prefill context parallel", (full(16, MLAAttentionSpec, **mla),), 16, pcp=2),
        Shape("gpt-oss", (full(16), window(16, 64)), 16),
        Shape("gpt-oss, EAGLE", (full(16), window(16, 64), full(16)), 16, 3, (2,)),
        Shape(
            "retained tokens",
            (full(16), window(16, 40, extra_retained_tokens=20)),
            16,
            num_drafts=3,
            draft_groups=(1,),
        ),
        Shape("Llama 4", (full(16), chunked), 16),
        Shape("reference window", (full(16, RSWASpec, rswa_window=24),), 16),
        Shape("DeepSeek-V4", v4, 64, num_blocks=420),
        Shape("DeepSeek-V4.1", v41, 64, num_drafts=3, rings={2: 0}, num_blocks=120),
        Shape("GLM5-next", glm5, 64, num_drafts=3, rings={2: 1}, num_blocks=120),
        Shape("Qwen3.5", (full(32), state(32)), 32),
        Shape("Kimi-K3", (full(32, MLAAttentionSpec, **mla), state(32, **export)), 32),
        Shape(
            "Kimi-K3, MTP",
            (full(32, MLAAttentionSpec, **mla), state(32, 2, **export)),
            32,
            num_drafts=2,
            draft_groups=(0,),
        ),
        Shape("Qwen3.5, MTP", (full(32), state(32, 3)), 32, num_drafts=3, draft_groups=(0,)),
        Shape(
            "Qwen3.5, drafts of its own text, all states",
            (full(32), state(32, 3)),
            32,
            num_drafts=3,
            options={"prefix_cache_retention_interval": 32},
        ),
        Shape(
            "Qwen3.5, MTP, few states",
            (full(32), state(32, 2), state(32, 2)),
            32,
            num_drafts=2,
            draft_groups=(0,),
            options={"prefix_cache_retention_interval": 64},
        ),
    ]


@pytest.fixture(params=_shapes(), ids=lambda shape: shape.name)
def shape(request: pytest.FixtureRequest) -> Shape:
    found: Shape = request.param
    return found


@pytest.fixture(autouse=True)
def _stores_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.scheduler.stores.STORE_TOKENS", 64)


def live(sim: Simulation, num_waves: int = 5, num_requests: int = 8) -> None:
    """Requests come, are preempted where blocks run out, are aborted, and go on.

    After each wave vLLM forgets what it has: what the next one finds is kvferry's.
    """
    rng = sim.rng

    def act() -> None:
        if sim.num_came < most and rng.random() < 0.4:
            sim.come()
        for name in list(sim.scheduler.requests):
            if rng.random() < 0.005:
                sim.abort(name)
            elif rng.random() < 0.02:
                sim.turn(name)

    for wave in range(1, num_waves + 1):
        most = wave * num_requests
        while sim.num_came < most:
            sim.run(act)
        sim.rest()
        assert sim.scheduler.reset_prefix_cache(), "device blocks are held for ever"


@pytest.mark.parametrize("seed", range(2))
def test_no_request_reads_what_is_not_its_own(shape: Shape, llama: Path, seed: int) -> None:
    with closing(Simulation(shape, llama, seed)) as sim:
        live(sim)
        stats = sim.serving.scheduler.stats()
        assert stats.hit_tokens > 500, "next to nothing was ever loaded"
        if shape.num_drafts:
            assert sim.num_drafts_refused > 0


def test_ranks_whose_answers_vllm_mixes_up_find_their_disks_again(
    llama: Path, tmp_path: Path
) -> None:
    """Seen red: vLLM keeps one answer of several context-parallel ranks at the start."""
    (shape,) = (each for each in _shapes() if each.pcp > 1)
    settings = {"disk": str(tmp_path), "disk_size": "64MiB", "disk_keep_free": 0}
    found = []
    for _ in range(2):
        with closing(Simulation(shape, llama, 1, **settings, tier_write="through")) as sim:
            sim.come(sim.stories[0], 1)
            sim.run()
            sim.rest()
            found.append(sim.serving.scheduler.stats().hit_tokens)
    assert found == [0, 688]


def test_a_state_that_a_draft_ran_past_is_stored_once_it_was_put_right(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a model runner ends its step for connectors before it knows what was refused.

    Seen red with stores in the step that computes.
    """
    monkeypatch.setattr("kvferry.scheduler.stores.STORE_TOKENS", 1)
    (shape,) = (each for each in _shapes() if each.name.endswith("all states"))
    with closing(Simulation(shape, llama, 1)) as sim:
        sim.saves_before_sampling = True
        live(sim, num_waves=8)
        assert sim.serving.scheduler.stats().hit_tokens > 500
        assert sim.num_drafts_refused > 0


@pytest.mark.parametrize("name", ["full", "gpt-oss", "Qwen3.5, MTP"])
def test_a_forced_reset_waits_for_no_store(llama: Path, name: str) -> None:
    """Seen red: vLLM raised wherever a store was under way, in sleep and pause as well.

    Only a request that waits for a load keeps its blocks, with any connector. With some resets the
    weights change, so that nothing from before may be read.
    """
    (shape,) = (each for each in _shapes() if each.name == name)
    num_reset = num_held = 0
    with closing(Simulation(shape, llama, 3, tiers="memory:64MiB", tier_write="through")) as sim:

        def act() -> None:
            nonlocal num_reset, num_held
            if sim.num_came < 60 and sim.rng.random() < 0.4:
                sim.come()
            if sim.rng.random() < 0.15 and not sim.num_waiting:
                num_held += bool(sim.serving.engine.num_held)
                if num_reset % 4 == 3:
                    sim.replace_weights()
                else:
                    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
                assert sim.serving.engine.num_held == 0
                num_reset += 1

        while sim.num_came < 60:
            sim.run(act)
        sim.rest()
        assert num_reset > 20
        assert num_held > 5
        assert sim.num_quiet > 20 or shape.num_drafts
        assert sim.serving.scheduler.stats().hit_tokens > 500
        assert sim.serving.engine.num_held == 0
        assert sim.scheduler.reset_prefix_cache()
        sim.serving.scheduler.check_integrity()


@pytest.mark.parametrize(("name", "num_blocks"), [("full", 50), ("gpt-oss", 96)])
def test_loads_that_fail_on_a_small_device_end_every_wait(
    llama: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_blocks: int
) -> None:
    """Seen red: a request that asked again still counted the blocks of its failed load."""
    (shape,) = (each for each in _shapes() if each.name == name)
    chance, move = random.Random(5), CpuEngine._move

    def fails(engine: CpuEngine, job: CopyJob) -> None:
        if job.direction is Direction.LOAD and chance.random() < 0.4:
            raise OSError("the card is ill")
        move(engine, job)

    monkeypatch.setattr(CpuEngine, "_move", fails)
    with closing(Simulation(replace(shape, num_blocks=num_blocks), llama, 1)) as sim:
        for _ in range(20):
            for _ in range(3):
                sim.turn(sim.come())
            sim.run(most=1000)
            sim.rest()
            assert sim.scheduler.reset_prefix_cache()
        moved = sim.serving.scheduler.stats()
        assert moved.failed > 3
        assert moved.hit_tokens > 500


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_vllms_own_specs_get_the_answers_in_the_documentation(family: Family) -> None:
    from vllm.v1 import kv_cache_interface

    def make(kind: str, given: dict[str, Any]) -> Any:
        common: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        if kind == "MambaSpec":
            common = {"shapes": ((8, 128),), "dtypes": (torch.bfloat16,)}
        return getattr(kv_cache_interface, kind)(**common, **given)

    assert family.answer(make, True) == family.answer(stand_in(tells=True), True)
