"""Opens each rank's memory and tiers, and combines the ranks' tiers on the scheduler side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.cache.policies import policy_named
from kvferry.config import Config
from kvferry.connectors.common.messages import RankShape, TierShape
from kvferry.core.quantities import format_size
from kvferry.errors import ConfigError, KvferryError
from kvferry.hostmem.slots import SharedHandle, SharedMemory, SlotLayout
from kvferry.rank import Contents, RankMemory, slot_layout
from kvferry.scheduler.tier import LowerTier, WriteMode, lower_tier
from kvferry.tiers.disk.state import reset_in_child, this_host
from kvferry.tiers.disk.superblock import StoreAt
from kvferry.tiers.movers import LowerTierMover, Mover, SharedMover
from kvferry.transfer.layout import GroupLayout
from kvferry.types import Health, Rank, TierName

log = logging.getLogger(__name__)

_START_SECONDS = 10.0
"""Seconds that a child process which resets stores may take to start, besides the drive's time."""

Broadcast = Callable[[Any], Any]
"""Called with one object on every rank of a host; returns the first rank's object."""


@dataclass(frozen=True)
class RankPlace:
    """A rank's number among all; ``replicates``: all hold the same KV and run on one host."""

    rank: Rank
    num_ranks: int = 1
    num_ranks_here: int = 1
    replicates: bool = False


# -- on a rank ----------------------------------------------------------------------------------


def open_rank(
    device: Any,
    layouts: Sequence[GroupLayout],
    config: Config,
    place: RankPlace,
    contents: Contents,
    broadcast: Broadcast | None = None,
) -> RankMemory:
    """Open host memory and a copy engine for KV tensors on ``device``; ConfigError if unsupported.

    Ranks that hold the same KV share one host memory, whose handle they ``broadcast``.
    """
    shared = None
    if place.replicates:
        assert broadcast is not None, "ranks with the same KV need a way to share host memory"
        shared = _share_host(config, slot_layout(layouts), place, broadcast)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"kvferry has no copy engine for KV tensors on {device}")
    is_gpu = device.type == "cuda"  # on a CPU the model computes in the thread that calls us
    return RankMemory.open(
        layouts,
        config,
        gpu=device.index or 0 if is_gpu else None,
        rank=place.rank,
        num_ranks=place.num_ranks,
        num_ranks_here=place.num_ranks_here,
        contents=contents,
        shared=shared,
        is_starting=is_gpu,
    )


def _share_host(
    config: Config, slots: SlotLayout, place: RankPlace, broadcast: Broadcast
) -> SharedMemory:
    """Share one host memory: the first rank makes it, the others open it. All ranks call it."""
    made: SharedMemory | None = None
    sent: SharedHandle | str | None = None
    if place.rank == 0:
        try:
            made = SharedMemory.create(config.host, slots)
            sent = made.handle
        except KvferryError as error:  # sent, because the other ranks wait for the broadcast
            sent = str(error)
    sent = broadcast(sent)
    if not isinstance(sent, SharedHandle):
        raise ConfigError(f"the ranks' common host memory: {sent}")
    return made if made is not None else SharedMemory.open(sent, slots)


def movers_of(
    memory: RankMemory, place: RankPlace
) -> tuple[Mover, Mapping[TierName, LowerTierMover]]:
    """Return this rank's movers: of its part of each transfer, where ranks share host memory."""
    if not place.replicates:
        return memory.engine, memory.tiers
    shared = partial(SharedMover, rank=place.rank, num_ranks=place.num_ranks)
    return shared(memory.engine), {name: shared(tier) for name, tier in memory.tiers.items()}


def shape_of(memory: RankMemory, layouts: Sequence[GroupLayout], place: RankPlace) -> RankShape:
    """Return a rank's shape: its slots, and its tiers with the blocks from before a restart."""
    tiers = []
    for name, tier in memory.tiers.items():
        opened = tier.recovered() if tier.num_places is not None else None
        tiers.append(TierShape(name, tier.num_places, opened, tier.away()))
    kinds = [f"{layout.num_segments} x {format_size(int(layout.sizes[0]))}" for layout in layouts]
    return RankShape(
        rank=place.rank,
        num_slots=memory.host.num_slots,
        ready_slots=memory.ready_slots,
        slot_bytes=memory.host.tier.slot_bytes,
        block_bytes=tuple(layout.block_bytes for layout in layouts),
        layout=", ".join(dict.fromkeys(kinds)),
        is_shared=place.replicates,
        tiers=tuple(tiers),
    )


# -- on the scheduler side ----------------------------------------------------------------------


def disagreement(shapes: Iterable[RankShape]) -> str:
    """Return why the ranks' tiers cannot be used together; empty if they can.

    A block is on all ranks or on none, so they must have the same tiers in the same order.
    """
    first, *others = sorted(shapes, key=lambda shape: shape.rank)
    for other in others:
        if _words(other.tiers) != _words(first.tiers):
            return (
                f"rank {first.rank} has {_words(first.tiers)} below host memory, rank "
                f"{other.rank} {_words(other.tiers)}; give all ranks the same tiers"
            )
    return ""


def _words(tiers: Sequence[TierShape]) -> str:
    words = [f"{tier.name} ({'by key' if tier.num_places is None else 'places'})" for tier in tiers]
    return ", ".join(words) or "no tier"


def tiers_of_ranks(shapes: Iterable[RankShape], config: Config) -> list[LowerTier]:
    """Make the scheduler's tiers, each with as many places as every rank has, and their blocks.

    Ranks that share one host memory each have their own places in lower tiers (``SharedMover``).
    """
    write, policy = WriteMode(config.tier_write), policy_named(config.tier_policy)
    shapes = sorted(shapes, key=lambda shape: shape.rank)
    tiers = []
    for same in zip(*(shape.tiers for shape in shapes), strict=True):
        name = same[0].name
        num_places = min((each.num_places for each in same if each.num_places), default=None)
        opened = [each.opened for each in same]
        is_shared = shapes[0].is_shared
        tiers.append(
            lower_tier(name, num_places, write, policy, recovered=opened, is_shared=is_shared)
        )
    return tiers


class DiskResets:
    """Writes a reset number to the ranks' stores on disk, so that a reset outlives a killed server.

    The ranks learn of a reset with the next step, and there may be none. So the scheduler side
    writes the reset number to the stores on this host. It cannot reach stores on other hosts. But a
    block counts only if every rank has it under one number, so one rank's store is enough.
    """

    def __init__(self, shapes: Iterable[RankShape], drive_seconds: float) -> None:
        self._timeout = drive_seconds + _START_SECONDS
        self._stores: list[StoreAt] = []
        self._away: dict[Rank, tuple[str, ...]] = {}
        for shape in shapes:
            for tier in shape.tiers:
                self._stores += tier.opened.stores if tier.opened is not None else ()
                self._away[shape.rank] = tier.away or self._away.get(shape.rank, ())

    def note(self, health: Health) -> None:
        """Take note of a store that a rank could not open at the start and has opened now."""
        if health.opened is not None:
            self._away.pop(health.rank, None)
            self._stores += health.opened.stores

    def write(self, number: int) -> str:
        """Write this reset number; return why older blocks may be found again, empty if not."""
        away = sorted({path for paths in self._away.values() for path in paths})
        if away:
            return f"{', '.join(away)}: it is not open, and cannot be reset"
        here = [store for store in self._stores if store.host == this_host()]
        if self._stores and not here:
            log.warning("no rank's disk can be reached from here: it is reset with the next step")
        return reset_in_child(here, number, self._timeout) if here else ""
