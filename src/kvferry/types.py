"""The plain words scheduler and worker share: transfers, questions, plans, receipts.

In a real server the two halves are different processes, so everything here is frozen, picklable
and made of plain ids. The worker never learns what a request is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

RequestId = str
"""The engine's name for a request, for people to ask by."""

TransferId = NewType("TransferId", int)
"""Names one transfer or question on every rank; never used twice."""

Rank = NewType("Rank", int)
"""Which of the engine's ranks: 0 and up."""

FIRST_RANK = Rank(0)
"""The only one, where there is one."""

TierName = NewType("TierName", str)
"""Names a place where blocks rest, in transfers and in figures."""

DEVICE = TierName("device")
"""The engine's own paged KV memory."""

HOST = TierName("host")
"""This machine's memory, where blocks come to rest first."""

SlotArray = npt.NDArray[np.int64]
"""Slot numbers, one per block. On the device a slot is the engine's block id."""

NO_SLOT = -1
"""In arrays of slots: there is none."""


MANY_SLOTS = 1 << 21


def slot_numbers(num_slots: int) -> npt.NDArray[Any]:
    """An array with room for a slot number per slot, ``NO_SLOT`` in all of them.

    A tier may have ten million slots, and four such arrays: half the bytes then, and a conversion
    whenever some are fetched, which a step's few would feel where slots are few.
    """
    return np.full(num_slots, NO_SLOT, dtype=np.int32 if num_slots >= MANY_SLOTS else np.int64)


KeyRows = npt.NDArray[np.uint64]
"""Keys as the messages carry them: one row of words each (see ``kvferry.core.keys.Keys``)."""

NO_SLOTS: SlotArray = np.empty(0, dtype=np.int64)
"""A tier that finds blocks by their keys gives out no places: its side of a transfer is this."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """One order to copy blocks: ``src_slots[i]`` of tier ``src`` to ``dst_slots[i]`` of ``dst``.

    ``group`` names the layers whose blocks these are (it selects the device layout). Below the host
    blocks travel with their ``keys``, and what has not begun ``within`` so many seconds is not
    wanted any more; a tier that finds blocks by their keys has ``NO_SLOTS`` on its side. A load
    ``in_parts`` lands layer after layer, so that the model can begin to read it before it is whole.
    """

    id: TransferId
    src: TierName
    dst: TierName
    src_slots: SlotArray
    dst_slots: SlotArray
    group: int = 0
    keys: KeyRows | None = None
    within: float | None = None
    in_parts: bool = False

    def __len__(self) -> int:
        return max(len(self.src_slots), len(self.dst_slots))


@dataclass(frozen=True, eq=False)
class Question:
    """Which of these ``keys`` a tier has, to be answered ``within`` so many seconds.

    Its id is one of the transfers' ids and its answer a receipt: the positions of the keys that are
    not there count as failed.
    """

    id: TransferId
    tier: TierName
    keys: KeyRows
    within: float

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Reset:
    """A reset of the cache, for tiers that outlive their process.

    Blocks stored before it have a lower reset ``number``, and are found no more. ``epoch`` is that
    of the keys from now on: where blocks outlive the server, it is no part of their names. Unless
    ``is_kept``, what is stored from now on is not for another server either.
    """

    number: int
    epoch: int
    is_kept: bool = True


@dataclass(frozen=True)
class Plan:
    """One step's orders for every rank.

    First the tiers named in ``forget`` forget everything, by ``reset``; then ``questions`` are
    asked and ``transfers`` are submitted in their order (loads before stores).
    """

    step: int
    transfers: tuple[Transfer, ...] = ()
    questions: tuple[Question, ...] = ()
    forget: tuple[TierName, ...] = ()
    reset: Reset | None = None

    def __bool__(self) -> bool:
        return bool(self.transfers or self.questions or self.forget)


class Outcome(Enum):
    """How a transfer ended on one rank."""

    OK = "ok"  # all of it
    PARTIAL = "partial"  # all but some blocks, which are named; only below the host
    FAILED = "failed"  # none of it counts


@dataclass(frozen=True)
class Receipt:
    """What became of one transfer, or of one question, on one rank.

    ``failed`` are the positions of the blocks that did not move (or are not there) where the others
    did. ``path`` is the way it was copied.
    """

    transfer_id: TransferId
    rank: Rank
    outcome: Outcome
    reason: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    path: str = ""
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Opened:
    """What one rank's tier with places has from an earlier life, once it is open.

    Only blocks of the same ``reset_number`` on all ranks count. ``stores`` says where the files of
    a disk are.
    """

    num_places: int
    keys: KeyRows
    places: SlotArray
    reset_number: int = 0
    stores: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Health:
    """A tier went away on one rank, or came back: ``reason`` says why it cannot be used.

    Told when it changes. ``opened`` has what a tier holds that could not be opened at the start.
    """

    rank: Rank
    tier: TierName
    reason: str = ""
    opened: Opened | None = None


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
