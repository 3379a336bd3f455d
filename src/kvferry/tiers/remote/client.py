"""The contract of a store's client, and the memory of the child process that it works on.

::

    slot   | the block's bytes        | seal | ...    begins on a page
           └── one object of the store ──────┘

A call to a store that was given up may still write, at any later time. So its slots are detached
before their batch ends: other pages take their place here, and late bytes fall into those. The
kernel does that for all threads at once; when it returns, no thread can reach the engine's memory
there any more, not even in the middle of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.tiers.contract import Way

_PAGE = 4096
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address_of(memory: memoryview) -> int:
    """Where a memory begins."""
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


class SlotMapping:
    """Owns the mapping of the engine's host slots, and which of them are detached. One thread."""

    def __init__(self, fd: int, there: int, num_bytes: int, pitch: int) -> None:
        """Map ``fd``, the engine's memory from the engine's address ``there`` on."""
        self._fd = fd
        self._there = there
        self._pitch = pitch
        self.num_bytes = num_bytes
        self._memory = memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED))
        self.address = address_of(self._memory)
        self._detached: set[int] = set()
        self._is_mapped = np.zeros(num_bytes // pitch, dtype=bool)

    @classmethod
    def of(cls, file: Mapping[str, int] | None) -> SlotMapping | None:
        """From a ``HostFile`` as plain data; None without one."""
        if file is None:
            return None
        return cls(file["fd"], file["address"], file["num_bytes"], file["pitch"])

    def rooms(self, there: npt.NDArray[np.int64], size: int) -> list[memoryview]:
        """The slots at these addresses of the engine's, as rooms of this size.

        None at all where any of them is no slot, has no room for it, or is detached.
        """
        slots, odd = np.divmod(there - self._there, self._pitch)
        whole = size <= self._pitch and not odd.any() and slots.min() >= 0
        if not whole or slots.max() >= self.num_bytes // self._pitch:
            return []
        if self._detached and not self._detached.isdisjoint(slots.tolist()):
            return []
        return [self._memory[at : at + size] for at in (slots * self._pitch).tolist()]

    def map_pages(self, addresses: Sequence[int]) -> None:
        """Bring the slots here into this process's page table, where they are not yet. Any thread.

        Else each page is a fault when it is first copied: 0.37 s for a GiB instead of 0.09.
        """
        slots = (np.array(addresses) - self.address) // self._pitch
        for slot in slots[~self._is_mapped[slots]].tolist():
            start = self.address + slot * self._pitch
            _libc.madvise(start, self._pitch, _MADV_POPULATE_READ)  # fails before Linux 5.14
            self._is_mapped[slot] = True

    def holds(self, room: memoryview) -> bool:
        """Whether this memory is a slot."""
        return 0 <= address_of(room) - self.address < self.num_bytes

    def is_detached(self, room: memoryview) -> bool:
        """Whether this slot is detached."""
        return bool(self._detached) and self._slot(room) in self._detached

    def detach(self, room: memoryview) -> None:
        """Nothing here reaches this slot of the engine's any more, until it is reattached."""
        self._replace(room, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._detached.add(self._slot(room))

    def reattach(self, room: memoryview) -> None:
        """Nothing writes there any more, for certain: the slot may be used again."""
        if self.is_detached(room):
            self._replace(room, self._fd, mmap.MAP_SHARED)
            self._detached.remove(self._slot(room))

    def _slot(self, room: memoryview) -> int:
        return (address_of(room) - self.address) // self._pitch

    def _replace(self, room: memoryview, fd: int, flags: int) -> None:
        start = self._slot(room) * self._pitch
        address = self.address + start
        offset = start if fd >= 0 else 0
        got = _libc.mmap(address, self._pitch, _READ_WRITE, flags | _FIXED, fd, offset)
        if got != address:
            os._exit(1)  # the engine takes the slot back when this process is gone, not before
        self._is_mapped[start // self._pitch] = False


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

    def names_per_call(self, way: Way) -> int:
        """How many names are best given at once."""

    async def probe(self, way: Way) -> Fault | None:
        """Whether the store answers reads, or (WRITE) takes a small object and gives it back."""

    async def find(self, names: Sequence[str], size: int) -> list[Unavailable | Fault | None]:
        """Which are there with this size: None for those that are."""

    async def get(
        self, names: Sequence[str], size: int, rooms: Sequence[memoryview]
    ) -> list[Fetched]:
        """Objects of this size. The caller gives their memory back to the staging.

        They come into ``rooms`` where some are given, which are slots of the engine's (only where
        the client has the slot mapping). A cancelled call writes nothing there any more.
        """

    async def put(
        self, names: Sequence[str], objects: Sequence[memoryview], *, replace: Sequence[bool]
    ) -> list[Unavailable | Fault | None]:
        """Write objects. One that is there already stays as it is, unless it is to be replaced.

        ``objects`` are lent from the staging: the client gives them back once they are not read any
        more, which may be long after it was cancelled. Or they are the engine's slots: objects that
        were put after the call was cancelled are removed again.
        """

    async def tend(self, log: Log) -> None:
        """Do what the store needs beside the calls, until this is cancelled."""

    async def forget(self, folder: str) -> None:
        """Remove objects whose names begin with this, as far as possible."""

    def close(self) -> None:
        """Let go of the store. Calls under way fail or are left behind."""
