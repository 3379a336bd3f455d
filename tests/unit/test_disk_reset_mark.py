"""A mark in a store's folder that says: forget everything. Whoever opens the store obeys first."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.test_disk_store import fill, identity, placed

from kvferry.core.quantities import MiB
from kvferry.tiers.disk import superblock as marks
from kvferry.tiers.disk.journal_pages import DiskFile
from kvferry.tiers.disk.protocol import StoreAt
from kvferry.tiers.disk.quota import DiskBound
from kvferry.tiers.disk.store import Store, list_stores, purge_store, reading

MARK = "forget"
BOUND = DiskBound(16 * MiB, for_others=0.5)


def open_store(root: Path, name: int = 1, *, may_create: bool = True) -> Store:
    return Store.open(root, identity(name), BOUND, may_create=may_create)


def leave(root: Path, name: int = 1, places: tuple[int, ...] = (4, 2)) -> StoreAt:
    """A store with blocks that nobody has open."""
    with open_store(root, name) as store:
        fill(store, list(places))
        return StoreAt(str(store.folder), store.store_id)


def left(root: Path, name: int = 1) -> list[int]:
    """What whoever opens the store next finds."""
    with open_store(root, name) as store:
        return placed(store)


def test_who_opens_a_marked_store_forgets_first(tmp_path: Path) -> None:
    store = leave(tmp_path)
    assert left(tmp_path) == [4, 2]
    assert marks.mark_stores([store]) == ""
    assert left(tmp_path) == []
    leave(tmp_path, places=(7,))
    assert left(tmp_path) == [7], "it was told once"


def test_an_order_after_the_clock_was_put_back_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = leave(tmp_path)
    assert marks.mark_stores([store]) == ""
    assert left(tmp_path) == []
    leave(tmp_path)
    monkeypatch.setattr("kvferry.tiers.disk.superblock.time.time_ns", lambda: 5)
    assert marks.mark_stores([store]) == ""
    assert left(tmp_path) == []


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 3, 8, 15])
def test_a_mark_that_cannot_be_believed_counts_once(tmp_path: Path, at: int) -> None:
    store = leave(tmp_path)
    assert marks.mark_stores([store]) == ""
    assert left(tmp_path) == []
    leave(tmp_path)

    def flip(data: bytearray) -> None:
        data[at] ^= 0x40

    damage(Path(store.folder) / MARK, flip)
    assert left(tmp_path) == []
    leave(tmp_path, places=(9,))
    assert left(tmp_path) == [9]


def test_a_store_from_before_there_were_marks_has_none(tmp_path: Path) -> None:
    store = leave(tmp_path)
    mark = Path(store.folder) / MARK
    mark.unlink()
    assert left(tmp_path) == [4, 2]
    assert mark.stat().st_size == 4096
    assert not any(mark.read_bytes())


@pytest.mark.parametrize("call", ["write_at", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_mark_that_cannot_be_written_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    stores = [leave(tmp_path / "one"), leave(tmp_path / "two")]

    def refuse(file: object, *args: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, call, refuse)
        told = marks.mark_stores(stores)
    for store in stores:
        assert f"{store.folder}: {os.strerror(code)}" in told


def test_one_that_is_gone_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    gone, here = leave(tmp_path / "one"), leave(tmp_path / "two")
    stranger = here._replace(store_id=bytes(16))
    assert not marks.is_here(stranger)
    gone = gone._replace(folder=str(tmp_path / "none"))
    assert not marks.is_here(gone)
    told = marks.mark_stores([gone, here])
    assert told == f"{gone.folder}: the store is no longer there"
    assert left(tmp_path / "two") == []
    assert left(tmp_path / "one") == [4, 2]


def test_which_stores_are_here_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    here, gone = leave(tmp_path / "one"), leave(tmp_path / "two")
    gone = gone._replace(folder=str(tmp_path / "none"))
    stranger = here._replace(store_id=bytes(16))
    assert marks.find_apart([stranger, here, gone], 60) == [here]


def test_a_drive_that_hangs_counts_as_here_and_is_not_claimed_to_be_told(tmp_path: Path) -> None:
    store = leave(tmp_path)
    superblock = Path(store.folder) / "superblock"
    superblock.unlink()
    os.mkfifo(superblock)  # who opens it to read waits for a writer, who never comes
    assert marks.find_apart([store], 0.5) == [store]
    assert marks.mark_apart([store], 0.5) == "TimeoutError: no answer for 0.5 s"


def test_what_else_a_process_says_is_no_part_of_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a module of the site that greets whenever Python starts."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('hello'); print()")
    monkeypatch.syspath_prepend(str(site))
    store = leave(tmp_path / "one")
    assert marks.mark_apart([store], 60) == ""
    gone = store._replace(folder=str(tmp_path / "none"))
    assert marks.mark_apart([gone], 60) == f"{gone.folder}: the store is no longer there"
    monkeypatch.setattr(marks, "run_module", lambda *told: b"")
    assert "JSONDecodeError" in marks.mark_apart([store], 60)


def test_a_marked_store_is_listed_verified_and_purged_as_what_it_is(tmp_path: Path) -> None:
    store, _ = leave(tmp_path, 1), leave(tmp_path, 2)
    assert marks.mark_stores([store]) == ""
    counts = {each.folder.path.name: each.num_blocks for each in list_stores(tmp_path)}
    assert counts == {identity(1).folder_name: 0, identity(2).folder_name: 2}
    with reading(Path(store.folder)) as content:
        assert list(content.pieces()) == []
        assert content.is_current()
        assert "told to forget everything" in str(content.report)
    purge_store(Path(store.folder))
    assert not Path(store.folder).exists()
    assert left(tmp_path, 1) == [], "and a new store has no mark"
