"""The journal of a disk store under every crash: all prefixes, torn and reordered sectors.

A workload runs once on a disk in memory, which remembers the moment after every write and every
sync. For each moment, everything that a power cut could leave is recovered and held against the
history: nothing wrong, and nothing lost that was promised. Small workloads are tried out wholly,
larger ones at random. Every barrier is then taken away in its turn, and must be missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.sim_disk import Images, SimDisk, SimFile, images
from tests.model.journal_oracle import Content, Event, Forgot, History, Lost, Wrote, content_of

from kvferry.cache.slots import as_slots
from kvferry.tiers.disk import journal, state
from kvferry.tiers.disk import journal_pages as pages
from kvferry.tiers.disk.journal import DiskJournal, journal_bytes
from kvferry.tiers.disk.journal_pages import Shape

STORE_ID = b"s" * 16
PROOF_BYTES = 8
NUM_PLACES = 6
SMALL = Shape(PROOF_BYTES, 512)
"""A page is a sector: few states, so that all can be tried."""
WIDE = Shape(PROOF_BYTES, 1024)
"""A page is two sectors, and can be torn."""


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals that are full after a few commits."""
    monkeypatch.setattr(journal, "_MIN_SLACK_PAGES", 9)
    monkeypatch.setattr(journal, "COPY_PAGES", 2)


@dataclass
class Life:
    """A journal on a disk in memory, and the history of what it was told."""

    shape: Shape
    disk: SimDisk
    history: History = field(default_factory=History)
    serial: int = 0
    resets: int = 0
    journal: DiskJournal = field(init=False)

    @classmethod
    def new(cls, shape: Shape) -> Life:
        life = cls(shape, SimDisk.blank(journal_bytes(shape, NUM_PLACES)))
        life.begin()
        return life

    def begin(self) -> None:
        self.journal = self.disk.journal(STORE_ID, NUM_PLACES, self.shape)
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
        self.journal.record_written(places, keys(number for _, number in blocks), proofs)

    def lose(self, place: int) -> None:
        self.history.events.append(Lost(place))
        self.journal.record_lost(as_slots([place]))

    def forget(self) -> None:
        self.history.events.append(Forgot())
        self.resets += 1
        self.journal.reset(self.resets)

    def commit(self) -> None:
        noted = len(self.history.events)
        self.journal.commit()
        self.history.promised = noted
        self.disk.remember()


def recovered(shape: Shape, files: Images) -> tuple[Content, SimDisk]:
    disk = SimDisk.holding(files)
    return content_of(disk.journal(STORE_ID, NUM_PLACES, shape)), disk


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
    """Overwriting, moving, losing, forgetting, several pages in a commit, three compactions."""
    life = Life.new(shape)
    per_page = shape.per_page
    life.write((0, 1), (1, 2))
    life.commit()
    life.write((0, 3))
    life.lose(1)
    life.commit()
    life.write((2, 1), *((n % 3, 10 + n) for n in range(per_page)), (4, 5))
    life.commit()
    life.forget()
    life.write((3, 7))
    life.commit()
    life.journal.commit()
    for n in range(8):
        life.write((n % NUM_PLACES, 20 + n))
        if n % 3 == 2:
            life.lose((n + 1) % NUM_PLACES)
        life.commit()
    life.write((5, 20), (4, 21))  # known at other places
    life.commit()
    for n in range(16):
        life.write((1, 40 + n))
        life.commit()
    for n in range(12):
        life.write(*((m % NUM_PLACES, 100 * n + m) for m in range(n * per_page)), (n % 5, n))
        life.commit()
    return life


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["512", "1024"])
def test_every_crash_of_a_small_life(shape: Shape) -> None:
    life = small_life(shape)
    assert life.journal._pages.seal.generation >= 4
    assert check_all_crashes(life, 256, random.Random(1)) > 500


