"""A drive on a bad day, with the files of a drive that fails in a thread of the test.

Never wrong bytes, never a hang, the rest goes on, and it heals.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.fakes.disk_life import LONG, DiskLife, wait_until
from tests.fakes.drives import Weather, WeatheredFile

from kvferry.core.keys import Key
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.files import DiskFile


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def life(tmp_path: Path, weather: Weather) -> Iterator[DiskLife]:
    with DiskLife(tmp_path, weather.launch) as life:
        weather.stripes = life.tier.stripes
        yield life
        weather.fault, weather.ailment = None, ""


def broken(code: int, way: Way, *numbers: int) -> object:
    bad = {key(number) for number in numbers}

    def fault(asked: Way, at: Key) -> None:
        if asked is way and (not bad or at in bad):
            raise OSError(code, os.strerror(code))

    return fault


def test_short_reads_and_writes_are_gone_on_with(life: DiskLife, weather: Weather) -> None:
    weather.is_short = True
    rows = life.write(range(20))
    life.expect(range(20), rows)
    weather.is_short = False
    life.expect(range(20), rows)


@pytest.mark.parametrize("way", [Way.READ, Way.WRITE])
def test_one_bad_sector_in_a_long_call_is_one_failed_block(
    life: DiskLife, weather: Weather, way: Way
) -> None:
    rows = life.write(range(10))
    weather.fault = broken(errno.EIO, way, 4)  # type: ignore[assignment]
    news = life.fresh(10)
    if way is Way.WRITE:
        result = life.do(way, range(10), news)
        rows = news
    else:
        into, result = life.read(range(10))
        assert (into[result.ok] == rows[result.ok]).all()
    assert np.flatnonzero(~result.ok).tolist() == [4]
    assert "Input/output error" in result.reasons[4]
    weather.fault = None
    into, result = life.read(range(10))
    assert result.ok[4] == (way is Way.READ), "a write that failed leaves no block"
    assert (into[result.ok] == rows[result.ok]).all()
    assert not life.tier.ailment
    assert life.tier.figures().failed["drive"] == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENODEV])
def test_many_errors_in_a_row_ail_and_it_heals(life: DiskLife, weather: Weather, code: int) -> None:
    rows = life.write(range(30))
    weather.fault = broken(code, Way.READ)  # type: ignore[assignment]
    _, result = life.read(range(30))
    assert not result.ok.any()
    assert os.strerror(code) in life.wait_ailing()
    start = time.monotonic()
    _, result = life.read(range(30))
    assert not result.ok.any()
    assert time.monotonic() - start < LONG / 2, "while it ails, batches fail at once"
    weather.fault = None
    life.wait_well()
    life.expect(range(30), rows)


def test_no_space_stops_writes_and_leaves_reads_alone(life: DiskLife, weather: Weather) -> None:
    rows = life.write(range(8))
    weather.fault = broken(errno.ENOSPC, Way.WRITE)  # type: ignore[assignment]
    assert not life.do(Way.WRITE, range(8, 40), life.fresh(32)).ok.any()
    result = life.do(Way.WRITE, [50], life.fresh(1))
    assert "No space" in result.reasons[0]
    assert not life.tier.ailment
    life.expect(range(8), rows)
    weather.fault = None
    wait_until(lambda: bool(life.do(Way.WRITE, [50], life.fresh(1)).ok.all()))


def test_a_drive_that_does_not_answer_ails_until_it_does(tmp_path: Path, weather: Weather) -> None:
    reached, gate = threading.Event(), threading.Event()

    def hang(way: Way, at: Key) -> None:
        if at == key(3):
            reached.set()
            assert gate.wait(LONG)

    with DiskLife(tmp_path, weather.launch, num_threads=1, job_bytes=1) as life:
        weather.stripes = life.tier.stripes
        rows = life.write(range(6))
        life.wait_durable()  # or a commit may be what takes too long
        weather.fault = hang
        weather.be_patient(0.2)
        into, result = life.read([3, 4])
        assert not result.ok[0]
        assert "no answer for 0.2 s" in result.reasons[0]
        assert "no answer" in life.wait_ailing()
        assert not life.do(Way.WRITE, [5], life.fresh(1)).ok.any()
        before = into.copy()
        weather.be_patient(LONG)
        gate.set()
        life.wait_well()
        time.sleep(0.05)
        assert (into == before).all(), "what a given-up read brings later is not delivered"
        weather.fault = None
        life.expect([0, 1, 2, 3, 4], rows[:5])


def test_a_write_given_up_leaves_no_block(tmp_path: Path, weather: Weather) -> None:
    gate = threading.Event()

    def hang(way: Way, at: Key) -> None:
        if way is Way.WRITE and at == key(1):
            assert gate.wait(LONG)

    with DiskLife(tmp_path, weather.launch) as life:
        weather.stripes = life.tier.stripes
        life.write([0, 1])
        life.wait_durable()
        weather.fault = hang
        weather.be_patient(0.2)
        assert not life.do(Way.WRITE, [1], life.fresh(1)).ok.any()
        life.wait_ailing()  # which is told apart from the result, and may come after it
        weather.be_patient(LONG)
        gate.set()
        life.wait_well()
        assert life.read([0, 1])[1].ok.tolist() == [True, False]
    with DiskLife(tmp_path) as life:
        assert sorted(life.tier.recovered()[1].tolist()) == [0]


def test_a_hung_commit_ails_too(
    tmp_path: Path, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with DiskLife(tmp_path, weather.launch) as life:
        weather.stripes = life.tier.stripes
        rows = life.write([0])
        life.wait_durable()
        weather.sync = lambda: gate.wait(LONG)
        life.write([1])
        weather.be_patient(0.2)
        assert "no answer" in life.wait_ailing()
        weather.be_patient(LONG)
        weather.sync = None
        gate.set()
        life.wait_well()
        life.expect([0], rows)


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_flipped_bits_and_blocks_in_each_others_place_are_found(
    tmp_path: Path, weather: Weather, secret: bytes | None
) -> None:
    with DiskLife(tmp_path, weather.launch, key=secret) as life:
        weather.stripes = life.tier.stripes
        rows = life.write(range(8))
        (file,) = weather.files
        file.flip(2, life.block_bytes - 1)
        file.swap(5, 6)
        into, result = life.read(range(8))
        assert np.flatnonzero(~result.ok).tolist() == [2, 5, 6]
        assert all("not what was written" in reason for reason in result.reasons.values())
        assert (into[result.ok] == rows[result.ok]).all()
        assert (into[[2, 5, 6]] == 0xEE).all(), "doubtful bytes reach nobody"
        assert life.tier.figures().failed["damaged"] == 3
        file.flip(2, life.block_bytes - 1)
        assert "holds nothing" in life.read([2])[1].reasons[0], "once lost, it stays lost"
        life.write([2], rows[2:3])
        life.expect([2], rows[2:3])


def test_a_block_is_only_given_out_under_its_own_key(life: DiskLife) -> None:
    rows = life.write([7])
    into = np.full_like(rows, 0xEE)
    submit = life.tier.submit
    life.tier.submit = lambda batch: submit(replace(batch, keys=keys([8])))  # type: ignore[method-assign]
    result = life.do(Way.READ, [7], into)
    assert not result.ok.any()
    assert (into == 0xEE).all()


@pytest.mark.parametrize("what", ["blocks", "index"])
def test_after_a_commit_that_failed_all_begins_with_the_one_before(
    tmp_path: Path, weather: Weather, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with DiskLife(tmp_path, weather.launch) as life:
        weather.stripes = life.tier.stripes
        rows = life.write([0, 1])
        life.wait_durable()
        with monkeypatch.context() as patch:
            if what == "index":
                patch.setattr(DiskFile, "write_at", refuse)
            else:
                weather.sync = refuse
            life.write([2, 3])
            assert "cannot be made durable: " in life.wait_ailing()
            weather.sync = None
        life.wait_well()
        assert life.read([0, 1, 2, 3])[1].ok.tolist() == [True, True, False, False]
        life.write([9])
    with DiskLife(tmp_path) as life:
        assert sorted(life.tier.recovered()[1].tolist()) == [0, 1, 9]
        life.expect([0, 1], rows)


def test_a_commit_covers_no_block_whose_bytes_came_after_its_sync(
    tmp_path: Path, weather: Weather
) -> None:
    """Nor any block at all whose sync failed: the drive is killed before it can take that back."""
    reached, gate = threading.Event(), threading.Event()
    syncs: list[int] = []

    def sync() -> None:
        syncs.append(len(syncs))
        if len(syncs) == 1:
            reached.set()
            assert gate.wait(LONG)
        else:
            weather.kill()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with DiskLife(tmp_path, weather.launch, check_seconds=LONG) as life:
        weather.stripes = life.tier.stripes
        weather.sync = sync
        rows = life.write([0])
        assert reached.wait(LONG)
        life.write([1])  # while the bytes before it are on their way to the medium
        gate.set()
        wait_until(lambda: len(syncs) > 1)
        weather.sync = None
    with DiskLife(tmp_path) as life:
        assert life.tier.recovered()[1].tolist() == [0]
        life.expect([0], rows)


def test_a_sparse_file_leaves_the_floor_free(
    tmp_path: Path, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeatheredFile, "is_whole", property(lambda self: False))
    with DiskLife(tmp_path, weather.launch) as life:
        weather.stripes = life.tier.stripes
        rows = life.write([0])
        free = os.statvfs(tmp_path)

        class Full:
            f_bavail, f_frsize = 0, free.f_frsize

        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: Full)
            wait_until(lambda: not life.do(Way.WRITE, [1], life.fresh(1)).ok.any())
            life.expect([0], rows)
        wait_until(lambda: bool(life.do(Way.WRITE, [1], life.fresh(1)).ok.all()))


def test_what_waited_on_a_drive_that_died_waits_no_more(tmp_path: Path, weather: Weather) -> None:
    """What it counted stays; but a gauge that nobody lowers would tell of it for ever."""
    gate = threading.Event()
    with DiskLife(tmp_path, weather.launch) as life:
        weather.be_patient(LONG)
        life.write(range(4))
        life.wait_durable()
        weather.sync = lambda: gate.wait(LONG)
        life.write(range(4, 8))
        wait_until(lambda: life.tier.figures().durable_lag > 0)
        before = life.tier.figures()
        assert before.pending >= 4
        weather.is_over = True
        weather.drives[0].kill()
        (drive,) = life.tier._drives
        wait_until(lambda: drive._child is None)
        after = life.tier.figures()
        gate.set()
    assert (after.pending, after.durable_lag) == (0, 0.0)
    assert after.written_bytes == before.written_bytes > 0
