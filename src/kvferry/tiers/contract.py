"""What a tier below the host is: blocks go down and come up in batches, and the answer comes later.

::

    submit(batch) ──> queued ──> under way ──> poll() gives one Result, once
                        │            │
        its time is up  │            └── a block that fails is one failed block
                        └──> failed, and its memory was never touched

Two kinds share the contract. A *placed* tier has ``num_places`` numbered places; which block lies
where is decided by a pool on the scheduler's side, and a batch names the places. A *keyed* tier
(``num_places`` is None) finds blocks by their keys and can be asked which it has.
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
"""Where pieces of blocks begin: a row per block, a column per piece."""

BatchId = NewType("BatchId", int)

CLOSE_SECONDS = 10.0
"""How long closing waits for what is under way before it leaves it behind."""


@dataclass(frozen=True)
class TierSetup:
    """What a tier's factory is told: its name, the size of its blocks, and the rank it serves.

    Each of ``num_ranks`` ranks opens a tier of its own, ``num_ranks_here`` of them on this host.
    ``options`` is the rest of the setting's text, for the factory to read.

    A tier that outlives the process must know which blocks it holds. ``namespace`` is a digest of
    everything that decides a block's bytes on this rank: blocks of another one must not be read.
    ``shared_namespace`` leaves out the engine's number in its server: servers may share under it.
    ``family`` is the same for all ranks of one engine, whatever its weights; ``families`` are those
    of all engines of its server on this host, where there are several. ``label`` is for people. All
    of them are empty where the caller gave none.
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
    """What a batch asks for."""

    READ = "read"  # bytes come up, into host memory
    WRITE = "write"  # bytes go down, from host memory
    FIND = "find"  # no bytes: which of the keys are there? Keyed tiers only


@dataclass(frozen=True, eq=False)
class Batch:
    """Blocks to move together: block ``i`` is ``keys[i]``, in the pieces ``addresses[i]``.

    Piece ``j`` of every block has ``sizes[j]`` bytes; a block is its pieces in their order. The
    memory belongs to the caller and stays mapped and (for a write) unchanged until the batch's
    result has been polled. ``places[i]`` is its place in a placed tier. After ``deadline``
    (``time.monotonic``) nothing of it begins.
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
    """What became of a batch: ``ok[i]`` says that block ``i`` moved whole, or is there.

    ``reasons`` has words for every position that is not ok. Memory that a failed block was to be
    read into is in any state. From now on the tier does not touch the batch's memory.
    """

    batch_id: BatchId
    ok: npt.NDArray[np.bool_]
    reasons: Mapping[int, str] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def all_failed(cls, batch: Batch, reason: str) -> Result:
        """None of it moved, all for one reason."""
        ok = np.zeros(len(batch), dtype=bool)
        return cls(batch.id, ok, dict.fromkeys(range(len(batch)), reason))


class Tier(Protocol):
    """Blocks of ``block_bytes`` each, below the host. Owns its medium and its threads.

    Every call but ``drain`` and ``close`` returns at once, whatever the medium does, because the
    engine's own thread makes it. Many batches may be under way; they end in any order, each in
    exactly one :class:`Result`. A fault is a failed block, never an exception. Exceptions are for a
    batch that does not fit the tier (InputError), and for use after ``close`` (ClosedError).

    Leases ensure that no two batches under way write one place, nor read a place being written.
    Several may read one block, or write one key (the bytes are the same): either write counts. A
    write that failed leaves its place without a block.
    """

    name: TierName
    num_places: int | None
    block_bytes: int

    def submit(self, batch: Batch) -> None:
        """Queue a batch."""

    def poll(self) -> list[Result]:
        """Results since the last call, also of batches that did not begin by their deadline."""

    def drain(self, timeout: float | None = None) -> list[Result]:
        """Wait until nothing is under way (or ``timeout`` seconds passed); returns the results."""

    def forget(self) -> None:
        """Nothing written by batches submitted before this may ever be read or found again.

        Not even after a crash, if a write submitted later is still there then.
        """

    @property
    def ailment(self) -> str:
        """Why the tier cannot be used now; empty while it can. It heals by itself or never.

        While it ails, batches fail at once.
        """

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        """Finish what was submitted, then give everything back. Safe to call twice.

        Batches that have not begun after ``timeout`` seconds fail. Batches still under way then are
        left behind and returned: their memory may be touched at any later time, and must stay.
        Results of all others can still be polled.
        """


def check_batch(tier: Tier, batch: Batch) -> None:
    """Refuse a batch that does not fit the tier, before any byte moves."""
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
