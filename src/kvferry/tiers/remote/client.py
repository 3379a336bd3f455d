"""The contract of a store's client, and the memory of the child process that it works on.

::

    room   | the block's bytes | seal |        begins on a page
           └── an object of the store ─┘

A call to a store that was given up may still write into its room, at any later time. So a room is
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
    """Room for ``count`` objects in one piece. Owns it; lends it out object by object.

    One piece, so that a client that registers memory can register it whole.
    """

    def __init__(self, object_bytes: int, count: int) -> None:
        self.pitch = -(-object_bytes // _PAGE) * _PAGE
        self.num_bytes = self.pitch * count
        mapping = mmap.mmap(-1, self.num_bytes)
        with suppress(OSError):  # pages of 2 MiB where available: every copy touches all of them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(mapping)
        self.address = address_of(memory)
        self._rooms = [
            memory[at : at + object_bytes] for at in range(0, self.num_bytes, self.pitch)
        ]
        self._free = list(range(count))

    def lend(self, count: int) -> list[memoryview]:
        """So many rooms, or none where there are not so many."""
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
    """Never show this, whatever a server writes back."""
    _secrets.add(secret)


def shown(words: str) -> str:
    """A server's words for people: one line, printable, without what may be a credential."""
    text = "".join(each if each.isprintable() else " " for each in words[: 100 * _MOST_WORDS])
    for secret in _secrets:
        text = text.replace(secret, "(hidden)")
    text = _LONG_WORD.sub("(hidden)", _HEADER.sub(r"\1\2 (hidden)", text))
    return " ".join(text.split())[:_MOST_WORDS]


@dataclass(frozen=True)
class Fault:
    """The store's fault: it did not answer, or not with what it should. Fit to be shown."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", shown(self.reason))


@dataclass(frozen=True)
class Unavailable:
    """The store answered: the object is not here, or not to be had."""

    reason: str = "holds nothing"


class Foreign(Unavailable):
    """An object is there under this name that cannot be ours: the next write replaces it."""


class NotAttempted(Unavailable):
    """The store was not asked for this one, which tells nothing of the store."""


Fetched = memoryview | Unavailable | Fault
"""What a store gave for one name."""


class StoreClient(Protocol):
    """One store's client. All objects of one name have the same block.

    Every call answers for each name, and raises nothing but bugs. A cancelled call may still happen
    in the store, and touches nothing in this process any more.
    """

    staging: Staging
    """Memory for objects on their way; a client that needs it registered has registered it."""

    num_calls: int
    """How many calls of one kind are best under way at once."""

    def names_per_call(self, way: Way) -> int:
        """How many names are best given at once."""

    async def probe(self, way: Way) -> Fault | None:
        """Whether the store answers reads, or (WRITE) takes an object and gives it back."""

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        """Which are there with this size: None for those that are."""

    async def get(self, names: Sequence[str], size: int) -> list[Fetched]:
        """Objects of this size. The caller gives their memory back to the staging."""

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        """Write objects. One that is there may stay as it is, unless it is to be replaced.

        ``objects`` are lent from the staging: the client gives them back once they are not read any
        more, which may be long after it was cancelled.
        """

    async def tend(self, log: Log) -> None:
        """Do what the store needs beside the calls, until this is cancelled."""

    async def forget(self, folder: str) -> None:
        """Remove objects whose names begin with this, as far as possible."""

    def close(self) -> None:
        """Let go of the store. Calls under way fail or are left behind."""
