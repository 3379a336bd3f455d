"""Stores on real file systems without a free byte: they open at their size, are reset and used."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.disk_life import LONG, DiskLife, setups, wait_until
from tests.fault.test_disk_resets import attach_disk, stored
from tests.unit.test_disk_store import BOUND, fill, identity, placed
from tests.unit.test_ferry_tiers import Open, attach
from tests.unit.test_ferry_tiers import fill as fill_ferry

from kvferry.core.quantities import MiB
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.quota import allocated_bytes
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import DiskBound

__all__ = ["attach"]  # a fixture

MAKE = {"ext4": ["mkfs.ext4", "-q", "-m", "0", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"], "tmpfs": []}
IMAGE_MIB = {"ext4": 64, "xfs": 320}  # xfs makes none smaller than 300 MiB


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A file system of this kind; skips where that takes root, loop devices or tools."""
    if os.geteuid():
        pytest.skip("mounting a file system takes root")
    make, place, image = MAKE[kind], folder / "mount", folder / "image"
    place.mkdir()
    if make:
        if shutil.which(make[0]) is None:
            pytest.skip(f"there is no {make[0]}")
        with image.open("wb") as file:
            file.truncate(IMAGE_MIB[kind] * MiB)
        run(*make, str(image))
        run("mount", "-o", "loop", str(image), str(place))
    else:
        run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(params=sorted(MAKE))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as folder:
        yield folder


def fill_up(place: Path) -> None:
    """Another program takes every byte that is free."""
    with (place / "other").open("ab") as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(size))
    with contextlib.suppress(OSError):  # and every name
        for number in range(100_000):
            (place / f"name-{number}").touch()
            (place / f"name-{number}").write_bytes(b"x")
    found = os.statvfs(place)
    assert found.f_bavail * found.f_frsize < 1 * MiB


def open_store(place: Path, bound: DiskBound = BOUND) -> Store:
    return Store.open(place / "kvferry", identity(), bound)


@pytest.mark.parametrize("keep_free", [0, 5 << 30])
def test_a_store_opens_at_its_size_on_a_drive_that_another_program_filled(
    place: Path, keep_free: int
) -> None:
    with open_store(place) as store:
        num_places = store.num_places
        fill(store, [0, 1, num_places - 1])
    fill_up(place)
    for size in (BOUND.size, 2 * BOUND.size):
        with open_store(place, DiskBound(size, keep_free)) as store:
            assert store.num_places == num_places
            assert placed(store)[:3] == [0, 1, num_places - 1]
            fill(store, [2])
            store.index.commit()
    with open_store(place) as store:
        assert placed(store) == [0, 1, num_places - 1, 2]


def test_a_smaller_size_needs_no_space_and_gives_some_back(place: Path) -> None:
    with open_store(place) as store:
        fill(store, [0, store.num_places - 1])
        before = allocated_bytes(store.folder)
    fill_up(place)
    with open_store(place, DiskBound(BOUND.size // 2)) as store:
        assert placed(store) == [0]
        assert allocated_bytes(store.folder) <= before // 2
        fill(store, [1])
    with open_store(place, DiskBound(BOUND.size // 2)) as store:
        assert placed(store) == [0, 1]


def test_a_full_drive_is_served_reset_and_found_again(place: Path) -> None:
    with DiskLife(place / "kvferry") as life:
        rows = life.write(range(20))
        life.wait_durable()
    fill_up(place)
    with DiskLife(place / "kvferry", keep_free=5 << 30, write_per_day=1 << 40) as life:
        assert len(life.tier.recovered()[0]) == 20
        life.expect(range(20), rows)
        life.tier.forget()
        assert life.tier.wait_forgotten(LONG), "the number has its bytes"
        rows = life.write(range(40, 50))
        life.wait_durable()
    with DiskLife(place / "kvferry") as life:
        assert sorted(life.tier.recovered()[1].tolist()) == list(range(40, 50))
        life.expect(range(40, 50), rows)


def test_an_engine_keeps_its_places_while_the_floor_is_crossed(place: Path) -> None:
    """Its drive process dies and comes back; as many places, nothing out of range, a fast end."""
    with DiskLife(place / "kvferry") as life:
        last = life.tier.stripes.num_places - 1
        rows = life.write([0, last])
        life.wait_durable()
        fill_up(place)
        drive = life.tier._drives[0]
        drive._setup = setups(place / "kvferry", keep_free=1 << 40, size=1 << 20)[0]
        child = drive._child
        assert child is not None
        child.kill()
        wait_until(lambda: life.tier.figures().restarts > 0)
        life.wait_well()
        assert life.tier.num_places == last + 1
        life.expect([0, last], rows)
        rows = life.write([0, last])
        life.expect([0, last], rows)
        assert life.tier.close(1.0) == ()
    with DiskLife(place / "kvferry") as life:
        assert len(life.tier.recovered()[0]) == 2


def test_a_drive_on_a_read_only_file_system_is_attached_when_it_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted("ext4", tmp_path) as place:
        with DiskLife(place) as life:
            rows = life.write(range(4))
        run("mount", "-o", "remount,ro", str(place))
        try:
            with DiskLife(place, start_deadline=2 * LONG) as life:
                assert not life.tier.is_open()
                assert "Read-only" in life.tier.ailment
                assert "is left out until it is open" in caplog.text
                assert not life.do(Way.READ, [0], life.fresh(1)).ok.any()
                run("mount", "-o", "remount,rw", str(place))
                wait_until(life.tier.is_open)
                life.wait_well()
                assert life.tier.recovered()[1].tolist() == [0, 1, 2, 3]
                life.expect(range(4), rows)
        finally:
            run("mount", "-o", "remount,rw", str(place))


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Every write to this file system hangs inside the kernel. Fails where that holds us up."""
    thaw = ["fsfreeze", "-u", str(place)]
    run("fsfreeze", "-f", str(place))
    late = threading.Timer(LONG, lambda: subprocess.run(thaw, check=True))
    late.start()
    try:
        yield
        assert late.is_alive(), "it waited for the drive"
    finally:
        late.cancel()
        subprocess.run(thaw, check=False)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_drive_that_hangs_in_the_kernel_holds_nothing_up(
    attach: Open, tmp_path: Path, kind: str
) -> None:
    """Neither a reset, nor the end of a server, nor the start of the next one."""
    with mounted(kind, tmp_path) as place:
        options = {"disk_deadline": 3.0, "disk_keep_free": 0, "tier_flush": 0, "policy": "lru"}
        ferry, tier = attach_disk(attach, place / "kvferry", disk_start_deadline=LONG, **options)
        fill_ferry(ferry)
        wait_until(lambda: not tier.figures().pending and not tier.figures().durable_lag)
        assert stored(ferry)
        with frozen(place):
            fill_ferry(ferry)
            assert not ferry.reset()
            ferry.close()
            ferry, tier = attach_disk(attach, place / "kvferry", disk_start_deadline=1.0, **options)
            assert not tier.is_open()
        wait_until(lambda: tier.is_open() and not tier.ailment)
        ferry.close()
