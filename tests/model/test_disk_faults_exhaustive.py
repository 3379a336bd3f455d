"""Every single call to the medium fails once, in its turn; then the process ends.

A failed sync is the worst of it: some of what was written is on the medium, all of it can be read,
and the kernel will never write the rest. The next index to open the files may not take such bytes
for kept.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.fakes.sim_disk import SimDisk, images
from tests.model.index_oracle import Event, History, Wrote, content_of
from tests.model.test_disk_crashes import NUM_PLACES, SMALL, STORE_ID, WIDE, Life, recovered

from kvferry.errors import StoreError
from kvferry.tiers.disk import index as module
from kvferry.tiers.disk.index import DiskIndex


class OneFault:
    """Fails one call of all that are made to the files."""

    def __init__(self, turn: int, seed: int) -> None:
        self.turn, self.seed, self.calls = turn, seed, 0

    def __call__(self, what: str, offset: int, count: int) -> int | None:
        self.calls += 1
        if self.calls == self.turn:
            raise OSError(errno.EIO if self.turn % 2 else errno.ENOSPC, f"injected at {what}")
        return None


def faulty_life(fault: OneFault) -> Life:
    """Commits, losses, a forgetting, until a commit fails."""
    life = Life.new(WIDE)
    for at, file in enumerate(life.disk.files):
        file.fault = fault
        file.rng = random.Random(4 * fault.turn + 2 * fault.seed + at)
    for turn in range(24):
        life.write((turn % NUM_PLACES, turn), ((turn + 1) % NUM_PLACES, turn + 100))
        if turn == 4:
            life.lose(2)
        if turn == 12:
            life.forget()
            life.write((5, 50))
        try:
            life.commit()
        except StoreError:
            break
    return life


def check_end_of_process_after(turn: int, seed: int) -> bool:
    """The process ends at the fault. The next one reads what the kernel has, and the power goes."""
    rng = random.Random(turn)
    fault = OneFault(turn, seed)
    life = faulty_life(fault)
    for file in life.disk.files:
        file.fault = None
    second = Life(WIDE, life.disk, serial=life.serial)
    second.index = life.disk.index(STORE_ID, NUM_PLACES, WIDE)
    content = content_of(second.index)
    life.history.check(content, *life.history.moment())
    events: list[Event] = [Wrote(place, *what) for place, what in content.items()]
    second.history = History(events, len(events))
    life.disk.moments.clear()
    life.disk.tell = second.history.moment
    life.disk.remember()
    second.write((0, 200))
    second.commit()
    for files, (noted, promised) in life.disk.moments:
        for image in images(files, rng, 8):
            content, _ = recovered(WIDE, image)
            second.history.check(content, noted, promised)
    return fault.calls >= turn


def every_turn() -> int:
    turn = 1
    while all(check_end_of_process_after(turn, seed) for seed in range(8)):
        turn += 1
    return turn


def test_every_fault_and_then_the_end_of_the_process() -> None:
    assert every_turn() > 50


# -- without the barriers ------------------------------------------------------------------------


def believes_the_page_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskIndex, "_write_again", lambda self, numbers: self._table.file.sync())


def believes_the_cached_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "write_reset", lambda file, number: file.sync())


@pytest.mark.parametrize(
    "take_away",
    [believes_the_page_cache, believes_the_cached_number],
    ids=["last commit written again", "number written again"],
)
def test_without_its_barrier_a_fault_is_told(
    take_away: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch)
    with pytest.raises(AssertionError):
        every_turn()


def test_a_reset_from_outside_while_an_index_opens_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's process raises the number between reading and writing it, if it may."""
    life = Life.new(SMALL)
    life.write((1, 1))
    life.commit()
    life.forget()
    life.commit()
    file = life.disk.files[1]
    is_locked = False

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        nonlocal is_locked
        is_locked = True
        yield
        is_locked = False

    monkeypatch.setattr(file, "locked", locked)
    for name in ("read_at", "write_at"):
        real = getattr(file, name)

        def call(*told: Any, real: Any = real) -> Any:
            assert is_locked, "another process may write between these"
            return real(*told)

        monkeypatch.setattr(file, name, call)
    life.disk.index(STORE_ID, NUM_PLACES, SMALL)


def test_a_page_that_can_be_read_again_does_not_outdo_what_was_committed_meanwhile() -> None:
    life = Life.new(SMALL)
    life.write((SMALL.per_page, 1))
    life.commit()
    for number in range(6):
        life.write((0, number))
        life.commit()
    disk = SimDisk.holding(life.disk.media)
    disk.files[0].read_fault = unreadable(0, 2 * SMALL.page_bytes)
    second = Life(SMALL, disk, serial=life.serial)
    second.begin()
    assert second.index.report.bad_pages == 1
    disk.files[0].read_fault = None
    second.write((1, 10))
    second.commit()
    content, _ = recovered(SMALL, disk.media)
    assert {1, SMALL.per_page} <= set(content)


def unreadable(start: int, count: int) -> Callable[[str, int, int], int | None]:
    def fail(what: str, offset: int, length: int) -> int | None:
        if offset < start + count and start < offset + length:
            raise OSError(errno.EIO, "injected at read")
        return None

    return fail


def test_what_cannot_be_read_is_left_out_or_refused_but_never_wiped() -> None:
    """A sector, a page or more of them; once the drive reads again the rest is still there."""
    life = Life.new(SMALL)
    for turn in range(12):
        life.write((turn % NUM_PLACES, turn), (0, 100 + turn))
        life.commit()
    life.index.close()
    told = len(life.history.events)
    files = life.disk.media
    whole, _ = recovered(SMALL, files)
    num_refused = 0
    for which in (0, 1):
        for start in range(0, len(files[which]), 512):
            for count in (512, 1024, 2048):
                disk = SimDisk.holding(files)
                disk.files[which].read_fault = unreadable(start, count)
                try:
                    content = content_of(disk.index(STORE_ID, NUM_PLACES, SMALL))
                except StoreError:
                    num_refused += 1
                    now, _ = recovered(SMALL, disk.media)
                    assert now == whole
                    continue
                promised = told if count == 512 else 0
                life.history.check(content, told, promised, damaged=True)
    assert num_refused > 0
