"""A reset that was promised holds: whoever dies, and whatever was still being written."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.disk_life import LONG, DiskLife, wait_until
from tests.fault.test_disk_processes import pids
from tests.unit.test_disk_store import BOUND, fill, identity, placed
from tests.unit.test_ferry_tiers import Open, attach
from tests.unit.test_ferry_tiers import fill as fill_ferry

import kvferry
from kvferry.tiers.disk import state
from kvferry.tiers.disk.files import DiskFile
from kvferry.tiers.disk.state import is_here, reset_in_child, reset_stores
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import StoreAt
from kvferry.tiers.disk.tier import DiskTier
from kvferry.types import Reset, TierName

__all__ = ["attach"]  # a fixture


def found(folder: Path, num_drives: int = 1) -> list[int]:
    """The places at which the next life finds blocks."""
    with DiskLife(folder, num_drives=num_drives) as life:
        _, places = life.tier.recovered()
        return sorted(places.tolist())


def kill_drives(life: DiskLife) -> None:
    for pid in pids(life):
        os.kill(pid, signal.SIGKILL)


def from_outside(life: DiskLife) -> Reset:
    """As vLLM's scheduler does, which reaches the engine with its next step only."""
    reset = Reset(time.time_ns(), 0)
    assert reset_stores(life.tier.stores(), reset.number) == ""
    return reset


@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("is_killed", [False, True])
def test_blocks_stored_after_a_reset_are_found_and_those_before_it_never(
    tmp_path: Path, num_drives: int, is_killed: bool
) -> None:
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        life.write(range(64))
        life.wait_durable()
        life.tier.reset(Reset(time.time_ns(), 0))
        rows = life.write(range(20, 24))
        assert life.tier.wait_forgotten(LONG)
        life.wait_durable()
        if is_killed:
            kill_drives(life)
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        assert sorted(life.tier.recovered()[1].tolist()) == [20, 21, 22, 23]
        life.expect(range(20, 24), rows)
        life.write(range(4))
        life.wait_durable()
    assert found(tmp_path, num_drives) == [0, 1, 2, 3, 20, 21, 22, 23]


def test_keys_are_those_of_the_engines_epoch_and_the_next_one_begins_at_none(
    tmp_path: Path,
) -> None:
    """An engine's keys have its epoch in them; on disk the same blocks have the same names."""
    with DiskLife(tmp_path) as life:
        number = time.time_ns()
        life.tier.reset(Reset(number, number))
        rows = life.write(range(4))
        life.expect(range(4), rows)
        with life.tier._changed:
            mask = life.tier._mask
        life.wait_durable()
    with DiskLife(tmp_path) as life:
        keys, _ = life.tier.recovered()
        from tests.fakes.crafted_keys import keys as numbered

        assert keys == numbered(range(4)).masked(mask)


def test_what_is_not_kept_ends_with_its_engine(tmp_path: Path) -> None:
    """Its weights are not those that the store's name says."""
    with DiskLife(tmp_path) as life:
        life.tier.reset(Reset(time.time_ns(), 0, is_kept=False))
        rows = life.write(range(4))
        life.wait_durable()
        life.expect(range(4), rows)
        kill_drives(life)  # the next process of the same engine keeps nothing either
        wait_until(lambda: life.tier.figures().restarts > 0)
        life.wait_well()
        life.write(range(4, 8))
        life.wait_durable()
    assert found(tmp_path) == []
    with DiskLife(tmp_path) as life:
        life.write(range(2))
        life.wait_durable()
        life.tier.keep_nothing()
        life.write(range(2, 4))
        life.wait_durable()
    assert found(tmp_path) == []


@pytest.mark.parametrize("num_drives", [1, 2])
def test_what_an_engine_writes_that_has_not_heard_is_never_found(
    tmp_path: Path, num_drives: int
) -> None:
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        life.write(range(8))
        life.wait_durable()
        from_outside(life)
        life.write(range(4, 12))
        life.wait_durable()
    assert found(tmp_path, num_drives) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_once_the_engine_has_heard_what_it_writes_is_kept(tmp_path: Path, is_killed: bool) -> None:
    with DiskLife(tmp_path) as life:
        rows = life.write(range(8))
        life.wait_durable()
        reset = from_outside(life)
        if is_killed:  # the drive opens its store again, and its engine has not heard
            kill_drives(life)
            wait_until(lambda: life.tier.figures().restarts > 0)
            life.wait_well()
            assert not life.read(range(8))[1].ok.any()
            life.write(range(8), rows)
            life.wait_durable()
        life.tier.reset(reset)
        life.write(range(20, 24))
        assert life.tier.wait_forgotten(LONG)
        life.wait_durable()
    assert found(tmp_path) == [20, 21, 22, 23]


