"""The parts of the connector that need no vLLM: stand-ins have the few attributes that are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.cache import reach
from kvferry.config import Config
from kvferry.connectors.vllm.engine import RequestKeys, VllmEngine
from kvferry.connectors.vllm.kinds import Layers
from kvferry.connectors.vllm.setup import namespace_of, place_of, support_of, vain_settings
from kvferry.core.identity import Namespace, adopt

NAMESPACE = Namespace(model="m", dtype="d", layout="l", geometry="g", block_tokens=16)


def spec(kind, **fields):
    return type(kind, (SimpleNamespace,), {})(block_size=16, **fields)


def configs(*specs, prefix_caching=True, hash_tokens=16, **parallel):
    return (
        SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        ),
        SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs],
            hash_block_size=hash_tokens,
        ),
    )


FULL = spec("FullAttentionSpec", sliding_window=None)
WINDOW = spec("SlidingWindowSpec", sliding_window=64)
STATE = spec("MambaSpec", mamba_cache_mode="align", num_speculative_blocks=0)


def test_kinds_of_groups():
    several = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": FULL})
    chunked = spec("ChunkedLocalAttentionSpec", attention_chunk_size=128)
    mla = spec("MLAAttentionSpec")
    given = configs(FULL, WINDOW, chunked, mla, several, STATE)
    support = support_of(*given, recomputes_requests=True)
    assert support.refusal == ""
    assert support.groups == (
        reach.FullAttention(16),
        reach.SlidingWindow(16, window=64),
        reach.ChunkedLocal(16, chunk=128),
        reach.FullAttention(16),
        reach.FullAttention(16),
        reach.RecurrentState(16),
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (configs(spec("MambaSpec", mamba_cache_mode="none")), "group 0 (MambaSpec) keeps no state"),
        (configs(spec("MambaSpec", mamba_cache_mode="all")), "keeps no state"),
        (
            configs(spec("MambaSpec", mamba_cache_mode="align", num_speculative_blocks=2)),
            "states of drafts",
        ),
        (configs(STATE, hash_tokens=8), "names blocks of 8"),
        (configs(spec("SinkFullAttentionSpec")), "(SinkFullAttentionSpec) is of a kind"),
        (
            configs(FULL, spec("SlidingWindowSpec", sliding_window=64, extra_retained_tokens=8)),
            "group 1 (SlidingWindowSpec) keeps more than its window",
        ),
        (configs(FULL, prefix_caching=False), "prefix caching is off"),
        (configs(FULL, decode_context_parallel_size=2), "decode_context_parallel_size"),
        (configs(), "no KV cache"),
    ],
)
def test_in_a_vllm_that_says_little_only_known_kinds_are_served(given, words):
    assert words in support_of(*given, recomputes_requests=True).refusal


def telling(kind, *bases, **given):
    """A spec of a vLLM that says by properties what its layers keep."""
    bases = tuple(type(base, (SimpleNamespace,), {}) for base in bases) or (SimpleNamespace,)
    told = {"block_size": 16, "prefix_cacheable": True, "dcp_sharded": True, **given}
    cacheable, replays = told.pop("prefix_cacheable"), told.pop("prefix_replay_tokens", 0)
    known = {"prefix_cacheable": cacheable, "prefix_replay_tokens": replays}
    return type(kind, bases, known)(**told)


WHOLE = telling("NewSpec", "FullAttentionSpec", tokens_per_state=1)
RING = telling("RingSpec", block_size=8, prefix_cacheable=False)


@pytest.mark.parametrize(
    ("one", "group"),
    [
        (WHOLE, reach.FullAttention(16)),
        (telling("NewSpec", "FullAttentionSpec", sink_len=32), reach.FullAttention(16)),
        (telling("NewSpec", "FullAttentionSpec", rswa_window=32), reach.FullAttention(16)),
        (telling("NewSpec", sliding_window=64), reach.SlidingWindow(16, window=64)),
        (
            telling("NewSpec", sliding_window=64, extra_retained_tokens=8),
            reach.SlidingWindow(16, window=72),
        ),
        (telling("NewSpec", attention_chunk_size=64), reach.ChunkedLocal(16, chunk=64)),
        (
            telling("NewSpec", mamba_cache_mode="align", num_speculative_blocks=2),
            reach.RecurrentState(16),
        ),
        (
            telling("NewSpec", "FullAttentionSpec", tokens_per_state=4),
            reach.FullAttention(16, stops=16),
        ),
    ],
)
def test_an_unknown_kind_with_understood_properties_is_served(one, group):
    support = support_of(*configs(one), recomputes_requests=True)
    assert (support.refusal, support.groups) == ("", (group,))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (telling("NewSpec"), "does not say which tokens its layers read"),
        (telling("NewSpec", sliding_window=64, shift=3), "has shift, which kvferry does not know"),
        (telling("NewSpec", "FullAttentionSpec", non_causal=True), "tokens that come later"),
        (telling("NewSpec", mamba_cache_mode="all"), "keeps no state per block"),
    ],
)
def test_what_is_not_understood_is_named_and_left_alone(one, words):
    given = configs(WHOLE, one)
    given[1].kv_cache_groups[1].layer_names = ["layer.3", "layer.5"]
    refusal = support_of(*given, recomputes_requests=True).refusal
    assert refusal.startswith("group 1 (NewSpec, layer.3 and 1 more) ")
    assert words in refusal


def test_scratch_is_left_out_and_says_where_a_hit_may_end():
    given = configs(RING, telling("MainSpec", "FullAttentionSpec", tokens_per_state=4), RING)
    layers = support_of(*given, recomputes_requests=True)
    assert layers.group_ids == (1,)
    assert layers.groups == (reach.FullAttention(16, stops=16),)
    assert not layers.goes_alone
    given[1].cache_hit_alignment_tokens = 64
    assert support_of(*given, recomputes_requests=True).groups[0].stops == 64
    replayed = telling("W", sliding_window=40, prefix_cacheable=False, prefix_replay_tokens=40)
    layers = support_of(*configs(WHOLE, replayed), recomputes_requests=True)
    assert (layers.group_ids, layers.replayed_tokens) == ((0,), 40)


def test_blocks_of_context_parallel_ranks_have_the_tokens_of_all_of_them():
    given = configs(
        WHOLE,
        telling("DraftSpec", "FullAttentionSpec", dcp_sharded=False),
        decode_context_parallel_size=4,
    )
    support = support_of(*given, recomputes_requests=True)
    assert support.groups == (reach.FullAttention(64), reach.FullAttention(16))


def test_a_vllm_that_cannot_recover_gets_one_group_only():
    assert support_of(*configs(FULL), recomputes_requests=False).refusal == ""
    assert "2 groups" in support_of(*configs(FULL, WINDOW), recomputes_requests=False).refusal
    assert "recurrent" in support_of(*configs(STATE), recomputes_requests=False).refusal


def test_keys_grow_with_the_request_and_start_over_when_it_changes():
    request = SimpleNamespace(block_hashes=[b"a", b"b"])
    chain = RequestKeys(request, NAMESPACE)
    assert chain.keys() == adopt(NAMESPACE, [b"a", b"b"])
    request.block_hashes.append(b"c")
    assert chain.keys() == adopt(NAMESPACE, [b"a", b"b", b"c"])
    del request.block_hashes[1:]
    assert chain.keys() == adopt(NAMESPACE, [b"a"])
    request.block_hashes[:] = [b"x", b"y", b"z"]
    assert chain.keys() == adopt(NAMESPACE, [b"x", b"y", b"z"])
    assert [chain[at] for at in range(len(chain))] == list(chain.keys())


class FakePool:
    """vLLM's block pool as far as we touch it."""

    def __init__(self, num_blocks=8):
        self.blocks = [
            SimpleNamespace(block_id=n, ref_cnt=0, block_hash=None, is_null=n == 0)
            for n in range(num_blocks)
        ]
        self.num_gpu_blocks = num_blocks
        self.hash_block_size = 16
        end = SimpleNamespace(next_free_block=None, block_hash=None, is_null=False)
        following = end
        for block in reversed(self.blocks[1:]):
            block.next_free_block = following
            following = block
        self.free_block_queue = SimpleNamespace(
            fake_free_list_head=SimpleNamespace(next_free_block=following)
        )