def random_life(life: Life, rng: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        act = rng.random()
        if act < 0.6:
            count = rng.randint(1, 2 * life.shape.per_page)
            life.write(*((rng.randrange(NUM_PLACES), rng.randrange(12)) for _ in range(count)))
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


def check_second_lives(first: Life, rng: random.Random) -> None:
    """After every crash of a life, a short second one: what was cut must not come back."""
    for files, (noted, promised) in first.disk.moments:
        for image in images(files, rng, 64):
            content, disk = recovered(first.shape, image)
            first.history.check(content, noted, promised)
            second = next_life(first, disk, content)
            second.write((0, 100))
            second.commit()
            check_all_crashes(second, 8, rng)


def test_what_was_cut_never_comes_back() -> None:
    life = Life.new(SMALL)
    life.write((1, 1))
    life.commit()
    life.write(*((n % NUM_PLACES, n) for n in range(2 * SMALL.per_page)), (0, 50), (1, 51))
    life.commit()
    check_second_lives(life, random.Random(2))


# -- damage --------------------------------------------------------------------------------------


def closed(life: Life) -> Images:
    life.journal.close()
    return life.disk.media


def with_file(files: Images, which: int, content: bytes) -> Images:
    first, second, state = (content if n == which else file for n, file in enumerate(files))
    return first, second, state


def damaged(files: Images, which: int, start: int, count: int) -> Images:
    bad = bytearray(files[which])
    bad[start : start + count] = bytes(len(bad[start : start + count]))
    return with_file(files, which, bytes(bad))


def check_damage(life: Life) -> int:
    """Any run of one to three pages, or the header, of a closed journal is gone."""
    files = closed(life)
    size, told = life.shape.page_bytes, len(life.history.events)
    num_blocks = []
    for which in (0, 1, 2):
        for start in range(0, len(files[which]), size):
            for num_pages in (1, 2, 3):
                content, _ = recovered(life.shape, damaged(files, which, start, num_pages * size))
                promised = told
                if num_pages > 1 and start // size + num_pages >= life.journal._pages.end:
                    # All of the last commits is gone, as if never written: who could tell? But
                    # what was forgotten is gone for good.
                    promised = life.history.last_forgotten
                life.history.check(content, told, promised, damaged=True)
                num_blocks.append(len(content))
    return max(num_blocks)


def test_pages_that_vanish_take_only_their_own_word_with_them() -> None:
    assert check_damage(small_life(SMALL)) > 3
    life = Life.new(SMALL)
    for n in range(7):
        life.write((n % 3, n), (3 + n % 3, 10 + n))
        life.commit()
    assert check_damage(life) > 3


@pytest.mark.parametrize("ends", ["closed", "crashed"])
def test_no_flipped_bit_is_believed(ends: str) -> None:
    rng = random.Random(3)
    life = small_life(SMALL)
    before_last = life.history.promised
    life.write((2, 70), (3, 71))
    life.commit()
    noted, promised = life.history.moment()
    if ends == "closed":
        files = closed(life)
    else:
        # Whether the last commit was torn or has gone bad cannot be told: it may be missing.
        promised = before_last
        files = life.disk.media
    least = len(recovered(SMALL, files)[0]) - SMALL.per_page
    for which in (0, 1, 2):
        for start in range(0, 8 * len(files[which]), 97):
            bit = min(start + rng.randrange(97), 8 * len(files[which]) - 1)
            bad = bytearray(files[which])
            bad[bit // 8] ^= 1 << bit % 8
            content, _ = recovered(SMALL, with_file(files, which, bytes(bad)))
            life.history.check(content, noted, promised, damaged=True)
            assert len(content) >= least


# -- without the barriers ------------------------------------------------------------------------


class Deaf(SimFile):
    """The same file, on which a sync does nothing."""

    def __init__(self, file: SimFile) -> None:
        self.__dict__ = file.__dict__

    def sync(self) -> None:
        pass


def no_sync_before_the_header(patch: pytest.MonkeyPatch) -> None:
    finish = journal.Compaction.finish

    def without(self: journal.Compaction) -> object:
        real = self.target.file
        self.target.file = Deaf(real)  # type: ignore[arg-type]
        try:
            return finish(self)
        finally:
            self.target.file = real

    patch.setattr(journal.Compaction, "finish", without)


def no_sync_of_a_commit(patch: pytest.MonkeyPatch) -> None:
    append = pages.PageWriter.append

    def without(self: pages.PageWriter, records: pages.Records) -> int:
        real = self.file
        self.file = Deaf(real)  # type: ignore[arg-type]
        try:
            return append(self, records)
        finally:
            self.file = real

    patch.setattr(pages.PageWriter, "append", without)


def no_sync_of_headers(patch: pytest.MonkeyPatch) -> None:
    for module in (journal, pages):
        for name in ("erase_header", "write_header"):
            real: Callable[..., None] | None = getattr(module, name, None)
            if real is not None:
                patch.setattr(module, name, lambda file, *rest, real=real: real(Deaf(file), *rest))


def no_digest(patch: pytest.MonkeyPatch) -> None:
    def believe(shape: Shape, seal: pages.Seal, raw: bytes, first: int) -> pages.Flags:
        some = pages.unpack(shape, raw)
        return (some["generation"] == seal.generation) & (
            some["number"] == first + np.arange(len(some))
        )

    patch.setattr(journal, "valid_pages", believe)


def no_end_of_the_old_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "erase_header", lambda file: None)


def no_new_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages, "secrets", FixedSecrets)


