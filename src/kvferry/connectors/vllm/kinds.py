"""Translates vLLM's KV cache specs into groups of :mod:`~kvferry.cache.reach`, or says why not.

A newer vLLM's specs say all that matters by properties. There, a new kind of layer is served if
each of its properties is known, or off (has its default). An older vLLM's specs say less. There,
only kinds known by name are served, because a kind derived from a known one may keep other bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

from kvferry.cache import reach

_FORMAT = """
    alignment block_size block_stride_alignment blocks_per_request bounded_replay cache_dtype_str
    cache_role dcp_sharded dtype dtypes head_size head_size_v is_draft is_index_group_leader
    kv_quant_mode mamba_type max_tp_shards model_version non_causal_multi_token_decode
    num_head_slots num_heads num_kv_heads page_size page_size_padded prefill_checkpoint_alignment
    num_prefill_checkpoint_blocks num_speculative_blocks shapes state_content_bytes
    topk_buffer_width tp_replicated
"""
"""Fields that decide only a block's bytes, which are opaque, not which blocks a request reads."""

_REACH = """
    attention_chunk_size extra_retained_tokens mamba_cache_mode non_causal rswa_window sink_len
    sliding_window tokens_per_state
"""
"""Fields that decide which blocks a request reads. This module reads all of them."""

_UNDERSTOOD = frozenset((_FORMAT + _REACH).split())

_TELLING = ("prefix_cacheable", "prefix_replay_tokens", "dcp_sharded")
"""Properties that a spec must have (vLLM 0.31 and later), or only its kind's name counts."""

_KNOWN_BEFORE = {
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
}


class _NotServedError(Exception):
    """Raised for a group of layers that is not understood; its text follows the group's name."""


@dataclass(frozen=True)
class Layers:
    """A model's groups of layers that are stored and loaded, and limits that other groups put.

    ``group_ids`` are vLLM's numbers of ``groups``. A hit of up to ``replayed_tokens`` is useless,
    because vLLM computes these again. ``goes_alone`` says that the last token of a hit can be
    computed again by itself. ``refusal`` names the group that is not understood, and why.
    """

    groups: tuple[reach.Group, ...] = ()
    group_ids: tuple[int, ...] = ()
    replayed_tokens: int = 0
    goes_alone: bool = True
    refusal: str = ""

    @property
    def fails_by_block(self) -> bool:
        """Whether vLLM can compute blocks that were not loaded if it gets only their numbers."""
        is_one = len(self.groups) == 1 and self.goes_alone
        return is_one and not isinstance(self.groups[0], reach.RecurrentState)


def layers_of(kv_cache_config: Any, dcp_size: int = 1) -> Layers:
    """Return the groups of ``kv_cache_config``, with KV sharded over ``dcp_size`` ranks."""
    groups: list[reach.Group] = []
    ids: list[int] = []
    specs: list[Any] = []
    step = 1
    replayed, has_scratch = 0, False
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        try:
            kinds = [_kind_of(each, dcp_size) for each in specs_of(spec)]
            _require(len(set(kinds)) == 1, "has layers that keep different tokens")
            if getattr(group, "host_resident", False):
                raise _NotServedError("keeps its KV in host memory that vLLM manages itself")
        except _NotServedError as error:
            return Layers(refusal=f"{_name(number, group)} {error}")
        step = math.lcm(step, _block_tokens(spec, dcp_size))
        kind = kinds[0]
        if kind is None or not getattr(group, "enable_kv_transfer", True):
            has_scratch = True
            replayed = max(replayed, int(getattr(spec, "prefix_replay_tokens", 0)))
            continue
        groups.append(kind)
        ids.append(number)
        specs += specs_of(spec)
    if not groups:
        return Layers(refusal="the model keeps no KV cache that outlives its request")
    per_state = {int(getattr(spec, "tokens_per_state", 1)) for spec in specs}
    compressed = {count for count in per_state if count > 1}
    if has_scratch or compressed:
        step = int(getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or step)
        # Partial state at the end of a hit is not stored: so hits end where there is none.
        groups[0] = replace(groups[0], stops=math.lcm(step, *compressed))
    return Layers(
        tuple(groups),
        tuple(ids),
        replayed_tokens=replayed,
        goes_alone=not (has_scratch or compressed),
    )


def _name(number: int, group: Any) -> str:
    """Return a group's number, kind and first layer, for the log."""
    kind = type(specs_of(group.kv_cache_spec)[0]).__name__
    names = list(getattr(group, "layer_names", ()))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"group {number} ({kind}{f', {names[0]}{more}' if names else ''})"


def specs_of(spec: Any) -> Sequence[Any]:
    """Return the specs of a group's layers, which may differ in size."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _block_tokens(spec: Any, dcp_size: int) -> int:
    return int(spec.block_size) * (dcp_size if getattr(spec, "dcp_sharded", False) else 1)


def _kind_of(spec: Any, dcp_size: int) -> reach.Group | None:
    """Return which tokens one layer reads; None if its blocks cannot serve another request."""
    kind = type(spec).__name__
    if not all(hasattr(spec, name) for name in _TELLING):
        _require(kind in _KNOWN_BEFORE, "is of a kind that kvferry does not know in this vLLM")
        _require(not getattr(spec, "extra_retained_tokens", 0), "keeps more than its window")
        _require(
            not getattr(spec, "num_speculative_blocks", 0),
            "keeps states of drafts that this vLLM may refuse later",
        )
    elif unknown := [field for field in _fields_in_use(spec) if field not in _UNDERSTOOD]:
        raise _NotServedError(f"has {', '.join(unknown)}, which kvferry does not know")
    elif not spec.prefix_cacheable:
        return None
    return _reach_of(spec, _block_tokens(spec, dcp_size))


def _reach_of(spec: Any, block_tokens: int) -> reach.Group:
    _require(not getattr(spec, "non_causal", False), "attends to tokens that come later")
    mode = getattr(spec, "mamba_cache_mode", None)
    if mode is not None:
        # Only in this mode vLLM keeps a state per block, by the block's hash, and writes it once.
        _require(mode == "align", f"keeps no state per block (mamba_cache_mode is {mode})")
        return reach.RecurrentState(block_tokens)
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    names = {kind.__name__ for kind in type(spec).__mro__}
    # vLLM keeps every block of these kinds, also blocks that a layer does not read.
    if names & {"FullAttentionSpec", "MLAAttentionSpec"}:
        return reach.FullAttention(block_tokens)
    if window is not None:
        # The extra tokens are read again when several draft layers look ahead.
        retained = int(getattr(spec, "extra_retained_tokens", 0))
        return reach.SlidingWindow(block_tokens, window=int(window) + retained)
    if chunk is not None:
        return reach.ChunkedLocal(block_tokens, chunk=int(chunk))
    raise _NotServedError("does not say which tokens its layers read")


def _fields_in_use(spec: Any) -> list[str]:
    """Return the names of the fields whose value differs from their default."""
    if not is_dataclass(spec):
        return sorted(vars(spec))
    return [
        field.name
        for field in fields(spec)
        if field.default is MISSING or getattr(spec, field.name) != field.default
    ]


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise _NotServedError(reason)
