"""A rank's host memory and copy engine, for whatever device vLLM keeps its KV on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.cache.policies.contract import policy_named
from kvferry.config import Config
from kvferry.connectors.vllm.messages import RankShape, TierShape
from kvferry.core.keys import Keys
from kvferry.core.quantities import format_size
from kvferry.errors import ConfigError, KvferryError, LayoutError
from kvferry.hostmem.memory import HostMemory
from kvferry.hostmem.shared import SharedHandle, SharedMemory, SlotLayout
from kvferry.rank import Contents, RankMemory, open_on_cpu, open_on_gpu, slot_layout
from kvferry.scheduler.recovery import united, within
from kvferry.scheduler.tier import LowerTier, WriteMode, lower_tier
from kvferry.tiers.movers import LowerTierMover, Mover, SharedMover
from kvferry.transfer.layout import GroupLayout, TensorView, describe, view_of
from kvferry.types import Rank, TierName


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the others.

    ``replicates`` says that all ranks hold the same KV, on one host: then it is stored once.
    """

    rank: Rank
    num_ranks: int = 1
    num_ranks_here: int = 1
    replicates: bool = False


def open_rank(
    device: Any,
    layouts: Sequence[GroupLayout],
    config: Config,
    place: Place,
    contents: Contents,
) -> RankMemory:
    """``device`` is the tensors' own. On a CPU vLLM computes in the thread that calls us."""
    shared = share_host(config, slot_layout(layouts, config)) if place.replicates else None
    if device.type == "cpu":
        return open_on_cpu(
            layouts,
            config,
            rank=place.rank,
            num_ranks=place.num_ranks,
            num_ranks_here=place.num_ranks_here,
            shared=shared,
            contents=contents,
        )
    if device.type == "cuda":
        return open_on_gpu(
            layouts,
            config,
            rank=place.rank,
            device=device.index or 0,
            num_ranks=place.num_ranks,
            num_ranks_here=place.num_ranks_here,
            shared=shared,
            contents=contents,
            is_starting=True,
        )
    raise ConfigError(f"kvferry has no copy engine for KV tensors on {device}")


def mover_of(memory: RankMemory, place: Place) -> Mover:
    """What carries this rank's transfers: its part of them, where the memory is everybody's."""
    if not place.replicates:
        return memory.engine
    return SharedMover(memory.engine, rank=place.rank, num_ranks=place.num_ranks)


def share_host(config: Config, slots: SlotLayout) -> SharedMemory:
    """One host memory for all ranks: the first makes it, the others open it. Called by all."""
    from vllm.distributed.parallel_state import get_tp_group

    ranks = get_tp_group()
    made: SharedMemory | None = None
    told: SharedHandle | str | None = None
    if ranks.rank_in_group == 0:
        try:
            made = HostMemory.share(config.host, slots)
            told = made.handle
        except KvferryError as error:  # the others wait to hear
            told = str(error)
    told = ranks.broadcast_object(told, src=0)
    if not isinstance(told, SharedHandle):
        raise ConfigError(f"the ranks' common host memory: {told}")
    return made if made is not None else HostMemory.share(told, slots)


# ------------------------------------------------------------------------------------------------
# The tiers below host memory, as all ranks have them: what each says, and what that makes.


def tier_movers(memory: RankMemory, place: Place) -> Mapping[TierName, LowerTierMover]:
    """What carries this rank's moves: its part of them, where the host memory is everybody's."""
    if not place.replicates:
        return memory.tiers
    return {
        name: SharedMover(tier, rank=place.rank, num_ranks=place.num_ranks)
        for name, tier in memory.tiers.items()
    }


def shapes_of(memory: RankMemory) -> tuple[TierShape, ...]:
    """This rank's tiers, for the scheduler's side, with what they still have."""
    shapes = []
    for name, tier in memory.tiers.items():
        keys, places = tier.recovered()
        shapes.append(
            TierShape(
                name,
                tier.num_places,
                keys.array,
                places.astype(np.int32),
                tier.most_in_one,
                tier.stores(),
            )
        )
    return tuple(shapes)


def disagreement(shapes: Iterable[RankShape]) -> str:
    """Why the ranks' tiers cannot be used together; empty where they can.

    A block lies on all ranks or on none, so they must have the same tiers in the same order.
    """
    first, *others = sorted(shapes, key=lambda shape: shape.rank)
    for other in others:
        if _kinds(other.tiers) != _kinds(first.tiers):
            return (
                f"rank {first.rank} has {_words(first.tiers)} below host memory, rank "
                f"{other.rank} {_words(other.tiers)}; give all ranks the same tiers"
            )
    return ""


