"""The library's entry point: attach a ferry to an engine's KV tensors.

::

    with kvferry.attach(kv, model="my-model", block_tokens=16, host="1GiB") as ferry:
        keys = ferry.keys(tokens)               # one key per full block, from the first token on
        hit = ferry.match(keys)                 # leased: not evicted until loaded or released
        ferry.load(hit, blocks[: len(hit)])     # asynchronous; poll() or wait() says when
        ...compute the rest...
        ferry.store(keys, blocks)               # asynchronous too; stores only new blocks
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvferry.cache.reach import FullAttention, Group
from kvferry.config import Config
from kvferry.core.identity import Described, Namespace
from kvferry.errors import ConfigError, InputError, LayoutError
from kvferry.ferry import Ferry
from kvferry.rank import Contents, RankMemory
from kvferry.transfer.engine.cpu import Stream
from kvferry.transfer.layout import describe, named_tensors

log = logging.getLogger(__name__)

Tensors = Mapping[str, Any] | Sequence[Any]
"""KV tensors of one group, in layer order, by name or not."""


def attach(
    kv: Tensors | Sequence[Tensors],
    *,
    model: str,
    groups: Sequence[Group] | None = None,
    block_axis: int = 0,
    revision: str = "",
    overrides: Described = "",
    salt: str = "",
    compute: Stream | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Ferry:
    """Attach to an engine's paged KV tensors (one or more per layer, in layer order).

    ``block_axis`` is the axis that counts blocks, in every tensor. The tensors are writable numpy
    arrays or torch tensors, all on one device. ``model``, ``revision``, ``overrides`` and ``salt``
    become part of every key: blocks of another model, revision, rope setting or tenant never match.
    Whatever differs from request to request goes to :meth:`Ferry.keys`. ``settings`` are those of
    :class:`Config`, e.g. ``host="8GiB"``. Others come from the environment, a configuration file,
    or the defaults (see :meth:`Config.load`).

    Layers with different kinds of attention need ``groups``, one for each block table
    (:class:`FullAttention`, :class:`SlidingWindow` ...); ``kv`` is then a list with the tensors of
    each group. By default all layers are one group of full attention with blocks of
    ``block_tokens``.
    """
    config = _checked_config(config, settings)
    if compute is not None and not isinstance(compute, Stream):
        raise InputError(f"compute must be a kvferry Stream, got {type(compute).__name__}")
    logging.getLogger("kvferry").setLevel(config.log_level.upper())
    kinds = _checked_groups(groups, config.block_tokens)
    named = [named_tensors(each) for each in _by_group(kv, groups)]
    layouts = tuple(describe(tensors, block_axis=block_axis) for tensors in named)
    gpu = _gpu_of(named)
    if gpu is not None and compute is not None:
        raise InputError("compute is for tensors in ordinary memory; on a GPU it is torch's stream")
    geometry: list[dict[str, Any]] = [
        {"block_bytes": layout.block_bytes, "segments": layout.sizes.tolist()} for layout in layouts
    ]
    if groups is not None:
        kinds_of = zip(kinds, geometry, strict=True)
        geometry = [{"kind": repr(group), **part} for group, part in kinds_of]
    namespace = Namespace(
        model=model,
        revision=revision,
        dtype="; ".join(map(_dtype, named)),
        layout="; ".join(layout.format for layout in layouts),
        geometry=geometry if groups is not None else geometry[0],
        block_tokens=config.block_tokens,
        overrides=overrides,
        salt=salt,
    )
    stores = [name for name, where in (("disk", config.disk), ("remote", config.remote)) if where]
    if stores and not revision:
        log.warning(
            "%s: blocks there outlive this process and are told apart by the model's name, %s, "
            "alone; give a revision that changes with the weights",
            " and ".join(stores),
            model,
        )
    rank = RankMemory.open(layouts, config, gpu=gpu, compute=compute, contents=Contents(namespace))
    with ExitStack() as undo:
        undo.callback(rank.close)
        ferry = Ferry(layouts, kinds, namespace, config, rank, keep_alive=named)
        undo.pop_all()
    return ferry


def _checked_config(config: Config | None, settings: Mapping[str, Any]) -> Config:
    if config is not None and settings:
        raise ConfigError("give either a config or single settings, not both")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config must be a kvferry.Config, got {type(config).__name__}")
    return config if config is not None else Config.load(overrides=settings, source="attach")


def _checked_groups(groups: Sequence[Group] | None, block_tokens: int) -> tuple[Group, ...]:
    if groups is None:
        return (FullAttention(block_tokens),)
    if not isinstance(groups, Sequence):
        raise InputError(f"groups must be a list of groups, got {type(groups).__name__}")
    if not groups:
        raise InputError("groups must name at least one group of layers; leave it out for one kind")
    for group in groups:
        if not isinstance(group, Group):
            raise InputError(f"groups must be FullAttention and such, got a {type(group).__name__}")
        if group.block_tokens % block_tokens:
            raise ConfigError(
                f"block_tokens: keys of {block_tokens} tokens do not end where the blocks of "
                f"{group} do; give a number that divides the blocks of every group"
            )
    if len(groups) == 1 and groups[0].block_tokens != block_tokens:
        raise ConfigError(
            f"block_tokens: the only group, {groups[0]}, has other blocks than the {block_tokens} "
            "tokens that a key covers, so they could not be counted by their keys; give "
            f"block_tokens={groups[0].block_tokens}"
        )
    return tuple(groups)


def _by_group(kv: Any, groups: Sequence[Group] | None) -> Sequence[Tensors]:
    if groups is None:
        return (kv,)
    if isinstance(kv, Mapping) or not isinstance(kv, Sequence) or len(kv) != len(groups):
        count = len(kv) if hasattr(kv, "__len__") else type(kv).__name__
        raise InputError(
            f"with {len(groups)} groups kv is a list of as many lists (or mappings) of tensors, "
            f"one for each group; got {count}"
        )
    return kv


def _dtype(tensors: Mapping[str, Any]) -> str:
    """Return the dtype of all tensors, or a JSON list of their dtypes if they differ."""
    names = [str(tensor.dtype) for tensor in tensors.values()]
    return names[0] if len(set(names)) == 1 else json.dumps(names)


def _gpu_of(named: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of the GPU that holds all tensors; None for ordinary memory."""
    places = []
    for name, tensor in (item for tensors in named for item in tensors.items()):
        kind = getattr(getattr(tensor, "device", None), "type", None)  # numpy's device is a str
        places.append(
            (name, f"{kind}:{tensor.device.index or 0}" if kind not in (None, "cpu") else "")
        )
    first, device = places[0]
    for name, other in places:
        if other != device:
            raise LayoutError(
                f"{name} is on {other or 'the CPU'}, {first} on {device or 'the CPU'}; the tensors "
                "of one ferry must be on one device"
            )
    kind, _, number = device.partition(":")
    if kind not in ("", "cuda"):
        raise LayoutError(f"{first} is on {device}; kvferry copies to CUDA and CPU")
    return int(number) if number else None
