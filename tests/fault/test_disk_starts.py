"""Starts with a drive that is bad, late or in use, and folders with names that are not ours."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.disk_life import BLOCK_BYTES, LONG, DiskLife, wait_until
from tests.fault.test_disk_processes import pids
from tests.fault.test_disk_resets import attach_disk, stored
from tests.unit.test_disk_store import BOUND, fill, identity, placed
from tests.unit.test_ferry_tiers import Open, attach
from tests.unit.test_ferry_tiers import fill as fill_ferry

from kvferry.errors import ConfigError, StoreError, StoreInUseError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk import drive
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.quota import StoreLock, purge_store, stores_under
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import DiskBound
from kvferry.tiers.ipc.messages import Channel
from kvferry.tiers.ipc.process import ChildProcess

__all__ = ["attach"]  # a fixture


def durable(tier: object) -> bool:
    figures = tier.figures()  # type: ignore[attr-defined]
    return not figures.pending and not figures.durable_lag


# -- without the drive, and with it once it is there ----------------------------------------------


def test_a_ferry_starts_without_a_drive_that_hangs_and_attaches_it_later(
    attach: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ferry, tier = attach_disk(attach, tmp_path)
    fill_ferry(ferry)
    wait_until(lambda: durable(tier))
    count = stored(ferry)
    ferry.close()
    stopped: list[ChildProcess] = []

    def hanging(module: str, hello: bytes) -> ChildProcess:
        stopped.append(ChildProcess(module, hello))
        os.kill(stopped[-1].pid, signal.SIGSTOP)
        return stopped[-1]

    with monkeypatch.context() as patch:
        patch.setattr("kvferry.tiers.disk.tier.ChildProcess", hanging)
        ferry, tier = attach_disk(attach, tmp_path, disk_start_deadline=0.2)
    assert not tier.is_open()
    assert "is left out until it is open: it is not open after 0.2 s" in caplog.text
    assert stored(ferry) == 0
    fill_ferry(ferry)  # the engine serves as if there were no disk
    for child in stopped:
        os.kill(child.pid, signal.SIGCONT)

    def is_attached() -> bool:
        ferry.poll()
        return stored(ferry) >= count

    wait_until(is_attached)


def test_a_store_in_use_is_attached_when_it_is_let_go(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as first:
        rows = first.write(range(8))
        with DiskLife(tmp_path, start_deadline=0.05) as life:
            assert not life.tier.is_open()
            assert not life.do(Way.READ, [0], life.fresh(1)).ok.any()
            first.tier.close()
            wait_until(life.tier.is_open)
            life.wait_well()
            assert sorted(life.tier.recovered()[1].tolist()) == list(range(8))
            life.expect(range(8), rows)


def test_a_drive_whose_engine_hangs_up_waits_for_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "_PATIENCE", LONG)
    ours, theirs = socket.socketpair()
    ours.close()
    channel, began = Channel(theirs), time.monotonic()
    setup = DriveSetup(str(tmp_path), identity(), BOUND, os.getpid())
    with Store.open(tmp_path, identity(), BOUND), pytest.raises(StoreInUseError):
        drive._open_when_free(setup, channel)
    assert time.monotonic() - began < LONG / 2
    channel.close()


def test_a_directory_that_is_a_file_is_left_out_until_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "drive-0"
    path.write_text("mine")
    with DiskLife(tmp_path, start_deadline=2 * LONG) as life:
        assert str(path) in life.tier.ailment
        assert path.read_text() == "mine"
        path.unlink()
        wait_until(life.tier.is_open)


def test_only_an_invalid_setting_refuses_to_start(attach: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_size: 8KiB over 1 directories .* raise it"):
        attach("", disk=str(tmp_path), disk_size="8KiB")


def test_a_store_that_another_server_changed_meanwhile_stays_offline(tmp_path: Path) -> None:
    """The drive process dies, and before the next one begins the store has another size."""
    with DiskLife(tmp_path) as life:
        life.write(range(8))
        drive = life.tier._drives[0]
        ready, folder = drive.ready, tmp_path / "drive-0"
        assert ready is not None
        moved = tmp_path / "away"
        os.rename(folder, moved)
        os.kill(pids(life)[0], signal.SIGKILL)
        life.wait_ailing()
        with DiskLife(tmp_path / "other", size=3 << 20) as other:
            assert other.tier.num_places != life.tier.num_places
        shutil.copytree(tmp_path / "other" / "drive-0", folder)
        wait_until(lambda: "another store" in life.tier.ailment)
        assert not life.do(Way.WRITE, [0], life.fresh(1)).ok.any()
        assert life.tier.num_places == ready.num_places
        shutil.rmtree(folder)
        os.rename(moved, folder)
        life.wait_well()


# -- names that are not ours ----------------------------------------------------------------------


def made(root: Path, name: int = 1) -> Path:
    with Store.open(root, identity(name, family=bytes([name])), BOUND) as store:
        fill(store, [1])
        return store.folder


Foreign = Callable[[Path, Path], None]


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("name", ["lock", "superblock", "state", "blocks", "index"])
@pytest.mark.parametrize("foreign", [link, pipe, folder])
def test_a_name_in_a_store_that_is_no_plain_file_keeps_it_offline_and_untouched(
    tmp_path: Path, name: str, foreign: Foreign
) -> None:
    store, target = made(tmp_path / "root"), tmp_path / "target"
    target.write_bytes(b"precious" * 100)
    (store / name).rename(tmp_path / "aside")
    foreign(store / name, target)
    with pytest.raises(StoreError, match=f"{store / name} is no plain file"):
        Store.open(tmp_path / "root", identity(family=b"\1"), BOUND)
    (listed,) = stores_under(tmp_path / "root")
    assert str(store / name) in listed.trouble
    with pytest.raises(StoreError, match="is no plain file"):
        purge_store(store)
    # Nor is it removed or cut when its bytes are needed.
    with pytest.raises(StoreError, match="no room"):
        Store.open(tmp_path / "root", identity(2), DiskBound(100 << 10))
    assert target.read_bytes() == b"precious" * 100
    assert os.path.lexists(store / name)


@pytest.mark.parametrize("foreign", [link, pipe, "file"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_store_that_is_a_link_is_never_followed(
    tmp_path: Path, foreign: Foreign | str, is_removed: bool
) -> None:
    victim, root = made(tmp_path / "elsewhere"), tmp_path / "root"
    before = {file.name: file.read_bytes() for file in victim.iterdir()}
    root.mkdir()
    path = root / (".kvferry-removed-0" if is_removed else identity().folder_name)
    path.write_text("mine") if isinstance(foreign, str) else foreign(path, victim)
    if is_removed:
        Store.open(root, identity(2), BOUND).close()
    else:
        with pytest.raises(StoreError, match=f"{path} is a link or no directory"):
            Store.open(root, identity(family=b"\1"), BOUND)
        assert stores_under(root)[0].trouble
        with pytest.raises(StoreError, match="is a link or no directory"):
            purge_store(path)
        Store.open(root, identity(2), BOUND).close()
    assert {file.name: file.read_bytes() for file in victim.iterdir()} == before
    assert os.path.lexists(path)


def test_listing_stores_does_not_hang_on_a_pipe(tmp_path: Path) -> None:
    store = made(tmp_path)
    (store / "superblock").unlink()
    os.mkfifo(store / "superblock")
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.tools.cli.main", "disk", "ls", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert "no plain file" in done.stdout.replace("\n", " ") + done.stderr


def test_without_its_lock_file_a_store_is_still_one_servers(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity(), BOUND) as store:
        (store.folder / "lock").unlink()
        with pytest.raises(StoreInUseError):
            Store.open(tmp_path, identity(), BOUND)
        with pytest.raises(StoreInUseError):
            purge_store(store.folder)
        assert stores_under(tmp_path)[0].holder
        assert StoreLock.try_once(store.folder) is None
        fill(store, [1])
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert placed(store) == [1]


def test_beyond_the_bytes_of_a_day_nothing_is_written_also_after_a_restart(tmp_path: Path) -> None:
    with DiskLife(tmp_path, write_per_day=8 * 20 * BLOCK_BYTES) as life:
        rows = life.write(range(15))
        result = life.do(Way.WRITE, range(20, 30), life.fresh(10))
        assert not result.ok.any()
        assert "no bytes are left of disk_write_per_day" in result.reasons[0]
        life.expect(range(15), rows)
        life.wait_durable()
    with DiskLife(tmp_path, write_per_day=8 * 20 * BLOCK_BYTES) as life:
        assert not life.do(Way.WRITE, range(10), life.fresh(10)).ok.any()
        rows[:3] = life.write(range(3))
        life.expect([0, 1, 2, 10], rows[[0, 1, 2, 10]])


def test_the_bytes_of_a_day_are_divided_among_directories_and_ranks(
    attach: Open, tmp_path: Path
) -> None:
    _, tier = attach_disk(attach, tmp_path, disk_write_per_day="80MB")
    assert tier._drives[0]._setup.write_per_day == 80e6
