"""What the scheduler remembers of one request: its hit, its loads, how far it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry import reach
from kvferry.answers import Match, MatchState
from kvferry.errors import InputError
from kvferry.keys import KeyChain, Keys
from kvferry.lease import Lease
from kvferry.types import Key, SlotArray, TransferId


class GroupKeys:
    """The pool keys of one group's slots, cut from a request's chain of hash blocks.

    ::

        chain    k0 k1 k2 k3 k4 k5 k6 k7      one key per hash block, each covers all before it
        slots    [    k3    ][    k7    ]     a slot of four hash blocks has the last one's key
    """

    def __init__(self, group: reach.Group, hash_block_tokens: int) -> None:
        if group.slot_tokens % hash_block_tokens:
            raise InputError(
                f"{group} has slots of {group.slot_tokens} tokens, which is not a multiple "
                f"of the hash block of {hash_block_tokens}: no key ends where a slot does"
            )
        self._ratio = group.slot_tokens // hash_block_tokens

    def count(self, chain: Keys) -> int:
        """How many whole slots the chain covers."""
        return len(chain) // self._ratio

    def one(self, chain: KeyChain, slot: int) -> Key | None:
        """The key of one slot; None if the chain does not cover it."""
        at = (slot + 1) * self._ratio - 1
        return chain[at] if at < len(chain) else None

    def cut(self, chain: Keys, slots: range) -> Keys:
        """The keys of these slots of the request."""
        return chain[(slots.start + 1) * self._ratio - 1 : slots.stop * self._ratio : self._ratio]


@dataclass(eq=False)
class Hit:
    """A pinned hit: the leases, by group, of the slots a load would read.

    ``watch`` are keys that must all be cached before a longer hit is possible; where there are
    none, one of ``lacking`` (first words of keys, sorted) must be. Until then, and while the pool's
    generation is ``generation``, the answer stands. ``joined`` are slots that another request was
    loading when we looked, after ``num_loads`` loads in all. A load would fill ``num_blocks``
    device blocks. One that ``can_grow`` no longer need not be looked up again.
    """

    match: Match
    max_tokens: int
    leases: tuple[Lease | None, ...]
    joined: SlotArray
    watch: Keys
    lacking: npt.NDArray[np.uint64] | None
    generation: int
    deadline: float
    num_blocks: int
    can_grow: bool = True
    num_loads: int = 0

    def release(self) -> None:
        leases, self.leases = self.leases, ()
        for lease in leases:
            if lease is not None:
                lease.release()

    def decline(self, state: MatchState) -> None:
        """Nothing is loaded for now: let the slots go and answer with ``state``."""
        self.release()
        self.match = Match(state, self.match.computed_tokens, self.match.computed_tokens)


@dataclass(eq=False)
class Loading:
    """The loads of one request that are on their way, one per group at most."""

    match: Match
    waiting: set[TransferId]
    reason: str = ""


@dataclass(eq=False)
class RequestRecord:
    """One request as the scheduler sees it. Owns its pinned hit until a load takes it over."""

    stored: list[int]
    promoting: set[TransferId] = field(default_factory=set)
    asked: bool = False  # once per look: what was not known to be below by then is not there
    promoted: bool = False  # once per look: what did not come up by then is computed
    counted: bool = False
    explained: bool = False
    outdated: bool = False  # its device blocks are from before a reset
    hit: Hit | None = None
    missed: tuple[int, int, int] | None = None  # generation and question of its last miss
    loading: Loading | None = None

    @classmethod
    def new(cls, groups: Sequence[reach.Group]) -> RequestRecord:
        return cls(stored=[0] * len(groups))

    def renew(self) -> None:
        """It starts from nothing: what a reset said about its blocks no longer counts."""
        if self.outdated:
            self.outdated = False
            self.stored = [0] * len(self.stored)

    def let_go(self) -> None:
        """Drop the pinned hit, if any."""
        if self.hit is not None:
            hit, self.hit = self.hit, None
            hit.release()
