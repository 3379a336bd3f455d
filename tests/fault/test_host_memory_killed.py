"""kill -9 at any moment: nothing is left in /dev/shm or on disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says "ready" when it has host memory that still grows, and goes on growing and writing.
PRIVATE = """
import sys
from kvferry.tiers import HostMemory
with HostMemory(256 << 20, 1_000_003, chunk_bytes=4 << 20) as host:
    print("ready", flush=True)
    while True:
        host.tier.rows[: host.ready_slots] = 1
"""
SHARED = """
import os, sys
from kvferry.tiers import HostMemory
shared = HostMemory.share(256 << 20)
if os.fork() == 0:
    shared = HostMemory.share(shared.handle)
with HostMemory(0, 1_000_003, shared=shared, chunk_bytes=4 << 20) as host:
    print("ready", flush=True)
    while True:
        host.tier.rows[: host.ready_slots] = 1
"""


def listing(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*")}


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.parametrize("program", [PRIVATE, SHARED], ids=["private", "shared"])
def test_nothing_is_left_behind(program: str, tmp_path: Path) -> None:
    shm, rng = Path("/dev/shm"), random.Random(program)
    env = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    for moment in range(4):
        before = listing(shm)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=env,
            start_new_session=True,
        )
        assert process.stdout is not None
        if moment:  # the first one dies before it is ready, somewhere on the way
            assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.3)
        assert process.poll() is None, "it ended by itself"
        during = listing(shm) - before
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        assert not {name for name in during if "kvferry" in name}
        assert not {name for name in listing(shm) - before if "kvferry" in name}
        assert listing(tmp_path) == set()


def test_the_memory_of_a_killed_process_is_free_again() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SHARED], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    held = available()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    end = time.monotonic() + 10
    while available() - held < 32 << 20:  # others on this machine move too
        assert time.monotonic() < end, "the memory did not come back"
        time.sleep(0.05)
