"""The messages between scheduler and worker: transfers, questions, plans, receipts.

In a server the scheduler and the worker are different processes, so every message is frozen,
picklable and made of plain ids. The worker knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

RequestId = str
"""The engine's name for a request; explanations are looked up by it."""

TransferId = NewType("TransferId", int)
"""Identifies one transfer or question on every rank; never reused."""

Rank = NewType("Rank", int)
"""Number of a rank, from 0."""

FIRST_RANK = Rank(0)
"""The only rank of an engine with one GPU."""

TierName = NewType("TierName", str)
"""Name of a tier, in transfers and in metrics."""

DEVICE = TierName("device")
"""The engine's own paged KV memory."""

HOST = TierName("host")
"""Host memory: the tier that the device stores to and loads from."""

SlotArray = npt.NDArray[np.int64]
"""Slot numbers, one per block. On the device a slot number is the engine's block id."""

NO_SLOT = -1
"""Marks the entries of a slot array that hold no slot number."""

MANY_SLOTS = 1 << 21
"""Tiers with at least this many slots keep slot numbers in 4 bytes instead of 8."""


def slot_numbers(num_slots: int) -> npt.NDArray[Any]:
    """Return an array with one slot number per slot, all of them ``NO_SLOT``.

    A tier may have ten million slots and four such arrays, so large tiers use int32. Reading from
    an int32 array converts it, which would slow the steps of a small tier.
    """
    return np.full(num_slots, NO_SLOT, dtype=np.int32 if num_slots >= MANY_SLOTS else np.int64)


KeyRows = npt.NDArray[np.uint64]
"""Keys in messages: one row of words per key (see ``kvferry.core.keys.Keys``)."""

NO_SLOTS: SlotArray = np.empty(0, dtype=np.int64)
"""The slots of a keyed tier in a transfer: it finds blocks by their keys and has no slots."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """One order to copy blocks: ``src_slots[i]`` of tier ``src`` to ``dst_slots[i]`` of ``dst``.

    ``group`` is the group of layers that the blocks belong to; it selects the device layout. A
    transfer to or from a lower tier has the blocks' ``keys``, and must begin ``within`` this many
    seconds or not at all. Keyed tiers have ``NO_SLOTS`` on their side. A load ``in_parts`` arrives
    part by part, so that the model can read the first layers before the last ones have arrived.
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
    """A lookup of ``keys`` in a tier, to be answered ``within`` this many seconds.

    Its id is from the same sequence as the transfers' ids. A receipt answers it; the positions of
    the keys that the tier does not have are its ``failed``.
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

    Blocks stored before the reset have a lower reset ``number`` and never match again. ``epoch`` is
    part of the keys from now on, except in tiers that outlive the server. Unless ``is_kept``, only
    this server may use the blocks stored from now on.
    """

    number: int
    epoch: int
    is_kept: bool = True


@dataclass(frozen=True)
class Plan:
    """One step's orders for every rank.

    A worker first carries out ``reset`` on the tiers named in ``forget``. Then it asks
    ``questions`` and submits ``transfers``, in order (loads before stores).
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

    OK = "ok"  # all blocks were copied
    PARTIAL = "partial"  # all but the blocks in ``Receipt.failed`` were; lower tiers only
    FAILED = "failed"  # no block counts as copied


@dataclass(frozen=True)
class Receipt:
    """How one transfer or question ended on one rank.

    ``failed`` has the positions of the blocks that were not copied (or not found), if the outcome
    is partial. ``path`` is the name of the copy path.
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
    """The blocks that one rank's tier with slots (``places``) has from an earlier process.

    Only blocks with the same ``reset_number`` on all ranks count. ``stores`` describes the stores
    on disk.
    """

    num_places: int
    keys: KeyRows
    places: SlotArray
    reset_number: int = 0
    stores: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Health:
    """A tier of one rank became unavailable, for ``reason``, or available again (no reason).

    Sent on a change only. ``opened`` is set when a tier opens late, after the start.
    """

    rank: Rank
    tier: TierName
    reason: str = ""
    opened: Opened | None = None


class MatchState(Enum):
    """What the engine should do after the lookup of a request."""

    MISS = "miss"  # nothing to load: compute
    HIT = "hit"  # the blocks are leased: allocate device blocks, then load
    WAIT = "wait"  # pending, or another request loads them: match again after ``Scheduler.settle``


class Match(NamedTuple):
    """The lookup result of one request: its first ``num_tokens`` need not be computed.

    They include the ``computed_tokens`` that the engine already has; ``to_load`` are the others.
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
    """A transfer for which every rank has sent its receipt; ``reason`` is empty on success."""

    transfer_id: TransferId
    reason: str
