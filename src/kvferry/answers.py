"""What the scheduler half answers its engine with: plain, frozen facts."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvferry.types import SlotArray, TransferId


class MatchState(Enum):
    """What to do about a request that was looked up."""

    MISS = "miss"  # nothing to load: compute
    HIT = "hit"  # blocks are pinned: allocate device blocks, then load
    WAIT = "wait"  # they come up, or another request loads them: ask again after the next settle


class Match(NamedTuple):
    """The answer for one request: ``num_tokens`` in all can be had without computing them.

    Those include the ``computed_tokens`` the engine already has, so ``to_load`` are new.
    """

    state: MatchState
    num_tokens: int
    computed_tokens: int

    @property
    def to_load(self) -> int:
        return self.num_tokens - self.computed_tokens


class DeviceBlocks(NamedTuple):
    """Device blocks of one group that a transfer reads or writes."""

    group: int
    blocks: SlotArray


class Landing(NamedTuple):
    """A transfer that every rank has answered for; ``reason`` says why it failed, if it did."""

    transfer_id: TransferId
    reason: str

    @property
    def ok(self) -> bool:
        return not self.reason
