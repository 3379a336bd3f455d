"""A disk in memory for an index: it knows what a power cut may leave of every write.

What was written since a file's last sync is cut into sectors. A crash leaves of each sector any of
the states it has been in since: as it was on the medium, or after any of the writes to it. Sectors
are whole, and know nothing of each other: writes are torn and reordered in every way there is.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.tiers.disk.files import DiskFile
from kvferry.tiers.disk.index import DiskIndex, Shape
from kvferry.tiers.disk.state import write_reset

SECTOR = 512

Fault = Callable[[str, int, int], int | None]
"""Told "write" or "sync", where and how much; may raise OSError, or say how much is taken."""


class SimFile(DiskFile):
    """A file whose writes reach the medium at a sync, or by chance."""

    def __init__(self, content: bytes, watch: Callable[[], None] = lambda: None) -> None:
        self.medium = bytes(content)
        self.cache = bytearray(content)
        self.writes: list[tuple[int, bytes]] = []
        self.watch = watch
        self.fault: Fault | None = None
        self.read_fault: Fault | None = None
        self.rng = random.Random(1)  # decides what a failed sync leaves

    def read_at(self, offset: int, count: int) -> bytes:
        if self.read_fault is not None:
            self.read_fault("read", offset, count)
        return bytes(self.cache[offset : offset + count])

    def write_at(self, offset: int, data: memoryview) -> int:
        assert offset + len(data) <= len(self.cache), "the index outgrew its file"
        taken = len(data)
        if self.fault is not None:
            told = self.fault("write", offset, taken)
            taken = taken if told is None else told
        self.cache[offset : offset + taken] = data[:taken]
        self.writes.append((offset, bytes(data[:taken])))
        self.watch()
        return taken

    def sync(self) -> None:
        if self.fault is not None:
            try:
                self.fault("sync", 0, 0)
            except OSError:
                # As kernels do: some of it is on the medium, all of it can be read, and none of it
                # will be written any more.
                self.medium = self.rng.choice(list(states(self, self.rng, 8)))
                self.writes.clear()
                raise
        medium = bytearray(self.medium)
        for offset, data in self.writes:
            medium[offset : offset + len(data)] = data
        self.medium = bytes(medium)
        self.writes.clear()
        self.watch()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


def states(file: SimFile, rng: random.Random, most: int) -> Iterator[bytes]:
    """What the medium may hold after a crash now: all of it if that is ``most`` or fewer."""
    sectors: dict[int, list[bytes]] = {}
    cache = bytearray(file.medium)
    for offset, data in file.writes:
        cache[offset : offset + len(data)] = data
        for start in range(offset // SECTOR * SECTOR, offset + len(data), SECTOR):
            known = sectors.setdefault(start, [file.medium[start : start + SECTOR]])
            now = bytes(cache[start : start + SECTOR])
            if now not in known:
                known.append(now)
    count = 1
    for known in sectors.values():
        count *= len(known)
    starts = list(sectors)
    picks: Iterator[tuple[bytes, ...]]
    if count <= most:
        picks = itertools.product(*sectors.values())
    else:
        none = tuple(known[0] for known in sectors.values())
        everything = tuple(known[-1] for known in sectors.values())
        some = (tuple(rng.choice(known) for known in sectors.values()) for _ in range(most - 2))
        picks = itertools.chain((none, everything), some)
    for pick in picks:
        image = bytearray(file.medium)
        for start, sector in zip(starts, pick, strict=True):
            image[start : start + SECTOR] = sector
        yield bytes(image)


Files = tuple[SimFile, SimFile]
Images = tuple[bytes, bytes]
Moment = tuple[Files, tuple[int, int]]


@dataclass
class SimDisk:
    """The file of an index, its store's state, and every moment at which the power may go."""

    files: Files
    moments: list[Moment] = field(default_factory=list)
    tell: Callable[[], tuple[int, int]] | None = None
    """How much was noted, and how much of that promised."""

    @classmethod
    def blank(cls, num_bytes: int) -> SimDisk:
        state = SimFile(bytes(4 * SECTOR))
        write_reset(state, 0)
        return cls.holding((bytes(num_bytes), state.medium))

    @classmethod
    def holding(cls, images: Images) -> SimDisk:
        index, state = map(SimFile, images)
        disk = cls((index, state))
        for file in disk.files:
            file.watch = disk.remember
        return disk

    def remember(self) -> None:
        if self.tell is not None:
            self.moments.append((self.now(), self.tell()))

    def index(self, store_id: bytes, num_places: int, shape: Shape) -> DiskIndex:
        """Open the index that is here."""
        return DiskIndex(*self.files, store_id, num_places, shape)

    @property
    def media(self) -> Images:
        """What is on the medium."""
        index, state = self.files
        return index.medium, state.medium

    def now(self) -> Files:
        """A copy of all files, as they are in this moment."""
        copies = []
        for file in self.files:
            copy = SimFile(file.medium)
            copy.cache = bytearray(file.cache)
            copy.writes = list(file.writes)
            copies.append(copy)
        index, state = copies
        return index, state


def images(files: Files, rng: random.Random, most: int) -> Iterator[Images]:
    """What the files may hold after a crash in this moment; each within what is unsynced of it."""
    index, state = (states(file, rng, most) for file in files)
    every = list(itertools.product(index, state))
    yield from every if len(every) <= most else rng.sample(every, most)
