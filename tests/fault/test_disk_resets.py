"""Forgetting that was promised holds: whoever dies, and whatever was still being written."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.disk_life import LONG, DiskLife, wait_until
from tests.fault.test_disk_processes import pids
from tests.unit.test_ferry_tiers import Open, attach, fill

import kvferry
from kvferry.tiers.disk.superblock import is_marked, mark_stores
from kvferry.tiers.disk.tier import DiskTier
from kvferry.types import TierName

__all__ = ["attach"]  # a fixture


def found(folder: Path, num_drives: int = 1) -> int:
    """How many blocks the next life finds."""
    with DiskLife(folder, num_drives=num_drives) as life:
        keys, _ = life.tier.recovered()
        return len(keys)


def kill_drives(life: DiskLife) -> None:
    for pid in pids(life):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("num_drives", [1, 2])
def test_what_an_engine_writes_that_has_not_heard_is_forgotten(
    tmp_path: Path, num_drives: int
) -> None:
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        life.write(range(8))
        life.wait_durable()
        assert mark_stores(life.tier.stores()) == ""
        life.write(range(4, 12))
        life.wait_durable()
    assert found(tmp_path, num_drives) == 0


def test_a_drive_that_dies_behind_the_mark_does_not_take_it_along(tmp_path: Path) -> None:
    """It opens its store again, obeys, and goes on to write for an engine that has not heard."""
    with DiskLife(tmp_path) as life:
        rows = life.write(range(8))
        life.wait_durable()
        assert mark_stores(life.tier.stores()) == ""
        kill_drives(life)
        wait_until(lambda: life.tier.figures().restarts > 0)
        life.wait_well()
        _, result = life.read(range(8))
        assert not result.ok.any(), "it obeyed"
        life.write(range(8), rows)
        life.wait_durable()
    assert found(tmp_path) == 0


@pytest.mark.parametrize("num_drives", [1, 2])
def test_once_the_engine_has_heard_what_it_writes_serves_until_it_ends(
    tmp_path: Path, num_drives: int
) -> None:
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        life.write(range(8))
        life.wait_durable()
        assert mark_stores(life.tier.stores()) == ""
        life.tier.forget()
        rows = life.write(range(20, 24))
        assert life.tier.wait_forgotten(LONG)
        life.wait_durable()
        life.expect(range(20, 24), rows)
        kill_drives(life)
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        assert len(life.tier.recovered()[0]) == 0
        rows = life.write(range(4))
        life.wait_durable()
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        _, places = life.tier.recovered()
        assert sorted(places.tolist()) == list(range(4)), "it was told once"
        life.expect(range(4), rows)
        assert mark_stores(life.tier.stores()) == "", "and it can be told again"
    assert found(tmp_path, num_drives) == 0


@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("is_heard_late", [False, True])
def test_an_order_from_before_the_mark_leaves_the_mark(
    tmp_path: Path, num_drives: int, is_heard_late: bool
) -> None:
    """As that to forget what ranks do not have in common, with the first step of a life."""
    with DiskLife(tmp_path, num_drives=num_drives) as life:
        drives = pids(life)
        if not is_heard_late:
            for drive in life.tier._drives:
                drive._max_silence = LONG
            for pid in drives:
                os.kill(pid, signal.SIGSTOP)
            life.tier.forget()
        assert mark_stores(life.tier.stores()) == ""
        if is_heard_late:
            life.tier.forget()
        for pid in drives:
            os.kill(pid, signal.SIGCONT)
        assert life.tier.wait_forgotten(LONG)
        life.write(range(4))
        life.wait_durable()
        kill_drives(life)
    assert found(tmp_path, num_drives) == 0


def test_a_drive_that_only_mends_what_it_missed_leaves_the_mark(tmp_path: Path) -> None:
    """Then its engine has not heard of the order, and may still write what that is for."""
    with DiskLife(tmp_path) as life:
        (store,) = life.tier.stores()
        assert mark_stores([store]) == ""
        (drive,) = life.tier._drives
        with life.tier._changed:
            drive.agree(1)
        wait_until(lambda: drive.has_forgotten)
        assert is_marked(Path(store.folder))
        life.write(range(4))
        life.wait_durable()
    assert found(tmp_path) == 0


def test_a_mark_on_one_drive_is_one_for_all_drives_of_the_tier(tmp_path: Path) -> None:
    with DiskLife(tmp_path, num_drives=2) as life:
        life.write(range(256))
        life.wait_durable()
        first, _ = life.tier.stores()
        assert mark_stores([first]) == ""
    assert found(tmp_path, 2) == 0
    assert found(tmp_path, 2) == 0


def test_a_tier_says_when_forgetting_is_durable(tmp_path: Path) -> None:
    """Whatever happens then: here its drive dies at once, and takes no last word with it."""
    with DiskLife(tmp_path) as life:
        life.write(range(8))
        life.wait_durable()
        life.tier.forget()
        assert life.tier.wait_forgotten(LONG)
        kill_drives(life)
        life.tier.close()
    assert found(tmp_path) == 0


def test_a_tier_whose_drive_has_not_answered_does_not_say_so(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        life.write(range(8))
        life.wait_durable()
        (pid,) = pids(life)
        os.kill(pid, signal.SIGSTOP)
        life.tier.forget()
        assert not life.tier.wait_forgotten(0.05)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: life.tier.wait_forgotten(0.0))  # when it is back
    assert found(tmp_path) == 0


def attach_disk(attach: Open, folder: Path, **options: Any) -> tuple[kvferry.Ferry, DiskTier]:
    ferry = attach("", disk=str(folder), disk_size="16MiB", tier_write="through", **options)
    tier = ferry._rank.tiers[TierName("disk")]._tier
    assert isinstance(tier, DiskTier)
    return ferry, tier


def stored(ferry: kvferry.Ferry) -> int:
    counts = ferry.stats().tiers["disk"]
    return counts.cached


def test_a_ferry_that_was_reset_stays_so(attach: Open, tmp_path: Path) -> None:
    ferry, tier = attach_disk(attach, tmp_path)
    fill(ferry)
    wait_until(lambda: not tier.figures().pending and not tier.figures().durable_lag)
    assert ferry.reset()
    (child,) = [drive._child for drive in tier._drives]
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    ferry.close()
    ferry, _ = attach_disk(attach, tmp_path)
    assert stored(ferry) == 0


def test_a_reset_that_is_not_durable_yet_is_not_claimed(attach: Open, tmp_path: Path) -> None:
    ferry, tier = attach_disk(attach, tmp_path, disk_deadline=1)
    fill(ferry)
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


def test_a_ferry_without_a_disk_is_reset_at_once(attach: Open) -> None:
    assert attach("memory:1MiB").reset()
