"""What the model says must not depend on whether its KV was computed or came through kvferry."""

from __future__ import annotations

import itertools

import pytest
from tests.integration.vllm.engine import BLOCK_TOKENS, FERRY, make_prompts, tampering

MODELS = ["llama", "gemma_hits", "granite_hits"]


@pytest.fixture(params=MODELS)
def model(request):
    return request.getfixturevalue(request.param)


def blocks_for(model):
    """Six groups take six times the blocks."""
    return 256 if model.name == "gemma" else 64


def test_a_prompt_comes_back_after_a_reset(start, expect, model):
    prompts = make_prompts(1, 100, 200, 300, 33, 31)
    options = {"num_gpu_blocks_override": blocks_for(model)}
    expected = expect(model, prompts)
    engine = start(model, ferry=FERRY, **options)
    assert engine.generate(prompts) == expected
    assert engine.loaded_blocks == 0
    engine.forget_device()
    assert engine.generate(prompts) == expected
    assert engine.stats.hit_tokens == (3 + 6 + 9 + 1) * BLOCK_TOKENS
    assert engine.loaded_blocks > 0
    engine.check_idle()


def test_a_prompt_of_whole_blocks_comes_back_whole(start, expect, model):
    """Its last token is computed again; a window may not reach back to it, so there a block is."""
    (prompt,) = make_prompts(14, 8 * BLOCK_TOKENS)
    expected = expect(model, [prompt])
    engine = start(model, ferry=FERRY, num_gpu_blocks_override=blocks_for(model))
    assert engine.generate([prompt]) == expected
    engine.forget_device()
    assert engine.generate([prompt]) == expected
    whole = 8 * BLOCK_TOKENS
    assert engine.stats.hit_tokens == (whole if model.name == "llama" else whole - BLOCK_TOKENS)
    loaded = engine.loaded_blocks
    assert engine.generate([prompt]) == expected  # on the device: no load for one block of it
    assert engine.loaded_blocks == loaded
    engine.check_idle()


def test_a_prompt_comes_back_after_others_pushed_it_out(start, expect, model):
    first, *others = make_prompts(4, *[300] * 8)
    options = {"num_gpu_blocks_override": 112 if model.name == "gemma" else 24}
    expected = expect(model, [first, *others])
    engine = start(model, ferry=FERRY, **options)
    assert engine.generate([first]) + [engine.generate([p])[0] for p in others] == expected
    loaded = engine.loaded_blocks
    assert engine.generate([first]) == expected[:1]
    assert engine.loaded_blocks > loaded
    assert engine.stats.hit_tokens >= 9 * BLOCK_TOKENS
    engine.check_idle()


@pytest.mark.parametrize("every", [1, 3])
def test_a_failed_load_is_computed_again(start, expect, model, monkeypatch, every):
    prompts = make_prompts(11, 300, 200, 300, 100)
    options = {"num_gpu_blocks_override": blocks_for(model)}
    expected = expect(model, prompts)
    count = itertools.count(1)
    fails = lambda transfer: transfer.dst == "device" and next(count) % every == 0  # noqa: E731
    with tampering(monkeypatch, fails=fails) as tampers:
        engine = start(model, ferry=FERRY, **options)
    assert engine.generate(prompts) == expected
    for _ in range(3):
        engine.forget_device()
        assert engine.generate(prompts) == expected
    assert tampers[0].num_failed > 0
    assert engine.stats.failed == tampers[0].num_failed
    engine.check_idle()


def test_chunks_are_stored_after_the_forward_that_writes_them(start, expect, model, monkeypatch):
    """Copies that read at once what is there: a store that came early would keep older bytes."""
    prompts = make_prompts(16, 300, 200)
    options = {"num_gpu_blocks_override": blocks_for(model), "max_num_batched_tokens": 64}
    expected = expect(model, prompts)
    with tampering(monkeypatch, copies_at_once=True):
        engine = start(model, ferry=FERRY, **options)
    engine.check_round_trip(prompts, expected)
    assert engine.stats.hit_tokens == (9 + 6) * BLOCK_TOKENS
    engine.check_idle()


def test_loads_of_zeros_change_the_output(start, model, monkeypatch):
    """The control: if this passed with the right output, the tests above would prove nothing."""
    prompts = make_prompts(13, 300, 200)
    options = {"num_gpu_blocks_override": blocks_for(model)}
    with tampering(monkeypatch, zeroes=lambda transfer: True):
        engine = start(model, ferry=FERRY, **options)
    expected = engine.generate(prompts)
    engine.forget_device()
    wrong = engine.generate(prompts)
    assert engine.loaded_blocks > 0
    assert all(got != right for got, right in zip(wrong, expected, strict=True))
