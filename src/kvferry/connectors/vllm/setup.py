"""Translates vLLM's configuration to kvferry's groups, namespace and ranks. Pure functions."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import partial
from importlib import util
from typing import Any

from kvferry.cache import reach
from kvferry.cache.policies import policy_named
from kvferry.config import Config
from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.ranks import RankPlace
from kvferry.connectors.vllm.control import VllmTokens, find_waker
from kvferry.connectors.vllm.events import VllmEvents
from kvferry.connectors.vllm.kinds import Layers, layers_of, specs_of
from kvferry.connectors.vllm.versions import seeds_are_fixed
from kvferry.core.identity import Namespace
from kvferry.rank import Contents
from kvferry.types import Rank

_CONTEXT_SIZES = ("decode_context_parallel_size", "prefill_context_parallel_size")
"""Settings of how many ranks share a request's tokens; by the first, each has part of a block."""

_INTERLEAVED = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
"""Settings of how many consecutive tokens one of these ranks has."""


_VAIN_ROLES = {
    "kv_producer": "kv_producer, which never loads, and no other server can read host memory",
    "kv_consumer": "kv_consumer, which stores nothing, and there is no store to load from",
}
"""Roles that need a store shared with other servers, and why."""


def support_of(vllm_config: Any, kv_cache_config: Any, *, recomputes_requests: bool) -> Layers:
    """Return the model's groups, or a refusal: why kvferry does not serve this model.

    ``recomputes_requests`` says that this vLLM takes failed loads by request. Without it, vLLM
    takes them by block, and recovers only with one group of attention. Other models are refused,
    because a failed load would stop the engine.
    """
    num_groups = len(kv_cache_config.kv_cache_groups)
    if not vllm_config.cache_config.enable_prefix_caching:
        return Layers(refusal="prefix caching is off, and blocks have no names without it")
    if not num_groups:
        return Layers(refusal="the model keeps no KV cache")
    if num_groups > 1 and not recomputes_requests:
        return Layers(
            refusal=f"the model has {num_groups} groups of layers, and this vLLM cannot recover "
            "from a failed load with more than one"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for name in _CONTEXT_SIZES:
        is_told = all(hasattr(spec, "dcp_sharded") for spec in specs)
        if _size(vllm_config, name) > 1 and not is_told:
            return Layers(
                refusal=f"{name} is above 1, and this vLLM does not say which layers it divides"
            )
    layers = layers_of(kv_cache_config, _size(vllm_config, _CONTEXT_SIZES[0]))
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    for group in layers.groups:
        if isinstance(group, reach.RecurrentState) and group.block_tokens != hash_tokens:
            return Layers(
                refusal=f"recurrent states are kept every {group.block_tokens} tokens, but vLLM "
                f"names blocks of {hash_tokens}: a state may be written over after it was named"
            )
    if layers.groups and not layers.fails_by_block and not recomputes_requests:
        return Layers(refusal="this vLLM cannot recover from a failed load of a recurrent state")
    return layers


def vain_settings(vllm_config: Any, config: Config, layers: Layers, version: str) -> list[str]:
    """Return warnings of settings with which a tier can never give a hit, and what to change."""
    if layers.refusal:
        return []
    found = []
    lasting = [str(spec.name) for spec in config.all_tiers if spec.persists]
    algorithm = _hash_algorithm(vllm_config)
    is_random = not seeds_are_fixed(version) or algorithm.startswith("xxhash")
    if lasting and is_random and "PYTHONHASHSEED" not in os.environ:
        other = "" if seeds_are_fixed(version) else ", or install vLLM 0.29 or later"
        if algorithm.startswith("xxhash"):
            other = ", or use --prefix-caching-hash-algo sha256" if not other else ""
        found.append(
            f"this vLLM names blocks at random in every process: the next one finds nothing that "
            f"is on {' or '.join(lasting)}. Set PYTHONHASHSEED=0 on every server{other}"
        )
    longest = int(getattr(vllm_config.model_config, "max_model_len", 0) or 0)
    step = math.lcm(
        *(s for group in layers.groups for s in (group.block_tokens, group.stop_tokens))
    )
    shortest = step * (layers.replayed_tokens // step + 1 + _uses_drafts(vllm_config))
    if 0 < longest <= shortest:
        found.append(
            f"no request can be long enough for a hit: hits end every {shortest} tokens, and "
            f"max_model_len is {longest}. Raise --max-model-len, or lower --block-size"
        )
    vain = _VAIN_ROLES.get(vllm_config.kv_transfer_config.kv_role)
    if vain is not None and not lasting:
        words = "Set kv_role to kv_both, or give a store that servers share (remote)"
        found.append(f"kv_role is {vain}. {words}")
    return found


def _hash_algorithm(vllm_config: Any) -> str:
    return str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))


def _uses_drafts(vllm_config: Any) -> bool:
    """Whether a draft model's layers run after the model's own, and keep KV as well."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def _size(vllm_config: Any, name: str) -> int:
    """Return a number of ranks from the parallel configuration; 1 if this vLLM lacks it."""
    return int(getattr(vllm_config.parallel_config, name, None) or 1)


def preferred_layout() -> str | None:
    """Return the layout that makes a block one run of bytes; None if this vLLM has no such layout.

    vLLM need not use it. Only for CUDA GPUs: attention on a CPU reads no layout but its own.
    """
    from vllm.platforms import current_platform

    if util.find_spec("vllm.v1.kv_cache_layout") is None or not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    # Blackwell's attention kernels want the heads outside the tokens of a block.
    return "BLHNC" if capability is not None and capability.major == 10 else "BLNHC"


def namespace_of(vllm_config: Any, kv_cache_config: Any) -> Namespace:
    """Return all that decides a block's bytes besides its tokens, for hash blocks of one token.

    vLLM's block hashes cover what belongs to one request: its salt, its adapter, its images.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    text = model.hf_text_config
    overrides = {
        "hf_overrides": model.hf_overrides if not callable(model.hf_overrides) else "callable",
        "quantization": model.quantization,
        "rope": {
            name: getattr(text, name, None)
            for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        },
        "lora": vllm_config.lora_config is not None,
    }
    # Which rank has which tokens of a block; left out if each has all of them.
    context = {name: _size(vllm_config, name) for name in _CONTEXT_SIZES + _INTERLEAVED}
    divides = any(context[name] > 1 for name in _CONTEXT_SIZES)
    geometry = {
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        **(context if divides else {}),
        "groups": [
            {"layers": list(group.layer_names), "kind": repr(group.kv_cache_spec)}
            for group in kv_cache_config.kv_cache_groups
        ],
    }
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        dtype=f"{model.dtype}/{cache.cache_dtype}",
        layout=str(getattr(kv_cache_config, "kv_cache_layout", None) or "vllm"),
        geometry=json.dumps(geometry, sort_keys=True, default=str),
        overrides=json.dumps(overrides, sort_keys=True, default=str),
        block_tokens=1,
    )


def contents_of(vllm_config: Any, kv_cache_config: Any) -> Contents:
    """Return the identity of a worker's blocks; the worker adds digests of its weights."""
    parallel = vllm_config.parallel_config
    engine = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    return Contents(
        namespace_of(vllm_config, kv_cache_config),
        engine=engine,
        first_engine=engine - int(getattr(parallel, "data_parallel_rank_local", 0) or 0),
        engines_here=int(getattr(parallel, "data_parallel_size_local", 1) or 1),
    )


def place_of(vllm_config: Any, kv_cache_config: Any) -> RankPlace:
    """Return this worker's rank and the number of ranks, and whether all hold the same KV."""
    parallel = vllm_config.parallel_config
    num_ranks = int(parallel.world_size)
    # A vLLM that does not say how many ranks are on this host: count all of them.
    here = int(getattr(parallel, "local_world_size", None) or num_ranks)
    replicates = num_ranks > 1 and here == num_ranks == _num_replicas(vllm_config, kv_cache_config)
    return RankPlace(Rank(int(parallel.rank)), num_ranks, here, replicates)


def _num_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many tensor-parallel ranks hold the same KV in every layer."""
    told = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    specs = [each for g in kv_cache_config.kv_cache_groups for each in specs_of(g.kv_cache_spec)]
    size = int(vllm_config.parallel_config.tensor_parallel_size)
    return size if {type(each).__name__ for each in specs} == {"MLAAttentionSpec"} else 1


def setup_of(
    vllm_config: Any, kv_cache_config: Any, config: Config, layers: Layers
) -> SessionSetup:
    """Return the scheduler side's setup of one server; ConfigError for an unknown policy."""
    for policy in (config.policy, config.tier_policy):
        policy_named(policy)  # refuse it now, like any other setting, not when ranks report
    parallel = vllm_config.parallel_config
    events = getattr(vllm_config, "kv_events_config", None)
    has_listeners = events is not None and bool(events.enable_kv_cache_events)
    namespace = namespace_of(vllm_config, kv_cache_config)
    algorithm, role = _hash_algorithm(vllm_config), vllm_config.kv_transfer_config.kv_role
    setup = SessionSetup(
        config=config,
        groups=layers.groups,
        num_ranks=int(parallel.world_size),
        refusal=layers.refusal,
        fails_by_block=layers.fails_by_block,
        loads=role != "kv_producer",
        stores=role != "kv_consumer",
        verifies_drafts=vllm_config.speculative_config is not None,
        lookahead_tokens=_lookahead(vllm_config),
        replayed_tokens=layers.replayed_tokens,
        goes_alone=layers.goes_alone,
        engine_here=int(parallel.data_parallel_rank_local or 0),
        make_events=(
            partial(VllmEvents, layers.groups, layers.group_ids) if has_listeners else None
        ),
        keys_of_tokens=lambda hash_tokens: VllmTokens(
            replace(namespace, block_tokens=hash_tokens), algorithm
        ),
        find_waker=find_waker,
        log_name="vllm.kvferry",
    )
    return replace(setup, overlap_refusal=_overlap_refusal(setup, parallel))


def _lookahead(vllm_config: Any) -> int:
    """Return how many tokens after a block its draft layers' KV depends on; 0 without drafts."""
    if not _uses_drafts(vllm_config):
        return 0
    told = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if told is None:  # an older vLLM: no draft module looks further ahead than their number
        told = vllm_config.speculative_config.num_speculative_tokens
    return max(1, int(told or 1))


def _overlap_refusal(setup: SessionSetup, parallel: Any) -> str:
    """Return why no request may run before its load has landed; empty if requests may."""
    if len(setup.groups) != 1 or not setup.is_full or not setup.goes_alone:
        return "only one group of full attention can be waited for layer by layer"
    if setup.lookahead_tokens:
        return "the layers of a draft model run after the model's own"
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0):
        return "vLLM runs two halves of a batch side by side"
    return ""