class FixedSecrets:
    @staticmethod
    def token_bytes(count: int) -> bytes:
        return bytes(count)


def no_erasing_of_what_was_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "write_whole", lambda file, offset, data: None)


def no_words_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "_leave_out_doubtful", lambda *args: None)


def crash_small(shape: Shape = SMALL) -> None:
    check_all_crashes(small_life(shape), 128, random.Random(4))


def damage_small() -> None:
    life = small_life(SMALL)
    check_damage(life)


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


def no_sync_of_the_number(patch: pytest.MonkeyPatch) -> None:
    real = state.raise_reset
    patch.setattr(journal, "raise_reset", lambda file, number: real(Deaf(file), number))


def no_number_before_what_follows(patch: pytest.MonkeyPatch) -> None:
    """The reset is answered, and its number is written with the next commit."""
    save = DiskJournal._save

    def late(self: DiskJournal, num_recorded: int | None = None) -> None:
        due, self._reset = self._reset, None
        save(self, num_recorded)
        self._reset = due

    patch.setattr(DiskJournal, "_save", late)


def no_number_in_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journal, "_without", lambda pages, is_left_out: pages)


def after_a_lost_header() -> None:
    """Nothing is found, and the pages of a journal that nobody knows of lie behind the new one."""
    first = Life.new(SMALL)
    for n in range(NUM_PLACES):
        first.write((n, n))
        first.commit()
    content, disk = recovered(SMALL, damaged(closed(first), 0, 0, pages.HEADER_BYTES))
    assert not content
    second = next_life(first, disk, content)
    second.write((0, 100))
    second.commit()
    check_all_crashes(second, 64, random.Random(7))


def second_lives() -> None:
    life = Life.new(SMALL)
    life.write(*((n % NUM_PLACES, n) for n in range(2 * SMALL.per_page)))
    life.commit()
    check_second_lives(life, random.Random(5))


BARRIERS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "sync before the header": (no_sync_before_the_header, crash_small),
    "sync of a commit": (no_sync_of_a_commit, crash_small),
    "sync of headers": (no_sync_of_headers, crash_small),
    "digest of a page": (no_digest, lambda: crash_small(WIDE)),
    "old header erased": (no_end_of_the_old_journal, damage_small),
    "sync of the reset number": (no_sync_of_the_number, forget_and_crash),
    "reset number before what follows": (no_number_before_what_follows, forget_and_crash),
    "reset number of a page": (no_number_in_pages, forget_and_crash),
    "new salt": (no_new_salt, after_a_lost_header),
    "cut is erased": (no_erasing_of_what_was_cut, second_lives),
    "places repeated": (no_words_of_the_neighbour, damage_small),
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
