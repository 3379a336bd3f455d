"""What the process of a store needs of an engine: names to objects, many at a time, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.contract import Way
from kvferry.tiers.remote.window import Staging


@dataclass(frozen=True)
class Fault:
    """The store's fault: it did not answer, or not with what it should."""

    reason: str


@dataclass(frozen=True)
class NotThere:
    """It answered: this is not here, or not to be had."""

    reason: str = "not here"


class NotOurs(NotThere):
    """Something is there under this name that cannot be ours: the next write replaces it."""


class NotAsked(NotThere):
    """Nobody asked it for this one: which tells nothing of the store."""


Stored = memoryview | NotThere | Fault
"""What a store gave for one name."""


class StoreClient(Protocol):
    """One engine's client. Objects are immutable, so whoever wrote a name first wrote it well.

    Every call answers for each name, and raises nothing but bugs. What is cancelled may still
    happen in the store, and touches nothing here any more.
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

    async def find(self, names: Sequence[str], size: int) -> list[int | NotThere | Fault]:
        """Which are there, and how many blocks each has that are of this size with their seal."""

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview]
    ) -> list[Stored]:
        """Objects of one or more blocks of this size. Whoever takes one gives its memory back to
        the staging.

        They come into ``rooms``, which are slots of the engine's, where some are given (that is:
        where the client has the engine's window). What is cancelled writes nothing there any more.
        """

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[NotThere | Fault | None]:
        """Write them; one that is there already stays as it is, unless it is to be replaced, or
        (where the store can say so) has fewer blocks.

        ``objects`` are lent from the staging: the client gives them back once nobody reads them,
        which may be long after it was cancelled. Or they are the engine's slots: what was put of
        them after the call was cancelled is removed again. ``NotThere``: it has no room for it.
        """

    async def forget(self, folder: str) -> None:
        """Remove what begins with this, as far as it can be."""

    def close(self) -> None:
        """Let go of the store. Calls under way fail or are left behind."""
