"""A rank's host memory and copy engine, for whatever device vLLM keeps its KV on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.config import Config
from kvferry.contents import Contents
from kvferry.device.layout import GroupLayout
from kvferry.errors import ConfigError, KvferryError
from kvferry.rank import RankMemory, open_on_cpu, open_on_gpu, slot_layout
from kvferry.tiers import HostMemory, Mover, SharedHandle, SharedMemory, SharedMover, SlotLayout
from kvferry.types import Rank


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
