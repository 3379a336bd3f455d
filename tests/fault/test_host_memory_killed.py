"""kill -9 at any moment: nothing is left in /dev/shm or on disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

# Says "ready" when it has host memory that still grows, and goes on growing and writing. In one
# write: `print` makes two where Python is told not to buffer, and two processes speak here.
PRIVATE = """
import os
from kvferry.hostmem.memory import HostMemory
with HostMemory(256 << 20, 1_000_003, chunk_bytes=4 << 20) as host:
    os.write(1, b"ready\\n")
    while True:
        host.tier.rows[: host.ready_slots] = 1
"""
SHARED = """
import os
from kvferry.hostmem.memory import HostMemory
from kvferry.hostmem.slots import SharedMemory, SlotLayout
slots = SlotLayout.of([1_000_003], chunk_bytes=4 << 20)
shared = SharedMemory.create(256 << 20, slots)
if os.fork() == 0:
    shared = SharedMemory.open(shared.handle, slots)
with HostMemory(0, 1_000_003, shared=shared, chunk_bytes=4 << 20) as host:
    os.write(1, b"ready\\n")
    while True:
        host.tier.rows[: host.ready_slots] = 1
"""


def ours_in_shared_memory() -> set[str]:
    # Names only, one tier: what others keep there comes and goes while we look.
    return {name for name in os.listdir("/dev/shm") if "kvferry" in name}


@contextmanager
def running(program: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program and whatever it forks: killed with it by the end, whatever the test finds."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, **how
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        process.stdout.close()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"ready\n"


def shared_memory_in_use() -> int:
    """Bytes of shared memory on this machine: few others use any, so it tells ours."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


@pytest.mark.parametrize("program", [PRIVATE, SHARED], ids=["private", "shared"])
def test_nothing_is_left_behind(program: str, tmp_path: Path) -> None:
    rng = random.Random(program)
    env = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    for moment in range(4):
        before = ours_in_shared_memory()
        with running(program, cwd=tmp_path, env=env) as process:
            if moment:  # the first one dies before it is ready, somewhere on the way
                wait_until_ready(process)
            time.sleep(rng.random() * 0.3)
            assert process.poll() is None, "it ended by itself"
            during = ours_in_shared_memory()
        assert during <= before
        assert ours_in_shared_memory() <= before
        assert list(tmp_path.rglob("*")) == []


def shared_memory_of(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))


def test_the_memory_of_a_killed_process_is_free_again() -> None:
    with running(SHARED) as process:
        wait_until_ready(process)
        end = time.monotonic() + 60
        while shared_memory_of(process) < 128 << 20:
            assert time.monotonic() < end, "it never took the memory"
            time.sleep(0.05)
        held = shared_memory_in_use()
    end = time.monotonic() + 60
    while held - shared_memory_in_use() < 32 << 20:
        assert time.monotonic() < end, "the memory did not come back"
        time.sleep(0.05)
