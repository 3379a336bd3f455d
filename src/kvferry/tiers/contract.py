"""The contract of tiers below the host: batches of blocks are submitted, their results polled.

::

    submit(batch) ──> queued ──> in flight ──> poll() returns one Result, once
                        │            │
        deadline passed │            └── a block that fails is one failed block
                        └──> failed, and its memory was never touched

Two kinds share the contract. A *placed* tier has ``num_places`` numbered places (slots). A pool on
the scheduler's side decides which block is in which place, and a batch names the places. A *keyed*
tier (``num_places`` is None) finds blocks by their keys and serves lookups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.types import FIRST_RANK, Rank, SlotArray, TierName

Rows = npt.NDArray[np.uint8]
"""Blocks as rows of bytes, one row per slot."""

Addresses = npt.NDArray[np.int64]
"""Addresses of the pieces of blocks: a row per block, a column per piece."""

BatchId = NewType("BatchId", int)

CLOSE_SECONDS = 10.0
"""Seconds that ``close`` waits for batches in flight before it abandons them."""


@dataclass(frozen=True)
class TierSetup:
    """Arguments of a tier's factory: its name, the size of its blocks, and the rank it serves.

    Each of ``num_ranks`` ranks opens its own tier, ``num_ranks_here`` of them on this host.
    ``options`` is the rest of the setting's text, for the factory to parse.

    A tier that outlives the process must know which blocks it holds. ``namespace`` is a digest of
    everything that decides a block's bytes on this rank; blocks of another one must not be read.
    ``shared_namespace`` leaves out the engine's number in its server, so that servers can share
    blocks. ``family`` is the same for all ranks of one engine, whatever its weights; ``families``
    are those of all engines of its server on this host, if several. ``label`` is for people. All of
    them are empty if the caller gave none.
    """

    name: TierName
    block_bytes: int
    rank: Rank = FIRST_RANK
    num_ranks: int = 1
    options: str = ""
    num_ranks_here: int = 1
    namespace: bytes = b""
    family: bytes = b""
    families: tuple[bytes, ...] = ()
    label: str = ""
    shared_namespace: bytes = b""
    config: Config = Config()  # noqa: RUF009
    """All settings; each tier reads its own."""


class Way(Enum):
    """The operation that a batch asks for."""

    READ = "read"  # copy blocks from the tier into host memory
    WRITE = "write"  # copy blocks from host memory to the tier
    FIND = "find"  # look up which keys are present, without their bytes; keyed tiers only


@dataclass(frozen=True, eq=False)
class Batch:
    """Blocks to move together: block ``i`` is ``keys[i]``, in the pieces at ``addresses[i]``.

    Piece ``j`` of every block has ``sizes[j]`` bytes; a block is its pieces in order. The caller
    owns the memory. It stays mapped and (for a write) unchanged until the batch's result has been
    polled. ``places[i]`` is the block's place in a placed tier. After ``deadline``
    (``time.monotonic``) no block of the batch begins to move.
    """

    id: BatchId
    way: Way
    keys: Keys
    deadline: float
    addresses: Addresses = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    places: SlotArray | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def block_bytes(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a batch: ``ok[i]`` says that block ``i`` moved whole or, on lookup, was found.

    ``reasons`` has text for every position that is not ok. After a failed read, the block's memory
    may contain anything. The tier no longer touches the memory of the batch.
    """

    batch_id: BatchId
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, str] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def all_failed(cls, batch: Batch, reason: str) -> Result:
        """Return a result in which all blocks failed for the same reason."""
        ok = np.zeros(len(batch), dtype=bool)
        return cls(batch.id, ok, dict.fromkeys(range(len(batch)), reason))


class Tier(Protocol):
    """Keeps blocks of ``block_bytes`` each, below the host. Owns its medium and its threads.

    Every call but ``drain`` and ``close`` returns at once, whatever the medium does, because the
    engine's own thread makes it. Many batches may be in flight; they end in any order, each in
    exactly one :class:`Result`. A fault is a failed block, never an exception. Exceptions are for a
    batch that does not fit the tier (InputError), and for use after ``close`` (ClosedError).

    Leases ensure that of the batches in flight no two write one place, and none reads a place that
    another writes. Several may read one block, or write one key with equal bytes: either write
    counts. A failed write leaves its place without a block.
    """

    name: TierName
    num_places: int | None
    block_bytes: int

    def submit(self, batch: Batch) -> None:
        """Queue a batch."""

    def poll(self) -> list[Result]:
        """Return results since the last call, also of batches that missed their deadline."""

    def drain(self, timeout: float | None = None) -> list[Result]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); return the results."""

    def forget(self) -> None:
        """Drop all blocks: what earlier batches wrote must never be read or found again.

        This holds even after a crash, if a write submitted later survives it.
        """

    @property
    def ailment(self) -> str:
        """Why the tier is unavailable now; empty while it is available.

        While it is unavailable, batches fail at once. It recovers by itself or never.
        """

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        """Finish what was submitted, then release all resources. Safe to call twice.

        Batches that have not begun after ``timeout`` seconds fail. Batches still in flight then are
        abandoned and returned: the tier may touch their memory at any later time, so it must stay
        mapped. Results of all others can still be polled.
        """


def check_batch(tier: Tier, batch: Batch) -> None:
    """Raise InputError for a batch that does not fit the tier, before any byte moves."""
    what = f"tier {tier.name}, batch {batch.id}"
    if not len(batch):
        raise InputError(f"{what}: it names no blocks; an empty batch is never sent")
    if batch.way is Way.FIND:
        if tier.num_places is not None:
            raise InputError(f"{what}: it has numbered places; it knows no keys to find")
        return
    if batch.addresses.shape != (len(batch), len(batch.sizes)) or not len(batch.sizes):
        raise InputError(
            f"{what}: {len(batch)} blocks in {len(batch.sizes)} pieces need as many addresses, "
            f"got an array of shape {batch.addresses.shape}"
        )
    if batch.block_bytes != tier.block_bytes or int(batch.sizes.min()) < 1:
        raise InputError(
            f"{what}: its pieces have {batch.sizes.tolist()} bytes, a block {tier.block_bytes}"
        )
    num_places, places = tier.num_places, batch.places
    if num_places is None:
        return
    if places is None or len(places) != len(batch):
        named = "none" if places is None else str(len(places))
        raise InputError(f"{what}: {len(batch)} blocks need as many places, got {named}")
    if not (int(places.min()) >= 0 and int(places.max()) < num_places):
        raise InputError(
            f"{what}: there are places 0 to {num_places - 1}, asked for "
            f"{int(places.min())} to {int(places.max())}"
        )


def check_size(name: TierName, num_slots: int, slot_bytes: int) -> None:
    if num_slots <= 0 or slot_bytes <= 0:
        raise InputError(
            f"tier {name} needs a positive number of slots and bytes, "
            f"got {num_slots} slots of {slot_bytes} bytes"
        )
