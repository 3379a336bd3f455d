"""The levels below host memory, as all ranks have them: what each says, and what that makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvferry.config import Config
from kvferry.keys import Keys
from kvferry.policy import policy_named
from kvferry.rank import RankMemory
from kvferry.scheduler import Level, WriteMode, level_of
from kvferry.scheduler.recovered import united, within
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
    """This rank's levels, for the scheduler's side, with what they still have."""
    shapes = []
    for name, level in memory.levels.items():
        keys, places = level.recovered()
        shapes.append(
            LevelShape(
                name,
                level.num_places,
                keys.array,
                places.astype(np.int32),
                level.most_in_one,
                level.stores(),
            )
        )
    return tuple(shapes)


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
    """The scheduler's levels: each with as many places as every rank has, and what is in them.

    Ranks that share one host memory have places of their own each (``SharedLevelMover``).
    """
    write, policy = WriteMode(config.level_write), policy_named(config.level_policy)
    shapes = sorted(shapes, key=lambda shape: shape.rank)
    levels = []
    for same in zip(*(shape.levels for shape in shapes), strict=True):
        num_places = min((each.num_places for each in same if each.num_places), default=None)
        if num_places is None:
            # Where each rank has a part of the keys, an object's blocks are as much further apart:
            # by and large, for which rank has a key is chance.
            apart = len(same) if shapes[0].is_shared else 1
            most = max(each.most_in_one for each in same)
            most_in_one = apart * most if most > 1 else 1
            level = level_of(
                same[0].name,
                None,
                write,
                most_in_one=most_in_one,
                remembers_noes=apart == 1,
            )
            levels.append(level)
            continue
        recovered = [
            within((Keys(each.keys), each.places.astype(np.int64)), num_places) for each in same
        ]
        if shapes[0].is_shared:
            recovered = [united(recovered, num_places)]
            num_places *= len(same)
        levels.append(level_of(same[0].name, num_places, write, policy, recovered=recovered))
    return levels


def _kinds(levels: Sequence[LevelShape]) -> list[tuple[TierName, bool]]:
    return [(level.name, level.num_places is None) for level in levels]


def _words(levels: Sequence[LevelShape]) -> str:
    words = [
        f"{level.name} ({'by key' if level.num_places is None else 'places'})" for level in levels
    ]
    return ", ".join(words) or "no level"