def tiers_of_ranks(shapes: Iterable[RankShape], config: Config) -> list[LowerTier]:
    """The scheduler's tiers: each with as many places as every rank has, and what is in them.

    Ranks that share one host memory have places of their own each (``SharedMover``).
    """
    write, policy = WriteMode(config.tier_write), policy_named(config.tier_policy)
    shapes = sorted(shapes, key=lambda shape: shape.rank)
    tiers = []
    for same in zip(*(shape.tiers for shape in shapes), strict=True):
        num_places = min((each.num_places for each in same if each.num_places), default=None)
        if num_places is None:
            # Where each rank has a part of the keys, an object's blocks are as much further apart:
            # by and large, for which rank has a key is chance.
            apart = len(same) if shapes[0].is_shared else 1
            most = max(each.most_in_one for each in same)
            most_in_one = apart * most if most > 1 else 1
            tier = lower_tier(
                same[0].name,
                None,
                write,
                most_in_one=most_in_one,
                remembers_noes=apart == 1,
            )
            tiers.append(tier)
            continue
        recovered = [
            within((Keys(each.keys), each.places.astype(np.int64)), num_places) for each in same
        ]
        if shapes[0].is_shared:
            recovered = [united(recovered, num_places)]
            num_places *= len(same)
        tiers.append(lower_tier(same[0].name, num_places, write, policy, recovered=recovered))
    return tiers


def _kinds(tiers: Sequence[TierShape]) -> list[tuple[TierName, bool]]:
    return [(tier.name, tier.num_places is None) for tier in tiers]


def _words(tiers: Sequence[TierShape]) -> str:
    words = [f"{tier.name} ({'by key' if tier.num_places is None else 'places'})" for tier in tiers]
    return ", ".join(words) or "no tier"


# ------------------------------------------------------------------------------------------------
# From the tensors vLLM registers to block layouts, by storage and strides.
#
# vLLM hands over one view per layer, sometimes several (a state and its convolution). They may
# lie in
# one storage or in many, and layers of different groups may lie over each other. What they all have
# is an axis that counts blocks; everything else inside a block is opaque to us::
#
#     (blocks, 2, tokens, heads, size)      packed K and V
#     (2, blocks, tokens, heads, size)      split K and V
#     (blocks * n, ...)                     a kernel that works on n-ths of a block


def layouts_of(
    kv_caches: Mapping[str, Any], groups: Sequence[Iterable[str]], num_blocks: int
) -> tuple[GroupLayout, ...]:
    """One layout per group, from the tensors of the layers it names.

    Layers without a tensor (they live on another rank) are left out, and so are views seen before
    (layers that share their KV).
    """
    return tuple(
        _group_layout(kv_caches, names, num_blocks, number) for number, names in enumerate(groups)
    )


def device_of(kv_caches: Mapping[str, Any]) -> Any:
    """Where these tensors are."""
    first = next(iter(kv_caches.values()))
    return (first[0] if isinstance(first, (list, tuple)) else first).device


def words_of(layouts: Sequence[GroupLayout]) -> str:
    """How a block lies in device memory, for the log."""
    kinds = [f"{g.num_segments} x {format_size(int(g.sizes[0]))}" for g in layouts]
    return ", ".join(dict.fromkeys(kinds))


def _group_layout(
    kv_caches: Mapping[str, Any], names: Iterable[str], num_blocks: int, number: int
) -> GroupLayout:
    views: dict[str, TensorView] = {}
    seen = set()
    for name in names:
        for part, tensor in enumerate(_tensors(kv_caches.get(name))):
            view = _blocks_first(view_of(tensor, f"{name}[{part}]"), num_blocks)
            place = (view.address, view.shape, view.strides)
            if place not in seen:
                seen.add(place)
                views[view.name] = view
    if not views:
        raise LayoutError(f"group {number} has no KV tensor on this rank")
    return describe(views, num_blocks=num_blocks, block_axis=0)


def _tensors(entry: Any) -> Sequence[Any]:
    if entry is None:
        return ()
    return entry if isinstance(entry, (list, tuple)) else (entry,)


def _blocks_first(view: TensorView, num_blocks: int) -> TensorView:
    """The same bytes with the block axis in front and whole.

    vLLM's shapes have the blocks before anything that lies inside one, so the first axis that can
    count blocks does. Only K and V may stand before it; a cache of two blocks leaves that open.
    """
    axes = [a for a, extent in enumerate(view.shape) if extent and extent % num_blocks == 0]
    if not axes or (num_blocks <= 2 and len(axes) > 1):
        raise LayoutError(
            f"{view.name} of shape {view.shape} has no axis that clearly counts {num_blocks} blocks"
        )
    axis = axes[0]
    parts = view.shape[axis] // num_blocks
    shape = [num_blocks, parts, *(e for a, e in enumerate(view.shape) if a != axis)]
    step = view.strides[axis]
    strides = [step * parts, step, *(s for a, s in enumerate(view.strides) if a != axis)]
    return TensorView(view.name, view.address, tuple(shape), tuple(strides), view.itemsize)


# ------------------------------------------------------------------------------------------------
# What the scheduler's side must know of a rank, once that has opened its memory.


def shape_of(memory: RankMemory, layouts: Sequence[GroupLayout], place: Place) -> RankShape:
    """Its slots and blocks, what it picks paths by, and its tiers."""
    return RankShape(
        rank=place.rank,
        num_slots=memory.host.num_slots,
        ready_slots=memory.ready_slots,
        slot_bytes=memory.host.tier.slot_bytes,
        block_bytes=tuple(layout.block_bytes for layout in layouts),
        layout=words_of(layouts),
        is_shared=place.replicates,
        choices=getattr(memory.engine, "choices", None),
        tiers=shapes_of(memory),
    )
