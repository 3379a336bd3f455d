"""A claim on slots while bytes move: one object, ended exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.quantities import Integers, integers
from kvferry.errors import InputError, LeaseError
from kvferry.types import SlotArray

Places = Sequence[int] | npt.NDArray[np.integer]
"""Which slots of a lease, by their place in ``Lease.slots``."""


def as_slots(slots: Integers) -> SlotArray:
    """Slot numbers as a read-only int64 vector of their own; refuses negatives and non-integers."""
    array = np.array(integers(slots, "slots"))
    if array.size and int(array.min()) < 0:
        raise InputError(f"slots must not be negative, got {int(array.min())}")
    array.setflags(write=False)
    return array


_ALL_WELL = as_slots(())


class Purpose(Enum):
    """Why slots are claimed."""

    WRITE = "write"  # bytes are arriving: not matchable, not evictable
    READ = "read"  # bytes are leaving: matchable, not evictable
    COPY = "copy"  # as READ, but no sign of use: the slots keep their place in the eviction order


class Ending(Enum):
    """How a lease ends. WRITE: commit or abort. READ and COPY: release or spoil."""

    COMMIT = "commit"
    ABORT = "abort"
    RELEASE = "release"
    SPOIL = "spoil"


_ENDS_OF_WRITING = (Ending.COMMIT, Ending.ABORT)
_ENDS_OF_READING = (Ending.RELEASE, Ending.SPOIL)


class LeaseOwner(Protocol):
    """The pool that made a lease."""

    def end(self, lease: Lease, ending: Ending, failed: SlotArray) -> None:
        """Take the slots back; called once, by the lease. ``failed`` are places, all valid."""

    def disown(self, lease: Lease) -> None:
        """Stop believing in the bytes; the slots stay claimed until the lease ends."""


class Lease:
    """A claim on ``slots``, made by a pool and given back to it exactly once.

    ``positions[i]`` says which of the keys that were asked for got ``slots[i]``. The pool owns the
    slots' state; the lease owns only the right to end the claim.
    """

    __slots__ = ("_owner", "ended", "positions", "purpose", "slots")

    def __init__(
        self,
        purpose: Purpose,
        slots: SlotArray,
        positions: SlotArray,
        owner: LeaseOwner,
    ) -> None:
        self.purpose = purpose
        self.slots = slots
        self.positions = positions
        self.ended: Ending | None = None
        self._owner = owner

    def __len__(self) -> int:
        return len(self.slots)

    def commit(self, failed: Places = _ALL_WELL) -> None:
        """The bytes are there: the blocks may be matched from now on.

        Except at the places in ``failed``: those blocks are aborted, and with them the blocks of
        this lease that follow one of them in a chain. They could not be reached, and would take
        room from what can be.
        """
        if self.ended is None and self.purpose is Purpose.WRITE and not len(failed):
            self.ended = Ending.COMMIT  # the same, in a call less
            self._owner.end(self, Ending.COMMIT, _ALL_WELL)
        else:
            self._end(Ending.COMMIT, failed)

    def abort(self) -> None:
        """The bytes did not come: the slots go back as if never asked for."""
        self._end(Ending.ABORT)

    def release(self, failed: Places = _ALL_WELL) -> None:
        """The bytes were read: the slots may be evicted again.

        Except at the places in ``failed``: those blocks are spoiled. What follows one of them in a
        chain is good and stays, to be reached again once its parent is back; but it served no
        request, so this is no use of it.
        """
        if self.ended is None and self.purpose is not Purpose.WRITE and not len(failed):
            self.ended = Ending.RELEASE  # the same, in a call less
            self._owner.end(self, Ending.RELEASE, _ALL_WELL)
        else:
            self._end(Ending.RELEASE, failed)

    def spoil(self) -> None:
        """The bytes could not be read: the blocks must never be matched again."""
        self._end(Ending.SPOIL)

    def disown(self) -> None:
        """The bytes are in doubt while the claim goes on: its blocks must not be matched.

        A slow rank may still touch the slots, so they stay claimed until the lease ends.
        """
        self._owner.disown(self)

    def _end(self, ending: Ending, failed: Places = _ALL_WELL) -> None:
        endings = _ENDS_OF_WRITING if self.purpose is Purpose.WRITE else _ENDS_OF_READING
        if self.ended is not None or ending not in endings:
            allowed = " or ".join(e.value for e in endings)
            why = f"ended by {self.ended.value}" if self.ended is not None else f"ends by {allowed}"
            raise LeaseError(f"{self!r} cannot {ending.value}: it {why}")
        places = as_slots(failed) if len(failed) else _ALL_WELL
        if len(places) and int(places.max()) >= len(self.slots):
            raise InputError(
                f"{self!r} cannot {ending.value} with place {int(places.max())} failed: "
                f"its places are 0 to {len(self) - 1}"
            )
        self.ended = ending
        self._owner.end(self, ending, places)

    def __repr__(self) -> str:
        return f"Lease({self.purpose.value}, {len(self)} slots)"


@dataclass(frozen=True)
class PoolCounts:
    """How the slots of a pool are used; ``free + cached + leased + unready == total``, always.

    ``unready`` slots exist, but their memory cannot be used yet. ``pinned`` ones are among the
    leased. ``refused_pins`` counts blocks that the bound left no room to pin.
    """

    free: int
    cached: int
    leased: int
    total: int
    evicted: int
    unready: int = 0
    pinned: int = 0
    refused_pins: int = 0


@dataclass
class TenantCounts:
    """What one tenant was counted for; its slots, and its blocks that made room, by tier."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    slots: Mapping[str, int] = field(default_factory=dict)
    evicted: Mapping[str, int] = field(default_factory=dict)