def test_evictions_are_seen_before_they_come():
    """Seen red with a look at the queue's head alone, and with its end mark taken for a block."""
    pool = FakePool(num_blocks=41)  # an eighth: five
    holds = VllmEngine((), NAMESPACE, pool)
    assert not holds.evicts
    pool.blocks[6].block_hash = b"far"
    assert not holds.evicts
    pool.blocks[5].block_hash = b"named"
    assert holds.evicts
    empty = pool.blocks[40].next_free_block
    pool.free_block_queue.fake_free_list_head.next_free_block = empty
    pool.blocks[5].block_hash = None
    assert holds.evicts, "none is left: the next comes from a request that ends"


def server(role="kv_both", length=4096, algorithm="sha256", speculative=None):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        model_config=SimpleNamespace(max_model_len=length),
        speculative_config=speculative,
    )


SERVED = Layers((reach.FullAttention(16),), (0,))
FEW_STATES = Layers((reach.FullAttention(16), reach.RecurrentState(1056)), (0, 1))
DRAFTS = SimpleNamespace(use_eagle=lambda: True)
STORE = {"remote": "mooncake://127.0.0.1:50051"}


@pytest.mark.parametrize(
    ("given", "settings", "support", "version", "words"),
    [
        (server(), {}, SERVED, "0.26.0", None),  # nothing outlives the process
        (server(), {"disk": "/d"}, SERVED, "0.26.0", "PYTHONHASHSEED=0 on every server, or inst"),
        (server(), {"disk": "/d"}, SERVED, "0.32.0", None),
        (server(algorithm="xxhash"), {"disk": "/d"}, SERVED, "0.32.0", "algo sha256"),
        (server(algorithm="xxhash_cbor"), STORE, SERVED, "0.32.0", "is on remote"),
        (server(length=1056), {}, FEW_STATES, "0.32.0", "hits end every 1056 tokens"),
        (server(length=1057), {}, FEW_STATES, "0.32.0", None),
        (server(length=2112, speculative=DRAFTS), {}, FEW_STATES, "0.32.0", "every 2112 tokens"),
        (server("kv_producer"), {}, SERVED, "0.32.0", "never loads, and no other server"),
        (server("kv_consumer"), {}, SERVED, "0.32.0", "no store to load from"),
        (server("kv_producer"), STORE, SERVED, "0.32.0", None),
        (server(length=8), {}, Layers(refusal="idle anyway"), "0.32.0", None),
    ],
)
def test_a_tier_that_can_never_bring_a_hit_is_told_of(
    monkeypatch, given, settings, support, version, words
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = vain_settings(given, Config.from_dict(settings), support, version)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    found = vain_settings(given, Config.from_dict(settings), support, version)
    assert not any("PYTHONHASHSEED" in each for each in found)


def parallel_config(tensor=1, pipeline=1, rank=0, **more):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, world_size=tensor * pipeline, rank=rank, **more
        )
    )


