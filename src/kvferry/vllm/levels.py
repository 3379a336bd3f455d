"""The levels below host memory, as all ranks have them: what each says, and what that makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.config import Config
from kvferry.policy import policy_named
from kvferry.rank import RankMemory
from kvferry.scheduler import Level, WriteMode, level_of
from kvferry.tiers import LevelMover, SharedLevelMover
from kvferry.types import TierName
from kvferry.vllm.messages import LevelShape, RankShape
from kvferry.vllm.ranks import Place


def level_movers(memory: RankMemory, place: Place) -> Mapping[TierName, LevelMover]:
    """What carries this rank's moves: its part of them, where the host memory is everybody's."""
    if not place.replicates:
        return memory.levels
    return {
        name: SharedLevelMover(level, rank=place.rank, num_ranks=place.num_ranks)
        for name, level in memory.levels.items()
    }


def shapes_of(memory: RankMemory) -> tuple[LevelShape, ...]:
    """This rank's levels, for the scheduler's side."""
    return tuple(LevelShape(name, level.num_places) for name, level in memory.levels.items())


def disagreement(shapes: Iterable[RankShape]) -> str:
    """Why the ranks' levels cannot be used together; empty where they can.

    A block lies on all ranks or on none, so they must have the same levels in the same order.
    """
    first, *others = sorted(shapes, key=lambda shape: shape.rank)
    for other in others:
        if _kinds(other.levels) != _kinds(first.levels):
            return (
                f"rank {first.rank} has {_words(first.levels)} below host memory, rank "
                f"{other.rank} {_words(other.levels)}; give all ranks the same levels"
            )
    return ""


def levels_of(shapes: Iterable[RankShape], config: Config) -> list[Level]:
    """The scheduler's levels: each with as many places as every rank has."""
    write, policy = WriteMode(config.level_write), policy_named(config.policy)
    levels = []
    for same in zip(*(shape.levels for shape in shapes), strict=True):
        places = [level.num_places for level in same if level.num_places is not None]
        levels.append(level_of(same[0].name, min(places, default=None), write, policy))
    return levels


def _kinds(levels: Sequence[LevelShape]) -> list[tuple[TierName, bool]]:
    return [(level.name, level.num_places is None) for level in levels]


def _words(levels: Sequence[LevelShape]) -> str:
    words = [
        f"{level.name} ({'by key' if level.num_places is None else 'places'})" for level in levels
    ]
    return ", ".join(words) or "no level"
