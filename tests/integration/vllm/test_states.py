"""Layers that keep a state instead of keys and values: it comes back where vLLM has kept one."""

from __future__ import annotations

from tests.integration.vllm.engine import BLOCK_TOKENS, FERRY, make_prompts, tampering

STATES_ALONE = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


def test_a_model_of_states_alone(start, expect, mamba_hits):
    prompts = make_prompts(101, 100, 200, 300, 33, 31)
    expected = expect(mamba_hits, prompts)
    engine = start(mamba_hits, ferry=FERRY, **STATES_ALONE)
    engine.check_round_trip(prompts, expected)
    assert engine.stats.hit_tokens == (3 + 6 + 9 + 1) * BLOCK_TOKENS
    assert engine.loaded_blocks == 4, "of each prompt, one state"
    engine.check_idle()


def test_a_wrong_state_changes_the_output(start, granite_hits, monkeypatch):
    """The control: keys and values are right, only the states are zeros."""
    prompts = make_prompts(103, 300, 200)
    with tampering(monkeypatch, zeroes=lambda transfer: transfer.group == 0) as _:
        engine = start(granite_hits, ferry=FERRY)
    assert type(engine.side.serving.scheduler.groups[0]).__name__ == "RecurrentState"
    expected = engine.generate(prompts)
    engine.forget_device()
    wrong = engine.generate(prompts)
    assert all(got != right for got, right in zip(wrong, expected, strict=True))


def test_states_of_generated_tokens_come_back(start, expect, granite_hits):
    (prompt,) = make_prompts(104, 50)
    (more,) = make_prompts(105, 40)
    (answer,) = expect(granite_hits, [prompt], 100)
    turn = [*prompt, *answer, *more]
    expected = expect(granite_hits, [turn])
    # vLLM keeps the state at a prompt's end alone unless it is told to keep more.
    engine = start(granite_hits, ferry=FERRY, prefix_cache_retention_interval=BLOCK_TOKENS)
    assert engine.generate([prompt], max_tokens=100) == [answer]
    engine.forget_device()
    assert engine.generate([turn]) == expected
    assert engine.stats.hit_tokens == (50 + 100 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.check_idle()
