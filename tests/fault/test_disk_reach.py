"""How drive processes reach the engine's memory where the kernel guards it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.disk_life import DiskLife
from tests.fault.test_disk_processes import pids

from kvferry.tiers.ipc import memory

SET_PTRACER = 0x59616D61


def descends(pid: int, ancestor: int) -> bool:
    """As Yama asks it: whether one is the other, or its child, or its child's child."""
    while pid > 0:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_yama_lets_every_drive_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel remembers who was named last. Seen red with each child's own name."""
    named: list[int] = []
    real: Any = memory._libc

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def prctl(self, option: int, who: ctypes.c_ulong, *rest: int) -> int:
            assert option == SET_PTRACER
            named.append(who.value)
            return int(real.prctl(option, who, *rest))

    monkeypatch.setattr(memory, "_libc", Watched())
    with DiskLife(tmp_path, num_drives=3) as life:
        drives = pids(life)
        assert len(drives) == 3
        assert all(descends(pid, named[-1]) for pid in drives)
        assert not descends(os.getppid(), named[-1]), "and nobody else"


FORBIDDEN = """
import ctypes, sys
from pathlib import Path
import numpy as np
from tests.fakes.disk_life import DiskLife

class Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001
steps = (Step * 5)(Step(LOAD, 0, 0, 0), Step(EQUAL, 1, 0, 310), Step(EQUAL, 0, 1, 311),
                   Step(RETURN, 0, 0, EPERM), Step(RETURN, 0, 0, ALLOW))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
if libc.prctl(22, 2, ctypes.byref(Program(5, steps)), 0, 0) != 0:
    sys.exit(77)
here = (ctypes.c_char * 8)()
vector = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
import os
assert libc.process_vm_readv(os.getpid(), vector, 1, vector, 1, 0) == -1
assert ctypes.get_errno() == 1
with DiskLife(Path(sys.argv[1]), num_drives=2) as life:
    rows = life.write(range(40))
    life.expect(range(40), rows)
    assert not any(life.tier.figures().failed.values()), life.tier.figures()
print("whole")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_where_the_kernel_forbids_it_the_engines_own_file_does(tmp_path: Path) -> None:
    """A filter as containers have it refuses process_vm_readv and its twin, in every process."""
    run = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if run.returncode == 77:
        pytest.skip("no seccomp here")
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr
