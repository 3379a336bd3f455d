"""vLLM's configuration in our words: settings, groups, namespace. Pure functions, read once."""

from __future__ import annotations

import json
import logging
import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from importlib import util
from typing import Any

from kvferry.cache import reach
from kvferry.cache.policies.contract import policy_named
from kvferry.config import Config
from kvferry.connectors.vllm.logs import Seldom
from kvferry.connectors.vllm.ranks import Place
from kvferry.connectors.vllm.requests import Naming, RequestKeys
from kvferry.core.identity import Namespace
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.rank import Contents
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import Rank


@dataclass(frozen=True)
class Support:
    """Whether this model can be served, and what its groups are."""

    groups: tuple[reach.Group, ...] = ()
    refusal: str = ""

    @property
    def fails_by_block(self) -> bool:
        """Whether naming the blocks that were not loaded is enough for vLLM to compute them."""
        return len(self.groups) == 1 and not isinstance(self.groups[0], reach.RecurrentState)


def config_of(vllm_config: Any) -> Config:
    """Our settings: the connector's extra config, over the environment, over ``KVFERRY_CONFIG``."""
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    return Config.load(overrides=given, source="kv_connector_extra_config")


def support_of(vllm_config: Any, kv_cache_config: Any, *, recomputes_requests: bool) -> Support:
    """The model's groups as kinds of reach, or why we leave it alone.

    ``recomputes_requests`` says that this vLLM can be told of a failed load by request. Without it,
    it can only be told by block, and finds its way back from that with one group of attention: else
    a failed load would be the end of the engine, so no hit is ever claimed.
    """
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not cache.enable_prefix_caching:
        return Support(refusal="prefix caching is off, and blocks have no names without it")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return Support(refusal=f"{name} is above 1, which kvferry does not know")
    if not specs:
        return Support(refusal="the model keeps no KV cache")
    if len(specs) > 1 and not recomputes_requests:
        return Support(
            refusal=f"the model has {len(specs)} groups of layers, and this vLLM cannot recover "
            "from a failed load with more than one"
        )
    groups = []
    for number, spec in enumerate(specs):
        group = _group_of(spec)
        if group is None:
            return Support(
                refusal=f"group {number} has {type(_single(spec)).__name__}, "
                "which kvferry does not know"
            )
        groups.append(group)
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    for group in groups:
        if isinstance(group, reach.RecurrentState) and group.block_tokens != hash_tokens:
            return Support(
                refusal=f"recurrent states are kept every {group.block_tokens} tokens, but vLLM "
                f"names blocks of {hash_tokens}: a state may be written over after it was named"
            )
    support = Support(tuple(groups))
    if not support.fails_by_block and not recomputes_requests:
        return Support(refusal="this vLLM cannot recover from a failed load of a recurrent state")
    return support


def _group_of(spec: Any) -> reach.Group | None:
    """By exact kind: a kind derived from one we know may well keep other bytes."""
    one = _single(spec)
    kind, block_tokens = type(one).__name__, int(spec.block_size)
    if kind in ("FullAttentionSpec", "MLAAttentionSpec"):
        return reach.FullAttention(block_tokens)
    if kind == "SlidingWindowSpec" and not getattr(one, "extra_retained_tokens", 0):
        return reach.SlidingWindow(block_tokens, window=int(one.sliding_window))
    if kind == "ChunkedLocalAttentionSpec":
        return reach.ChunkedLocal(block_tokens, chunk=int(one.attention_chunk_size))
    # Only where vLLM keeps a state per block, by the block's hash, and writes it once.
    mode, num_drafts = (
        getattr(one, "mamba_cache_mode", ""),
        getattr(one, "num_speculative_blocks", 0),
    )
    if kind == "MambaSpec" and mode == "align" and not num_drafts:
        return reach.RecurrentState(block_tokens)
    return None


def _single(spec: Any) -> Any:
    """The one kind of a group whose layers differ only in size."""
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        specs = list(spec.kv_cache_specs.values())
        if len({type(s) for s in specs}) == 1:
            return specs[0]
    return spec


def preferred_layout() -> str | None:
    """The layout that makes a block one run of bytes, where vLLM has it; it takes it or leaves it.

    Asked on a GPU only: the CPU's attention reads no other layout than its own.
    """
    from vllm.platforms import current_platform

    if util.find_spec("vllm.v1.kv_cache_layout") is None or not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    # Blackwell's attention kernels want the heads outside the tokens of a block.
    return "BLHNC" if capability is not None and capability.major == 10 else "BLNHC"


def uses_draft_layers(vllm_config: Any) -> bool:
    """Whether layers of a draft model, which run behind the model's own, keep KV as well."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def splits_batches(vllm_config: Any) -> bool:
    """Whether vLLM runs parts of a batch side by side, on streams of their own."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0))


def wants_events(vllm_config: Any) -> bool:
    """Whether routers listen to which blocks are where."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def hash_algorithm(vllm_config: Any) -> str:
    """By what vLLM names blocks."""
    return str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))


def namespace_of(vllm_config: Any, kv_cache_config: Any, hash_tokens: int) -> Namespace:
    """Everything besides the tokens that decides a block's bytes.

    What belongs to one request (its salt, its adapter, its images) is part of vLLM's block hashes.
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
    geometry = {
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
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
        geometry=_text(geometry),
        overrides=_text(overrides),
        block_tokens=hash_tokens,
    )


def contents_of(vllm_config: Any, kv_cache_config: Any) -> Contents:
    """What a worker's blocks are; the weights are its own to look at."""
    parallel = vllm_config.parallel_config
    engine = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    return Contents(
        namespace_of(vllm_config, kv_cache_config, 1),
        engine=engine,
        first_engine=engine - int(getattr(parallel, "data_parallel_rank_local", 0) or 0),
        engines_here=int(getattr(parallel, "data_parallel_size_local", 1) or 1),
    )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def layer_names_of(kv_cache_config: Any) -> Sequence[Sequence[str]]:
    return [group.layer_names for group in kv_cache_config.kv_cache_groups]


def place_of(vllm_config: Any, kv_cache_config: Any) -> Place:
    """This worker among the others."""
    parallel = vllm_config.parallel_config
    num_ranks = int(parallel.world_size)
    # As far as vLLM says: all of them where it counts no hosts.
    here = int(getattr(parallel, "local_world_size", None) or num_ranks)
    replicates = num_ranks > 1 and here == num_ranks == _num_replicas(vllm_config, kv_cache_config)
    return Place(Rank(int(parallel.rank)), num_ranks, here, replicates)


def _num_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tensor-parallel ranks that hold the same KV, in every layer."""
    told = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    kinds = {type(_single(g.kv_cache_spec)).__name__ for g in kv_cache_config.kv_cache_groups}
    size = int(vllm_config.parallel_config.tensor_parallel_size)
    return size if kinds == {"MLAAttentionSpec"} else 1


# ------------------------------------------------------------------------------------------------
# What is known of a server before its ranks are heard. Read once, then frozen.


@dataclass(frozen=True)
class Setup:
    """One server's scheduler side in our words.

    ``namespace`` is for hash blocks of one token: how many vLLM's have its block pool says.
    ``told_tokens`` are those of a block of the first group, by which vLLM is told of failed loads.
    ``engine_here`` counts the engines of a data-parallel server on this host. vLLM names blocks by
    ``hash_algorithm``. Where it ``splits_batches``, two halves of one run at the same time.
    """

    config: Config
    support: Support
    num_ranks: int
    namespace: Namespace
    told_tokens: int
    uses_drafts: bool
    has_listeners: bool
    engine_here: int
    hash_algorithm: str = "sha256"
    splits_batches: bool = False

    @property
    def groups(self) -> tuple[reach.Group, ...]:
        return self.support.groups

    @property
    def is_full(self) -> bool:
        """Whether no block is given up while its request runs."""
        return all(isinstance(group, reach.FullAttention) for group in self.groups)

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, config: Config, support: Support) -> Setup:
        for policy in (config.policy, config.tier_policy):
            policy_named(policy)  # refused now, like any other setting, not once ranks are up
        parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
        return cls(
            config=config,
            support=support,
            num_ranks=int(parallel.world_size),
            namespace=namespace_of(vllm_config, kv_cache_config, 1),
            told_tokens=int(groups[0].kv_cache_spec.block_size) if groups else 1,
            uses_drafts=uses_draft_layers(vllm_config),
            has_listeners=wants_events(vllm_config),
            engine_here=int(parallel.data_parallel_rank_local or 0),
            hash_algorithm=hash_algorithm(vllm_config),
            splits_batches=splits_batches(vllm_config),
        )


# ------------------------------------------------------------------------------------------------
# What a client of vLLM said of a request, in our words: hints in ``kv_transfer_params``.

log = logging.getLogger("vllm.kvferry")

OURS = "kvferry"
"""The key of our hints in ``kv_transfer_params``; vLLM's own offloading reads two beside it."""

_VLLMS = {"max_offload_tokens": "max_store_tokens", "max_load_tokens": "max_load_tokens"}

_MOST_BYTES = 4096
_VERSION = 2
"""Of what ``marshal`` writes: the last without references, which would tell equal data apart."""

_complaint = Seldom(seconds=60.0)


def opened(scheduler: Scheduler, request: Any, naming: Naming) -> Request:
    """Open a request of vLLM's, as the parameters that came with it say."""
    chain = RequestKeys(request, naming)
    params = getattr(request, "kv_transfer_params", None)
    if params is None and not scheduler.has_tenants:
        return scheduler.open(request.request_id, chain)
    hints, words = hints_of(params if params is not None else {})
    salt = getattr(request, "cache_salt", None)
    if scheduler.has_tenants and salt and not hints.tenant:
        hints = replace(hints, tenant=tenant_of(salt))
    return scheduler.open(request.request_id, chain, hints, unheeded=words)


def tenant_of(salt: str) -> str:
    """Who sends this salt, by a name that does not give it away: a salt may be a secret."""
    return f"salt-{blake2b(salt.encode(errors='replace'), digest_size=4).hexdigest()}"


def hints_of(params: Any) -> tuple[Hints, str]:
    """The hints among a request's parameters, and why some were not understood.

    A request is served all the same: who sent it may be one of many, and the server is everybody's.
    Many requests say the same, and to read it takes longer than to look a request up.
    """
    try:
        written = marshal.dumps(params, _VERSION)
    except ValueError:  # not plain data, or nested too deep
        written = b""
    hints, words = _known(written) if 0 < len(written) <= _MOST_BYTES else _read(params)
    if words and _complaint.is_due():
        log.warning("kv_transfer_params: %s (said once a minute)", words)
    return hints, words


@lru_cache(maxsize=64)
def _known(written: bytes) -> tuple[Hints, str]:
    return _read(marshal.loads(written))


def _read(params: object) -> tuple[Hints, str]:
    try:
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params must be a mapping, got {type(params).__name__}")
        given = params.get(OURS, {})
        if not isinstance(given, Mapping):
            raise InputError(f"{OURS} must be a mapping of hints, got {type(given).__name__}")
        said = {ours: params[name] for name, ours in _VLLMS.items() if name in params}
        return Hints.read({**said, **given}), ""
    except Exception as error:  # a mistake of ours, too: it would take us out of service
        why = str(error) if isinstance(error, InputError) else type(error).__name__
        return Hints(), f"the hints of this request are not heeded: {why}"
