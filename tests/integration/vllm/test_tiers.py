"""Tiers below host memory under a real vLLM: more conversations than the host has room for."""

from __future__ import annotations

import pytest
from tests.integration.vllm.engine import make_prompts

FERRY = {
    "max_storing_blocks": 1000,
    "load_policy": "always",
    "load_deadline": "5min",
    "store_deadline": "5min",
    "promote_deadline": "5min",
    "lookup_deadline": "5min",
}


@pytest.mark.parametrize("tiers", ["memory:64MiB", "memory-by-key:64MiB"])
def test_conversations_come_back_through_a_host_that_is_too_small(start, expect, llama, tiers):
    prompts = make_prompts(21, *[200] * 10)
    expected = expect(llama, prompts)
    # 24 blocks of host memory for 10 conversations of 6.
    ferry = {**FERRY, "host": f"{24 * 64}KiB", "tiers": tiers}
    engine = start(llama, ferry=ferry, num_gpu_blocks_override=24)
    assert [engine.generate([prompt])[0] for prompt in prompts] == expected
    engine.forget_device()
    assert [engine.generate([prompt])[0] for prompt in prompts] == expected
    stats = engine.stats
    name = tiers.partition(":")[0]
    assert stats.bytes_moved[name, "host"] > 0
    assert stats.promoted_tokens > 0
    assert stats.hit_tokens > 30 * 32  # more than the host alone could have had
    engine.forget_device()
    assert engine.generate(prompts) == expected  # all at once, too
    engine.check_idle()
