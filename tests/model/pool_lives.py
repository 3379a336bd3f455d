"""Random lives of a pool: what many requests do to one, as plain data that any pool can be told.

Conversations go on, branch, and share their beginnings; some blocks stand alone. Leases stay open
for a while and end in every way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.fakes.crafted_keys import key, keys

from kvferry.cache.slots import Purpose
from kvferry.core.keys import Key, Keys


@dataclass(frozen=True)
class Reserve:
    """Store these blocks, the first after ``parent``."""

    numbers: tuple[int, ...]
    parent: int | None
    chained: bool

    @property
    def keys(self) -> Keys:
        return keys(self.numbers)

    @property
    def parent_key(self) -> Key | None:
        return key(self.parent) if self.parent is not None else None


@dataclass(frozen=True)
class Pin:
    """Read or copy these blocks."""

    numbers: tuple[int, ...]
    purpose: Purpose

    @property
    def keys(self) -> Keys:
        return keys(self.numbers)


@dataclass(frozen=True)
class Touch:
    """These blocks were used elsewhere; some may be named twice."""

    numbers: tuple[int, ...]

    @property
    def keys(self) -> Keys:
        return keys(self.numbers)


@dataclass(frozen=True)
class End:
    """End one of the open leases, well or badly; ``at`` counts from the oldest."""

    at: int
    well: bool


@dataclass(frozen=True)
class Disown:
    """Stop believing in one of the open leases."""

    at: int


@dataclass(frozen=True)
class Reset:
    """Forget everything."""


@dataclass(frozen=True)
class Grow:
    """So many slots can be used."""

    num_ready: int


Event = Reserve | Pin | Touch | End | Disown | Reset | Grow


def life(seed: int, num_slots: int, num_events: int) -> Iterator[Event]:
    """What happens to one pool; the same for the same numbers."""
    rng = Random(seed)
    fresh = iter(range(1_000_000))
    chains: list[list[int]] = [[]]
    loose = [next(fresh) for _ in range(6)]
    for _ in range(num_events):
        dice = rng.random()
        chain = rng.choice(chains)
        if dice < 0.32 or not chain:
            chain = _next_turn(rng, chains, chain, fresh, num_slots)
            first = rng.choice([0, 0, max(0, len(chain) - 1), rng.randint(0, len(chain) - 1)])
            yield Reserve(tuple(chain[first:]), chain[first - 1] if first else None, True)
        elif dice < 0.38:
            yield Reserve(tuple(rng.sample(loose, rng.randint(1, 6))), None, False)
        elif dice < 0.55:
            first = rng.choice([0, 0, rng.randint(0, len(chain) - 1)])
            purpose = rng.choice([Purpose.READ, Purpose.READ, Purpose.COPY])
            yield Pin(tuple(chain[first : rng.randint(first, len(chain)) or None]), purpose)
        elif dice < 0.60:
            yield Touch(tuple(rng.choices(chain + loose, k=rng.randint(0, 5))))
        elif dice < 0.97:
            yield End(rng.randint(0, 7), rng.random() < 0.85)
        elif dice < 0.985:
            yield Disown(rng.randint(0, 7))
        elif dice < 0.99:
            yield Reset()
        else:
            yield Grow(rng.randint(0, num_slots))


def _next_turn(
    rng: Random, chains: list[list[int]], chain: Sequence[int], fresh: Iterator[int], most: int
) -> list[int]:
    """A conversation goes on, or another branches off it, or begins."""
    kept = rng.choice([len(chain), len(chain), rng.randint(0, len(chain)), 0])
    turn = [next(fresh) for _ in range(rng.randint(1, max(2, most // 3)))]
    grown = [*chain[:kept], *turn]
    chains.append(grown)
    if len(chains) > 6:
        chains.pop(0)
    return grown
