"""The contract of a store's client, and the staging memory of its child process.

::

    room   | the block's bytes | seal |        begins on a page
           └── an object of the store ─┘

A call to a store that was cancelled may still write into its room, at any later time. So a room is
lent again only once its call has ended.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry.tiers.contract import Way

_PAGE = 4096


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


class Staging:
    """Memory for ``count`` objects in one mapping. Owns it; lends rooms of one object each.

    One mapping, so that a client that registers memory can register it whole.
    """

    def __init__(self, object_bytes: int, count: int) -> None:
        self.pitch = -(-object_bytes // _PAGE) * _PAGE
        self.num_bytes = self.pitch * count
        mapping = mmap.mmap(-1, self.num_bytes)
        with suppress(OSError):  # pages of 2 MiB if available: every copy touches all of them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(mapping)
        self.address = address_of(memory)
        self._rooms = [
            memory[at : at + object_bytes] for at in range(0, self.num_bytes, self.pitch)
        ]
        self._free = list(range(count))

    def lend(self, count: int) -> list[memoryview]:
        """Return ``count`` rooms, or none if fewer are free."""
        if count > len(self._free):
            return []
        return [self._rooms[self._free.pop()] for _ in range(count)]

    def give_back(self, *rooms: memoryview) -> None:
        """Take rooms back; memory that was never lent is ignored."""
        offsets = (address_of(each) - self.address for each in rooms)
        self._free += [at // self.pitch for at in offsets if 0 <= at < self.num_bytes]


Log = Callable[[int, str], None]
"""Takes a level of ``logging`` and a line for the engine's log."""

READ_ONLY = "remote_mode is read-only"
_MOST_WORDS = 300
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-amz-[\w-]*token)\s*[:=].*"
    r"|\b(credential|signature|[\w-]*(?:token|key|secret))\s*=\s*\S*"
)
_LONG_WORD = re.compile(r"[\w+/=%-]{40,}")  # a key, a token, a signature, an object's name
_secrets: set[str] = set()


def hide(secret: str) -> None:
    """Never show this secret, even if a server's reply contains it."""
    _secrets.add(secret)


def shown(words: str) -> str:
    """Return a server's words for people: one printable line without possible credentials."""
    text = "".join(each if each.isprintable() else " " for each in words[: 100 * _MOST_WORDS])
    for secret in _secrets:
        text = text.replace(secret, "(hidden)")
    text = _LONG_WORD.sub("(hidden)", _HEADER.sub(r"\1\2 (hidden)", text))
    return " ".join(text.split())[:_MOST_WORDS]


@dataclass(frozen=True)
class Fault:
    """A fault of the store: no answer, or a wrong one. ``reason`` may be shown to people."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", shown(self.reason))


@dataclass(frozen=True)
class Unavailable:
    """An answer of the store that an object is missing or cannot be had."""

    reason: str = "holds nothing"


class Foreign(Unavailable):
    """An object has this name and cannot be ours: the next write replaces it."""


class NotAttempted(Unavailable):
    """The store was not asked for this object, so nothing is learned about the store."""


Fetched = memoryview | Unavailable | Fault
"""The result of reading one name."""


class StoreClient(Protocol):
    """The client of one store. All objects of one name have the same block.

    Every call returns a result for each name, and raises only on bugs. A cancelled call may still
    take effect in the store, and touches no memory here except its staging rooms.
    """

    staging: Staging
    """Memory for objects in transit; a client that needs it registered registers it."""

    num_calls: int
    """The best number of calls of one kind in flight."""

    def names_per_call(self, way: Way) -> int:
        """Return the best number of names for one call."""

    async def probe(self, way: Way) -> Fault | None:
        """Check that the store answers reads, or (WRITE) takes an object and returns it."""

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        """Return None for each object that exists with this size, else the reason."""

    async def get(self, names: Sequence[str], size: int) -> list[Fetched]:
        """Return objects of this size. The caller gives their memory back to the staging."""

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        """Write objects. An existing one may stay as it is, unless ``replace`` is set for it.

        ``objects`` are lent from the staging: the client gives them back once they are not read any
        more, which may be long after it was cancelled.
        """

    async def run_background(self, log: Log) -> None:
        """Do the store's background work until this is cancelled."""

    async def forget(self, folder: str) -> None:
        """Remove objects whose names begin with ``folder``, as far as possible."""

    def close(self) -> None:
        """Close the connection. Calls in flight fail or are abandoned."""
