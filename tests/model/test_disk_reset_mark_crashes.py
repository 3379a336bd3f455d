"""A mark to forget under every crash: once it is on the medium nothing from before comes back.

A store's journals and its mark lie on a disk in memory that remembers every moment; whatever a
power cut may leave of them is laid into a real folder, and opened as a server would. The order of
events is that of an engine that has not heard, and of the next one, which opens the store: marked,
written to, forgotten and settled, written to.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.sim_disk import SimFile, states
from tests.model.test_disk_crashes import Deaf
from tests.unit.test_disk_store import BOUND, identity

from kvferry.cache.leases import as_slots
from kvferry.tiers.disk import journal
from kvferry.tiers.disk import superblock as epoch
from kvferry.tiers.disk import superblock as forget_mark
from kvferry.tiers.disk.journal import FILE_NAMES, DiskJournal
from kvferry.tiers.disk.journal_pages import Shape
from kvferry.tiers.disk.store import Store

OLD, RACED, NEW = 1, 2, 3
NUMBER = 77
NAMES = (*FILE_NAMES, forget_mark.RESET_MARK_FILE_NAME)


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MIN_SLACK_PAGES", 9)


@dataclass
class Moment:
    """What the files may hold, and what was promised by then."""

    files: list[SimFile]
    epochs: tuple[int, ...]
    promised: frozenset[int]
    is_forgotten: bool


@dataclass
class MarkedLife:
    """One engine's store, and whoever marks it from outside."""

    folder: Path
    moments: list[Moment] = field(default_factory=list)
    promised: frozenset[int] = frozenset()
    is_forgotten: bool = False
    epochs: tuple[int, ...] = (0,)
    files: list[SimFile] = field(init=False)

    def __post_init__(self) -> None:
        with Store.open(self.folder, identity(), BOUND) as store:
            self.store_id, self.num_places = store.store_id, store.num_places
            self.path = store.folder
        self.files = [SimFile((self.path / name).read_bytes(), self.remember) for name in NAMES]
        self.journal = DiskJournal(
            (self.files[0], self.files[1]), self.store_id, self.num_places, Shape(16)
        )

    def remember(self) -> None:
        copies = []
        for file in self.files:
            copy = SimFile(file.medium)
            copy.writes = list(file.writes)
            copies.append(copy)
        self.moments.append(Moment(copies, self.epochs, self.promised, self.is_forgotten))

    def write(self, number: int) -> None:
        proofs = np.full((1, 16), number, dtype=np.uint8)
        self.journal.record_written(as_slots([number]), keys([number]), proofs)
        self.journal.commit()
        if not self.is_forgotten or number == NEW:
            self.promised |= {number}
        self.remember()

    def mark(self) -> None:
        self.promised = frozenset()  # from here on they may be gone
        forget_mark.write_mark(self.files[2], NUMBER)
        self.is_forgotten = True
        self.remember()

    def obey(self) -> None:
        self.journal.forget()
        self.journal.commit()

    def settle(self) -> None:
        """A file that is replaced: the old one or the new one, until the folder is synced."""
        self.epochs = (*self.epochs, NUMBER)
        self.remember()
        self.epochs = (NUMBER,)
        self.remember()


def live(folder: Path, *events: str) -> MarkedLife:
    life = MarkedLife(folder)
    verbs: dict[str, Callable[[], None]] = {
        "old": lambda: life.write(OLD),
        "mark": life.mark,
        "raced": lambda: life.write(RACED),
        "obey": life.obey,
        "settle": life.settle,
        "new": lambda: life.write(NEW),
    }
    for event in events:
        verbs[event]()
    return life


RIGHT = ("old", "mark", "raced", "obey", "settle", "new")


def found(life: MarkedLife) -> set[int]:
    with Store.open(life.folder, identity(), BOUND) as store:
        return {place for _, places, _ in store.journal.pieces() for place in places.tolist()}


def check_all_crashes(life: MarkedLife, most: int = 512) -> int:
    """Open what any moment may leave; how many that were."""
    rng, seen = random.Random(1), set()
    for moment in life.moments:
        every = [list(states(file, rng, most)) for file in moment.files]
        images = list(itertools.product(itertools.product(*every), moment.epochs))
        assert len(images) < most, "all of them, not a sample"
        for image in images:
            what = (image, moment.promised, moment.is_forgotten)
            if what in seen:
                continue
            seen.add(what)
            contents, number = image
            for name, content in zip(NAMES, contents, strict=True):
                (life.path / name).write_bytes(content)
            (life.path / epoch.EPOCH_FILE_NAME).unlink(missing_ok=True)
            if number:
                epoch.write_epoch(life.path, number)
            here = found(life)
            assert moment.promised <= here, f"{moment.promised} was promised, {here} is here"
            assert here <= {OLD, RACED, NEW}
            if moment.is_forgotten:
                assert not here & {OLD, RACED}, f"forgotten, and here again: {here}"
            assert found(life) == here, "and it stays so"
    return len(seen)


def test_every_crash_around_a_mark(tmp_path: Path) -> None:
    life = live(tmp_path, *RIGHT)
    assert check_all_crashes(life) > 10


def test_a_mark_nobody_has_heard_of_holds_for_whatever_follows(tmp_path: Path) -> None:
    check_all_crashes(live(tmp_path, "old", "mark", "raced"))


def no_sync(patch: pytest.MonkeyPatch) -> None:
    real = forget_mark.write_mark
    patch.setattr(forget_mark, "write_mark", lambda file, number: real(Deaf(file), number))


def no_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forget_mark, "is_marked", lambda folder: False)


@pytest.mark.parametrize("take_away", [no_sync, no_look])
def test_without_its_barrier_a_mark_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take_away: Callable[..., None]
) -> None:
    take_away(monkeypatch)
    with pytest.raises(AssertionError, match="forgotten, and here again"):
        check_all_crashes(live(tmp_path, *RIGHT))


@pytest.mark.parametrize(
    "events",
    [
        ("old", "mark", "raced", "settle", "obey", "new"),
        ("old", "mark", "obey", "settle", "raced"),
    ],
    ids=["settled before it is obeyed", "the engine has not heard"],
)
def test_in_another_order_it_does_not_hold(tmp_path: Path, events: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="forgotten, and here again"):
        check_all_crashes(live(tmp_path, *events))
