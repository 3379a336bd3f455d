"""A disk in memory for journals: it knows what a power cut may leave of every write.

What was written since a file's last sync is cut into sectors. A crash leaves of each sector any of
the states it has been in since: as it was on the medium, or after any of the writes to it. Sectors
are whole, and know nothing of each other: writes are torn and reordered in every way there is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.tiers.disk.journal_pages import DiskFile

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

    @property
    def num_bytes(self) -> int:
        return len(self.cache)

    def read_at(self, offset: int, count: int) -> bytes:
        if self.read_fault is not None:
            self.read_fault("read", offset, count)
        return bytes(self.cache[offset : offset + count])

    def write_at(self, offset: int, data: memoryview) -> int:
        assert offset + len(data) <= len(self.cache), "the journal outgrew its file"
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


Moment = tuple[tuple[SimFile, SimFile], tuple[int, int]]


@dataclass
class SimDisk:
    """The two files of one journal, and every moment at which the power may go."""

    files: tuple[SimFile, SimFile]
    moments: list[Moment] = field(default_factory=list)
    tell: Callable[[], tuple[int, int]] | None = None
    """How much was noted, and how much of that promised."""

    @classmethod
    def blank(cls, num_bytes: int) -> SimDisk:
        return cls.holding((bytes(num_bytes), bytes(num_bytes)))

    @classmethod
    def holding(cls, images: tuple[bytes, bytes]) -> SimDisk:
        disk = cls((SimFile(images[0]), SimFile(images[1])))
        for file in disk.files:
            file.watch = disk.remember
        return disk

    def remember(self) -> None:
        if self.tell is not None:
            self.moments.append((self.now(), self.tell()))

    def now(self) -> tuple[SimFile, SimFile]:
        """A copy of both files, as they are in this moment."""
        copies = []
        for file in self.files:
            copy = SimFile(file.medium)
            copy.cache = bytearray(file.cache)
            copy.writes = list(file.writes)
            copies.append(copy)
        return copies[0], copies[1]


def images(
    files: tuple[SimFile, SimFile], rng: random.Random, most: int
) -> Iterator[tuple[bytes, bytes]]:
    """What both files may hold after a crash in this moment; each within what is unsynced of it."""
    first = list(states(files[0], rng, most))
    second = list(states(files[1], rng, most))
    pairs = list(itertools.product(first, second))
    yield from pairs if len(pairs) <= most else rng.sample(pairs, most)