def test_a_reset_before_the_one_from_outside_does_not_settle_it(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        (drive,) = life.tier._drives
        drive._max_silence = LONG
        (pid,) = pids(life)
        os.kill(pid, signal.SIGSTOP)
        life.tier.reset(Reset(time.time_ns(), 0))
        from_outside(life)
        os.kill(pid, signal.SIGCONT)
        assert life.tier.wait_forgotten(LONG)
        life.write(range(4))
        life.wait_durable()
        kill_drives(life)
    assert found(tmp_path) == []


def test_a_drive_that_was_away_during_a_reset_serves_nothing_older(tmp_path: Path) -> None:
    with DiskLife(tmp_path, num_drives=2) as life:
        life.write(range(256))
        life.wait_durable()
        first, _ = life.tier.stores()
        assert reset_stores([first], time.time_ns()) == ""
    assert found(tmp_path, 2) == []
    assert found(tmp_path, 2) == []


def test_a_reset_after_the_clock_was_put_back_is_one(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        life.write(range(4))
        life.tier.reset(Reset(1 << 62, 0))
        life.write(range(4, 8))
        life.tier.reset(Reset(5, 0))
        life.write(range(8, 12))
        assert life.tier.wait_forgotten(LONG)
        life.wait_durable()
    assert found(tmp_path) == [8, 9, 10, 11]


# -- the state file -------------------------------------------------------------------------------


def leave(root: Path, name: int = 1, places: tuple[int, ...] = (4, 2)) -> StoreAt:
    """A store with blocks that nobody has open, after a reset."""
    with Store.open(root, identity(name), BOUND) as store:
        store.index.reset(time.time_ns())
        fill(store, list(places))
        return StoreAt(str(store.folder), store.superblock.store_id)


def left(root: Path, name: int = 1) -> list[int]:
    with Store.open(root, identity(name), BOUND) as store:
        return placed(store)


@pytest.mark.parametrize("is_gone", [False, True])
def test_without_its_reset_number_a_store_has_nothing(tmp_path: Path, is_gone: bool) -> None:
    path = Path(leave(tmp_path).folder) / "state"
    data = bytearray(path.read_bytes())
    data[20] ^= 0x40
    path.write_bytes(data)
    assert left(tmp_path) == [4, 2], "there is a second copy"
    data[20] ^= 0x40
    data[20 + 512] ^= 0x40
    path.write_bytes(data)
    assert left(tmp_path) == [4, 2]
    if is_gone:
        path.unlink()
    else:
        data[20] ^= 0x40
        path.write_bytes(data)
    assert left(tmp_path) == []
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [9])
    assert left(tmp_path) == [9], "and goes on"


@pytest.mark.parametrize("call", ["write_at", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_number_that_cannot_be_persisted_is_a_reset_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    stores = [leave(tmp_path / "one"), leave(tmp_path / "two")]

    def refuse(file: object, *args: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, call, refuse)
        told = reset_stores(stores, time.time_ns())
    for store in stores:
        assert f"{store.folder}: {os.strerror(code)}" in told


def test_stores_are_reset_from_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('hello'); print()")
    monkeypatch.syspath_prepend(str(site))  # what else a process says is no part of its answer
    here, gone = leave(tmp_path / "one"), leave(tmp_path / "two")
    gone = gone._replace(folder=str(tmp_path / "none"))
    stranger = here._replace(store_id=bytes(16))
    assert not is_here(stranger)
    told = reset_in_child([gone, here], time.time_ns(), 60)
    assert told == f"{gone.folder}: the store is no longer there"
    assert left(tmp_path / "one") == []
    assert left(tmp_path / "two") == [4, 2]
    monkeypatch.setattr(state, "run_module", lambda *told: b"")
    assert "JSONDecodeError" in reset_in_child([here], 1, 60)


# -- a ferry --------------------------------------------------------------------------------------


def attach_disk(attach: Open, folder: Path, **options: Any) -> tuple[kvferry.Ferry, DiskTier]:
    ferry = attach("", disk=str(folder), disk_size="16MiB", tier_write="through", **options)
    tier = ferry._rank.tiers[TierName("disk")]._tier
    assert isinstance(tier, DiskTier)
    return ferry, tier


def stored(ferry: kvferry.Ferry) -> int:
    return ferry.stats().tiers["disk"].cached


@pytest.mark.parametrize("new_weights", [False, True])
def test_a_ferry_finds_what_it_stored_after_its_reset(
    attach: Open, tmp_path: Path, new_weights: bool
) -> None:
    ferry, tier = attach_disk(attach, tmp_path)
    fill_ferry(ferry)
    wait_until(lambda: not tier.figures().pending and not tier.figures().durable_lag)
    before = stored(ferry)
    assert before
    assert ferry.reset(new_weights=new_weights)
    (child,) = [drive._child for drive in tier._drives]
    assert child is not None
    assert stored(ferry) == 0
    fill_ferry(ferry)
    wait_until(lambda: not tier.figures().pending and not tier.figures().durable_lag)
    os.kill(child.pid, signal.SIGKILL)
    ferry.close()
    ferry, _ = attach_disk(attach, tmp_path)
    assert stored(ferry) == (0 if new_weights else before)


def test_a_reset_that_is_not_durable_yet_is_not_claimed(attach: Open, tmp_path: Path) -> None:
    ferry, tier = attach_disk(attach, tmp_path, disk_deadline=1)
    fill_ferry(ferry)
    (drive,) = tier._drives
    drive._max_silence = LONG
    child = drive._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert not ferry.reset()
    finally:
        os.kill(child.pid, signal.SIGCONT)
    wait_until(lambda: tier.wait_forgotten(0.0))