@pytest.mark.parametrize(
    ("vllm_config", "kind", "told", "replicates"),
    [
        (parallel_config(4, rank=2), "MLAAttentionSpec", 4, True),
        (parallel_config(4, rank=2), "MLAAttentionSpec", None, True),
        (parallel_config(4), "FullAttentionSpec", None, False),
        (parallel_config(4), "FullAttentionSpec", 2, False),
        (parallel_config(4, 2), "MLAAttentionSpec", 4, False),  # stages hold different layers
        (parallel_config(4, local_world_size=2), "MLAAttentionSpec", 4, False),  # two hosts
        (parallel_config(), "MLAAttentionSpec", 1, False),
    ],
)
def test_ranks_share_their_memory_only_if_all_hold_the_same(vllm_config, kind, told, replicates):
    caches = configs(spec(kind))[1]
    if told is not None:
        caches.kv_tp_replicas = told
    place = place_of(vllm_config, caches)
    assert place.replicates is replicates
    assert place.rank == vllm_config.parallel_config.rank
    assert place.num_ranks == vllm_config.parallel_config.world_size


def test_blocks_of_other_ranks_have_other_names():
    """Seen red: a store written by two ranks was read by four."""
    names = set()
    for tensor, more in (
        (2, {}),
        (4, {}),
        (4, {"decode_context_parallel_size": 2}),
        (4, {"decode_context_parallel_size": 4}),
        (4, {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 16}),
        (4, {"prefill_context_parallel_size": 2}),
    ):
        given = parallel_config(tensor, pipeline_parallel_size=1, **more)
        given.model_config = SimpleNamespace(
            model="m", revision="", dtype="bf16", quantization=None, hf_overrides={}
        )
        given.model_config.hf_text_config = SimpleNamespace()
        given.cache_config = SimpleNamespace(cache_dtype="auto")
        given.lora_config = None
        caches = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec="spec", layer_names=["a"])]
        )
        names.add(adopt(namespace_of(given, caches), [b"a"])[0])
    assert len(names) == 6
