"""Drive processes that die, stop, lose their directory, or outlive their engine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.disk_life import LONG, DiskLife, wait_until
from tests.fakes.drives import ThreadDrive, Weather

from kvferry.core.keys import Key
from kvferry.tiers.contract import BatchId, Result, Way
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.quota import StoreLock
from kvferry.tiers.disk.tier import Launch, start_drive
from kvferry.tiers.ipc.messages import pack_result


def pids(life: DiskLife) -> list[int]:
    children = [drive._child for drive in life.tier._drives]
    return [child.pid for child in children if child is not None]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_a_drive_that_was_killed_comes_back_with_what_was_durable(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        rows = life.write(range(20))
        life.wait_durable()
        into = [np.full((20, life.block_bytes), 0xEE, dtype=np.uint8) for _ in range(4)]
        (pid,) = pids(life)
        os.kill(pid, signal.SIGSTOP)
        for each in into:
            life.send(Way.READ, range(20), each)
        os.kill(pid, signal.SIGKILL)
        results = life.tier.drain(LONG)
        assert len(results) == 4, "what was under way has failed, and nothing waits for ever"
        for result, each in zip(results, into, strict=True):
            assert (each[result.ok] == rows[result.ok]).all()
        life.wait_well()
        life.expect(range(20), rows)
        assert life.tier.figures().restarts >= 1
        assert pids(life) != [pid]


def test_a_drive_that_is_stopped_is_given_up_and_touches_nothing_later(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        rows = life.write(range(20))
        life.wait_durable()
        (pid,) = pids(life)
        (drive,) = life.tier._drives
        patience, drive._max_silence = drive._max_silence, 0.3
        os.kill(pid, signal.SIGSTOP)
        into, result = life.read(range(20))
        drive._max_silence = patience  # a machine that is busy may need that long to start another
        assert not result.ok.any()
        into[:] = 0x11  # the result is here: the memory is ours again
        wait_until(lambda: is_gone(pid))
        assert (into == 0x11).all()
        life.wait_well()
        life.expect(range(20), rows)


def refusal(folder: Path, launch: Launch = start_drive, **options: Any) -> str:
    """Why the tier is not open. The engine waits no longer than until that is known."""
    with DiskLife(folder, launch, start_deadline=2 * LONG, **options) as life:
        assert not life.tier.is_open()
        return life.tier.ailment


def test_a_drive_that_cannot_be_started_is_refused_at_once(tmp_path: Path) -> None:
    def launch(setup: DriveSetup) -> ThreadDrive:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    assert "Too many open files" in refusal(tmp_path, launch)


def test_a_drive_that_answers_what_cannot_be_loses_its_orders_and_comes_back(
    tmp_path: Path,
) -> None:
    weather = Weather()
    gate = threading.Event()

    def hang(way: Way, at: Key) -> None:
        assert gate.wait(LONG)

    with DiskLife(tmp_path, weather.launch) as life:
        rows = life.write(range(4))
        life.wait_durable()
        weather.stripes = life.tier.stripes
        weather.fault = hang
        life.send(Way.READ, range(4), life.fresh(4))
        (number,) = life.tier._orders
        wrong = Result(BatchId(number), np.ones(3, dtype=bool), {}, 0, 0.0)
        weather.drives[0].say(pack_result(wrong))
        life.wait_ailing()
        gate.set()
        (result,) = life.tier.drain(LONG)
        assert not result.ok.any()
        assert "3 results for 4 blocks" in result.reasons[0]
        weather.fault = None
        life.wait_well()
        life.expect(range(4), rows)


def test_closing_does_not_wait_for_a_drive_that_is_stopped(tmp_path: Path) -> None:
    life = DiskLife(tmp_path)
    life.write(range(4))
    life.wait_durable()
    (pid,) = pids(life)
    os.kill(pid, signal.SIGSTOP)
    sent = life.send(Way.READ, range(4), life.fresh(4))
    start = time.monotonic()
    assert life.tier.close(0.2) == (), "its memory is safe: nothing is left behind"
    assert time.monotonic() - start < LONG / 3
    assert [result.batch_id for result in life.tier.poll()] == [sent]
    wait_until(lambda: is_gone(pid))


def test_a_directory_that_vanishes_ails_and_heals_when_it_is_back(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        rows = life.write(range(8))
        life.wait_durable()
        os.rename(tmp_path / "drive-0", tmp_path / "away")
        life.wait_ailing()
        assert not life.do(Way.READ, range(8), life.fresh(8)).ok.any()
        os.rename(tmp_path / "away", tmp_path / "drive-0")
        life.wait_well()
        life.expect(range(8), rows)


def test_a_directory_that_was_emptied_is_used_again_by_the_next_engine(tmp_path: Path) -> None:
    with DiskLife(tmp_path, check_seconds=0.01) as life:
        life.write(range(8))
        shutil.rmtree(tmp_path / "drive-0")
        life.wait_ailing()
        (tmp_path / "drive-0").mkdir()
        wait_until(lambda: "No such file" in life.tier.ailment)
        assert not life.read(range(8))[1].ok.any()
    with DiskLife(tmp_path) as life:
        life.expect(range(8), life.write(range(8)))


def test_one_of_two_drives_costs_its_own_places_alone(tmp_path: Path) -> None:
    with DiskLife(tmp_path, num_drives=2) as life:
        numbers = range(80)
        rows = life.write(numbers)
        life.wait_durable()
        here = [n for d, at, _ in life.tier.stripes.split(np.arange(80)) if d == 1 for n in at]
        shutil.rmtree(tmp_path / "drive-0")
        wait_until(lambda: life.tier.figures().drives_away == 1)
        assert not life.tier.ailment, "there is still a drive"
        into, result = life.read(numbers)
        assert np.flatnonzero(result.ok).tolist() == here
        assert (into[here] == rows[here]).all()
        start = time.monotonic()
        assert not life.do(Way.WRITE, [0], life.fresh(1)).ok.any()
        assert time.monotonic() - start < LONG / 3, "writes there fail fast"
    with DiskLife(tmp_path, num_drives=2) as life:
        assert sorted(life.tier.recovered()[1].tolist()) == here


def test_what_was_forgotten_while_a_drive_was_away_stays_forgotten(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        life.write(range(8))
        life.wait_durable()
        (pid,) = pids(life)
        os.kill(pid, signal.SIGSTOP)
        life.tier.forget()
        os.kill(pid, signal.SIGKILL)
        life.wait_ailing()
        life.wait_well()
        assert not life.read(range(8))[1].ok.any()
        rows = life.write([3])
        life.expect([3], rows)
    with DiskLife(tmp_path) as life:
        assert life.tier.recovered()[1].tolist() == [3]


@pytest.mark.parametrize("is_back_at_once", [True, False])
def test_a_drive_that_was_away_when_all_was_forgotten_forgets_when_it_is_back(
    tmp_path: Path, is_back_at_once: bool
) -> None:
    with DiskLife(tmp_path, num_drives=2) as life:
        life.write(range(80))
        life.wait_durable()
        os.rename(tmp_path / "drive-1", tmp_path / "away")
        os.kill(pids(life)[1], signal.SIGKILL)
        wait_until(lambda: life.tier.figures().drives_away == 1)
        life.tier.forget()
        there = {d: at.tolist() for d, at, _ in life.tier.stripes.split(np.arange(80))}
        rows = life.write(there[0])
        life.wait_durable()
        if is_back_at_once:
            os.rename(tmp_path / "away", tmp_path / "drive-1")
            wait_until(lambda: not life.tier.figures().drives_away)
            assert not life.read(there[1])[1].ok.any()
            more = life.write(there[1][:3])
            life.wait_durable()
    if not is_back_at_once:
        os.rename(tmp_path / "away", tmp_path / "drive-1")
    with DiskLife(tmp_path, num_drives=2) as life:
        found = sorted(life.tier.recovered()[1].tolist())
        if is_back_at_once:
            assert found == sorted(there[0] + there[1][:3])
            life.expect(there[1][:3], more)
        else:
            assert found == there[0]
            assert not life.read(there[1])[1].ok.any()
        life.expect(there[0], rows)


def test_a_wrong_key_and_a_second_engine_are_refused_by_name(tmp_path: Path) -> None:
    with DiskLife(tmp_path, key=b"a" * 32) as life:
        rows = life.write([0])
        assert f"is open in process {os.getpid()}" in refusal(tmp_path, key=b"a" * 32)
        life.expect([0], rows)
    assert "encrypted with another key" in refusal(tmp_path, key=b"b" * 32)
    assert "holds encrypted blocks, and no key was given" in refusal(tmp_path)
    with DiskLife(tmp_path, key=b"a" * 32) as life:
        life.expect([0], rows)


def test_no_plain_byte_is_on_the_drive_with_a_key(tmp_path: Path) -> None:
    with DiskLife(tmp_path, key=b"a" * 32, block_bytes=5000) as life:
        rows = life.fresh(6)
        rows[:, :64] = np.frombuffer(b"a secret that nobody may read" * 3, np.uint8)[:64]
        life.write(range(6), rows)
        life.write(range(6), rows)
        life.expect(range(6), rows)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"a secret that" not in path.read_bytes(), path
            assert path.stat().st_mode & 0o777 == 0o600, path
        elif path.name.startswith("kvferry-"):
            assert path.stat().st_mode & 0o777 == 0o700, path


ENGINE = """
import sys
from pathlib import Path
from tests.fakes.disk_life import DiskLife
life = DiskLife(Path(sys.argv[1]))
life.write(range(10))
life.wait_durable()
print(life.tier._drives[0]._child.pid, flush=True)
life.write(range(10, 20))
print("written", flush=True)
sys.stdin.read()
"""


def start_engine(folder: Path) -> tuple[subprocess.Popen[str], int]:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    assert engine.stdout.readline() == "written\n"
    return engine, pid


def end(engine: subprocess.Popen[str]) -> None:
    engine.kill()
    engine.wait()
    for pipe in (engine.stdin, engine.stdout):
        assert pipe is not None
        pipe.close()


def test_a_drive_ends_with_its_engine_and_commits_what_was_answered(tmp_path: Path) -> None:
    engine, pid = start_engine(tmp_path)
    end(engine)
    wait_until(lambda: is_gone(pid))
    with DiskLife(tmp_path) as life:
        assert sorted(life.tier.recovered()[1].tolist()) == list(range(20))


def test_a_drive_that_is_slow_to_let_go_is_waited_for(tmp_path: Path) -> None:
    with DiskLife(tmp_path) as life:
        life.write(range(20))
    (folder,) = (tmp_path / "drive-0").glob("kvferry-*")
    lock = StoreLock.take(folder)  # as a drive that has its last commit still to do
    lives: list[DiskLife] = []
    opening = threading.Thread(target=lambda: lives.append(DiskLife(tmp_path)))
    opening.start()
    try:
        opening.join(1.0)
        assert opening.is_alive(), "it was refused"
    finally:
        lock.close()
    opening.join()
    with lives[0] as life:
        assert sorted(life.tier.recovered()[1].tolist()) == list(range(20))


def test_an_interrupt_is_the_engines_alone(tmp_path: Path) -> None:
    engine, pid = start_engine(tmp_path)
    assert os.getpgid(pid) != os.getpgid(engine.pid), "Ctrl-C reaches the engine's group"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    time.sleep(0.1)
    assert not is_gone(pid)
    end(engine)
    wait_until(lambda: is_gone(pid))
