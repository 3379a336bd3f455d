"""The contract of a store's client: names to objects, many at a time, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.slot_mapping import Staging


@dataclass(frozen=True)
class Fault:
    """The store's fault: it did not answer, or not with what it should."""

    reason: str


@dataclass(frozen=True)
class Unavailable:
    """The store answered: the object is not here, or not to be had."""

    reason: str = "not here"


class Foreign(Unavailable):
    """An object is there under this name that cannot be ours: the next write replaces it."""


class NotAttempted(Unavailable):
    """The store was not asked for this one, which tells nothing of the store."""


Fetched = memoryview | Unavailable | Fault
"""What a store gave for one name."""


class StoreClient(Protocol):
    """One store's client. Objects are immutable, so the first write of a name is a good one.

    Every call answers for each name, and raises nothing but bugs. A cancelled call may still happen
    in the store, and touches nothing in this process any more.
    """

    staging: Staging
    """Memory for objects on their way; a client that needs it registered has registered it."""

    num_calls: int
    """How many calls of one kind are best under way at once."""

    blocks_per_object: int
    """How many blocks of a chain are best written as one object; rooms of the staging hold that."""

    def names_per_call(self, way: Way) -> int:
        """How many names are best given at once."""

    async def probe(self) -> Fault | None:
        """Whether objects can be written and read back."""

    async def find(self, names: Sequence[str], size: int) -> list[int | Unavailable | Fault]:
        """Which are there, and how many blocks of this size (with their seal) each has."""

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview]
    ) -> list[Fetched]:
        """Objects of one or more blocks of this size. The caller gives their memory back to the
        staging.

        They come into ``rooms`` where some are given, which are slots of the engine's (only where
        the client has the slot mapping). A cancelled call writes nothing there any more.
        """

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        """Write objects. One that is there already stays as it is, unless it is to be replaced, or
        (where the store can say so) has fewer blocks.

        ``objects`` are lent from the staging: the client gives them back once they are not read any
        more, which may be long after it was cancelled. Or they are the engine's slots: objects that
        were put after the call was cancelled are removed again. ``Unavailable``: there is no room.
        """

    async def forget(self, folder: str) -> None:
        """Remove objects whose names begin with this, as far as possible."""

    def close(self) -> None:
        """Let go of the store. Calls under way fail or are left behind."""
