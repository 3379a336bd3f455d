"""Events for routers, several connectors at once, and models we leave alone."""

from __future__ import annotations

import pytest
from tests.integration.vllm.engine import BLOCK_TOKENS, FERRY, Engine, make_prompts
from tests.integration.vllm.reference import in_a_process


def test_routers_hear_of_blocks_below_host_memory(start, llama, monkeypatch, tmp_path):
    """On disk, in vLLM's own events, which its own encoder can send."""
    from vllm.distributed.kv_events import BlockStored, msgspec

    engine = start(
        llama,
        ferry={**FERRY, "host": "2MiB", "disk": str(tmp_path), "disk_size": "64MiB"}
        | {"disk_keep_free": 0, "tier_write": "through"},
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    believed: dict[str, set[object]] = {"CPU": set(), "STORAGE": set()}
    real = engine.connector.take_events

    def listen():
        events = list(real())
        for event in events:
            msgspec.msgpack.encode(event)
            there, names = believed[event.medium], set(event.block_hashes)
            assert names.isdisjoint(there) if isinstance(event, BlockStored) else names <= there
            there ^= names
        return events

    monkeypatch.setattr(engine.connector, "take_events", listen)
    for prompt in make_prompts(65, *[300] * 8):
        engine.generate([prompt])
        engine.settle()
    engine.generate(make_prompts(66, 20))  # a step more, to hear of the last copies
    engine.settle()
    assert len(believed["CPU"]) == engine.stats.pool.cached
    assert len(believed["STORAGE"]) == engine.stats.tiers["disk"].cached > len(believed["CPU"])
    engine.check_idle()


@pytest.fixture
def beside(monkeypatch):
    """Engines made from now on have several connectors, which ``among`` lists around ours."""
    from vllm import LLM

    real = LLM.__init__

    def begin(among):
        def init(self, *args, kv_transfer_config, **kwargs):
            several = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": among(kv_transfer_config)},
            }
            real(self, *args, kv_transfer_config=several, **kwargs)

        monkeypatch.setattr(LLM, "__init__", init)

    return begin


def test_one_of_several_connectors(start, expect, llama, beside):
    beside(lambda ours: [ours, ours])
    prompts = make_prompts(64, 300, 200)
    engine = start(llama, is_fresh=True, ferry=FERRY)
    expected = expect(llama, prompts)
    engine.check_round_trip(prompts, expected)
    first, second = [part._session for part in engine.connector._connectors]
    assert first.serving.scheduler.stats().hit_tokens == (9 + 6) * BLOCK_TOKENS
    assert second.serving.scheduler.stats().hit_tokens == 0
    engine.settle()
    for side in (first, second):
        assert side.guard.reason == ""
        assert side.serving.engine.num_held == 0
        assert side.serving.scheduler.pool.num_leases == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_beside_nixl(start, expect, llama, beside, is_first):
    """vLLM's ``MultiConnector`` hands on one connector's handshake, which NIXL cannot do without.

    Seen red with kvferry first: the server did not start.
    """
    pytest.importorskip("nixl", reason="pip install nixl")
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    beside(lambda ours: [ours, nixl] if is_first else [nixl, ours])
    prompts = make_prompts(64, 300, 200)
    engine = start(llama, is_fresh=True, ferry=FERRY)
    expected = expect(llama, prompts)
    engine.generate(make_prompts(63, 40))  # the ranks are heard with the first step
    engine.check_round_trip(prompts, expected)
    (session,) = [
        part._session for part in engine.connector._connectors if hasattr(part, "_session")
    ]
    assert session.serving.scheduler.stats().hit_tokens == (9 + 6) * BLOCK_TOKENS
    assert session.guard.reason == ""


def test_without_prefix_caching_kvferry_is_idle(start, expect, llama):
    prompts = make_prompts(66, 200)
    engine = start(llama, ferry=FERRY, enable_prefix_caching=False)
    assert engine.generate(prompts) == expect(llama, prompts)
    assert "prefix caching is off" in engine.side.banner()
    assert engine.worker._memory is None, "an idle kvferry takes no memory"


def test_speculative_tokens_are_never_stored(expect, llama):
    """Drafts that were refused leave wrong KV behind; the tokens that replaced them do not."""
    base = make_prompts(67, 20)[0]
    prompts = [base * 8, base * 5 + [7] * 40]
    answers = expect(llama, prompts, 60)
    turns = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    try:
        first, second, loaded_blocks = in_a_process(speculate, llama, prompts, turns)
    except AssertionError as error:
        if "Cannot inspect kernel parameters" in str(error):
            pytest.skip("this vLLM needs Triton to refuse drafts, which a CPU has not")
        raise
    assert first == answers
    assert second == expect(llama, turns)
    assert loaded_blocks > 0


def speculate(model, prompts, turns):
    """In a process of its own: after this vLLM cannot start another engine in the same one."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = Engine(model, ferry=FERRY, speculative_config=drafts)
    first = engine.generate(prompts, max_tokens=60)
    engine.forget_device()
    second = engine.generate(turns)
    engine.check_idle()
    return first, second, engine.loaded_blocks
