"""The index of a disk store under every crash: all prefixes, torn and reordered sectors.

A workload runs once on a disk in memory, which remembers the moment after every write and every
sync. For each moment, everything that a power cut could leave is recovered and held against the
history: nothing wrong, and nothing lost that was promised. Small workloads are tried out wholly,
larger ones at random. Every barrier is then taken away in its turn, and must be missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.sim_disk import Images, SimDisk, SimFile, images
from tests.model.index_oracle import Content, Event, Forgot, History, Lost, Wrote, content_of

from kvferry.cache.slots import as_slots
from kvferry.tiers.disk import index as module
from kvferry.tiers.disk import state
from kvferry.tiers.disk.index import DiskIndex, PageTable, Shape

STORE_ID = b"s" * 16
PROOF_BYTES = 8
NUM_PLACES = 24
SMALL = Shape(PROOF_BYTES, 512)
"""A page is a sector: few states, so that all can be tried."""
WIDE = Shape(PROOF_BYTES, 1024)
"""A page is two sectors, and can be torn."""


@dataclass
class Life:
    """An index on a disk in memory, and the history of what it was told."""

    shape: Shape
    disk: SimDisk
    history: History = field(default_factory=History)
    serial: int = 0
    resets: int = 0
    index: DiskIndex = field(init=False)

    @classmethod
    def new(cls, shape: Shape) -> Life:
        life = cls(shape, SimDisk.blank(shape.file_bytes(NUM_PLACES)))
        life.begin()
        return life

    def begin(self) -> None:
        self.index = self.disk.index(STORE_ID, NUM_PLACES, self.shape)
        self.disk.tell = self.history.moment

    def write(self, *blocks: tuple[int, int]) -> None:
        """Places and the numbers of their keys."""
        rows = []
        for place, number in blocks:
            self.serial += 1
            rows.append(self.serial.to_bytes(PROOF_BYTES, "little"))
            (key,) = keys([number])
            self.history.events.append(Wrote(place, key, rows[-1]))
        proofs = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, PROOF_BYTES)
        places = as_slots([place for place, _ in blocks])
        self.index.record_written(places, keys(number for _, number in blocks), proofs)

    def lose(self, place: int) -> None:
        self.history.events.append(Lost(place))
        self.index.record_lost(as_slots([place]))

    def forget(self) -> None:
        self.history.events.append(Forgot())
        self.resets += 1
        self.index.reset(self.resets)

    def commit(self) -> None:
        noted = len(self.history.events)
        self.index.commit()
        self.history.promised = noted
        self.disk.remember()


def recovered(shape: Shape, files: Images) -> tuple[Content, SimDisk]:
    disk = SimDisk.holding(files)
    return content_of(disk.index(STORE_ID, NUM_PLACES, shape)), disk


def check_all_crashes(life: Life, most: int, rng: random.Random) -> int:
    """Recover from everything that any moment may leave; how many that were."""
    count = 0
    seen = set()
    for files, (noted, promised) in life.disk.moments:
        for image in images(files, rng, most):
            if (image, noted, promised) in seen:
                continue
            seen.add((image, noted, promised))
            content, disk = recovered(life.shape, image)
            life.history.check(content, noted, promised)
            # Recovery itself may be cut short, and is as good as done if it was not.
            again, _ = recovered(life.shape, disk.media)
            assert again == content
            count += 1
    return count


def small_life(shape: Shape) -> Life:
    """Overwriting, moving, losing, forgetting, one page and all of them in a commit."""
    life = Life.new(shape)
    life.write((0, 1), (1, 2))
    life.commit()
    life.write((0, 3))
    life.lose(1)
    life.commit()
    life.write((2, 1), *((n, 10 + n) for n in range(4, NUM_PLACES)), (4, 5))
    life.commit()
    life.write(*((n, 40 + n) for n in range(0, NUM_PLACES, 5)))
    life.commit()
    life.forget()
    life.write((3, 7))
    life.commit()
    life.index.commit()
    for n in range(8):
        life.write((3 * n, 20 + n), (5 * n % NUM_PLACES, 30 + n))
        if n % 3 == 2:
            life.lose((n + 1) % NUM_PLACES)
        life.commit()
    life.write((5, 20), (4, 21))  # known at other places
    life.commit()
    for n in range(6):
        life.write(*((m, 100 * n + m) for m in range(n, NUM_PLACES, 4)), (n % 5, n))
        life.commit()
    return life


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["512", "1024"])
def test_every_crash_of_a_small_life(shape: Shape) -> None:
    assert check_all_crashes(small_life(shape), 256, random.Random(1)) > 100


def random_life(life: Life, rng: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        act = rng.random()
        if act < 0.6:
            count = rng.randint(1, 2 * life.shape.per_page)
            life.write(*((rng.randrange(NUM_PLACES), rng.randrange(40)) for _ in range(count)))
        elif act < 0.7:
            life.lose(rng.randrange(NUM_PLACES))
        elif act < 0.74:
            life.forget()
        else:
            life.commit()


@pytest.mark.parametrize("seed", range(10))
def test_random_lives_one_after_the_other(seed: int) -> None:
    """Each begins from what a crash left of the one before."""
    rng = random.Random(seed)
    shape = rng.choice([SMALL, WIDE, Shape(PROOF_BYTES)])
    life = Life.new(shape)
    for _ in range(8):
        random_life(life, rng, 12)
        life.disk.remember()
        moments = rng.sample(life.disk.moments, min(6, len(life.disk.moments)))
        life.disk.moments = moments
        check_all_crashes(life, 24, rng)
        files, (noted, promised) = rng.choice(moments)
        content, disk = recovered(shape, next(images(files, rng, 3)))
        life.history.check(content, noted, promised)
        life = next_life(life, disk, content)


def next_life(life: Life, disk: SimDisk, content: Content) -> Life:
    """A life on what was recovered: from now on all of that is promised."""
    after = Life(life.shape, SimDisk.holding(disk.media))
    events: list[Event] = [Wrote(place, *what) for place, what in content.items()]
    after.history = History(events, len(events))
    after.serial, after.resets = life.serial, life.resets
    after.begin()
    return after


# -- damage --------------------------------------------------------------------------------------


def closed(life: Life) -> Images:
    life.index.close()
    return life.disk.media


def with_file(files: Images, which: int, content: bytes) -> Images:
    return (content, files[1]) if which == 0 else (files[0], content)


def check_damage(life: Life) -> None:
    """Any run of one to three copies of pages, or of sectors of the state, is gone.

    What was forgotten does not come back, and all other pages say the same.
    """
    files = closed(life)
    told, whole = len(life.history.events), recovered(life.shape, files)[0]
    for which, size in ((0, life.shape.page_bytes), (1, 512)):
        for start in range(0, len(files[which]), size):
            for num_pages in (1, 2, 3):
                bad = bytearray(files[which])
                end = min(len(bad), start + num_pages * size)
                bad[start:end] = bytes(end - start)
                content, _ = recovered(life.shape, with_file(files, which, bytes(bad)))
                life.history.check(content, told, told, damaged=True)
                if which:
                    assert content in (whole, {})
                    continue
                first, last = start // (2 * size), (end - 1) // (2 * size)
                touched = range(first * life.shape.per_page, (last + 1) * life.shape.per_page)
                for place in set(range(NUM_PLACES)) - set(touched):
                    assert content.get(place) == whole.get(place)


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["512", "1024"])
def test_pages_that_vanish_take_only_their_own_word_with_them(shape: Shape) -> None:
    check_damage(small_life(shape))


def test_no_flipped_bit_is_believed() -> None:
    rng = random.Random(3)
    life = small_life(SMALL)
    files = closed(life)
    told, whole = len(life.history.events), recovered(SMALL, files)[0]
    for which in (0, 1):
        for start in range(0, 8 * len(files[which]), 97):
            bit = min(start + rng.randrange(97), 8 * len(files[which]) - 1)
            bad = bytearray(files[which])
            bad[bit // 8] ^= 1 << bit % 8
            content, _ = recovered(SMALL, with_file(files, which, bytes(bad)))
            life.history.check(content, told, told, damaged=True)
            assert len(content) >= len(whole) - SMALL.per_page


# -- without the barriers ------------------------------------------------------------------------


class Deaf(SimFile):
    """The same file, on which a sync does nothing."""

    def __init__(self, file: SimFile) -> None:
        self.__dict__ = file.__dict__

    def sync(self) -> None:
        pass


def no_sync_of_a_commit(patch: pytest.MonkeyPatch) -> None:
    write = DiskIndex._write

    def without(self: DiskIndex, *told: Any) -> None:
        real = self._table.file
        self._table.file = Deaf(real)  # type: ignore[arg-type]
        try:
            write(self, *told)
        finally:
            self._table.file = real

    patch.setattr(DiskIndex, "_write", without)


def no_second_copy(patch: pytest.MonkeyPatch) -> None:
    """A page is written over itself."""
    write = PageTable.write
    patch.setattr(
        PageTable,
        "write",
        lambda self, numbers, copies, pages: write(self, numbers, copies * 0, pages),
    )


def no_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageTable, "_seal", lambda self, page: bytes(16))


def with_reset(patch: pytest.MonkeyPatch, reset: int) -> None:
    """All pages seem to have this reset number."""
    read = PageTable.read

    def as_ours(table: PageTable, numbers: Any) -> Any:
        pages, commits = read(table, numbers)
        pages["reset"] = reset
        return pages, commits

    patch.setattr(PageTable, "read", as_ours)


def no_number_in_pages(patch: pytest.MonkeyPatch) -> None:
    recover = PageTable.recover

    def believe(self: PageTable, reset: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            with_reset(inner, reset)
            return recover(self, reset)

    patch.setattr(PageTable, "recover", believe)


def no_end_of_older_records(patch: pytest.MonkeyPatch) -> None:
    """A page that is written after a reset keeps what it said before."""
    write = DiskIndex._write_pages

    def without(self: DiskIndex, *told: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            with_reset(inner, self._page_reset)
            write(self, *told)

    patch.setattr(DiskIndex, "_write_pages", without)


def no_sync_of_the_number(patch: pytest.MonkeyPatch) -> None:
    real = state.raise_reset
    patch.setattr(module, "raise_reset", lambda file, number: real(Deaf(file), number))


def no_number_before_what_follows(patch: pytest.MonkeyPatch) -> None:
    """The reset is answered, and its number is written with the next commit."""
    commit = DiskIndex.commit

    def late(self: DiskIndex, num_recorded: int | None = None) -> None:
        due, self._reset_due = self._reset_due, None
        commit(self, num_recorded)
        self._reset_due = due

    patch.setattr(DiskIndex, "commit", late)


def crash_small(shape: Shape = SMALL) -> None:
    check_all_crashes(small_life(shape), 128, random.Random(4))


def forget_and_crash() -> None:
    life = Life.new(SMALL)
    life.write((1, 1))
    life.commit()
    life.forget()
    life.commit()
    life.write((2, 2))
    life.commit()
    life.forget()
    life.write((3, 3))
    life.commit()
    check_all_crashes(life, 128, random.Random(6))


BARRIERS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "sync of a commit": (no_sync_of_a_commit, crash_small),
    "digest of a page": (no_digest, lambda: crash_small(WIDE)),
    "second copy of a page": (no_second_copy, lambda: crash_small(WIDE)),
    "sync of the reset number": (no_sync_of_the_number, forget_and_crash),
    "reset number before what follows": (no_number_before_what_follows, forget_and_crash),
    "reset number of a page": (no_number_in_pages, forget_and_crash),
    "end of older records": (no_end_of_older_records, forget_and_crash),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_without_its_barrier_a_crash_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very checks above, with one thing taken away: they must fail, or they prove nothing."""
    take_away, run = BARRIERS[name]
    run()
    with monkeypatch.context() as patch:
        take_away(patch)
        with pytest.raises(AssertionError):
            run()
