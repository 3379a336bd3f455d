"""Whether a process that we start may copy from and to our memory, as a drive's process does.

::

    python -m kvferry.doctor.reach PID ADDRESS    waits for a line, copies a word there and back
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from kvferry.tiers.disk.engine_memory import EngineMemory, let_children_in, open_own_memory

_SECONDS = 20.0
_WORD = 0x6B76666572727921


def look_at_reach() -> str:
    """By which way a child reaches our memory; empty if by none."""
    memory = open_own_memory()
    word = np.array([_WORD, 0], dtype=np.int64)
    command = [sys.executable, "-m", "kvferry.tools.doctor.reach", str(os.getpid())]
    command += [str(word.ctypes.data), str(-1 if memory is None else memory)]
    fds = () if memory is None else (memory,)
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(
            command, text=True, pass_fds=fds, stdin=pipe, stdout=pipe, stderr=pipe
        ) as child:
            let_children_in()
            try:
                said, _ = child.communicate("go\n", timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                return ""
    finally:
        if memory is not None:
            os.close(memory)
    return said.strip() if word[1] == _WORD else ""


def main() -> None:
    pid, address, memory = (int(word) for word in sys.argv[1:])
    sys.stdin.readline()
    reach = EngineMemory(pid, memory if memory >= 0 else None)
    here, size = np.zeros(1, dtype=np.int64), np.array([8])
    place = np.array([here.ctypes.data])
    reach.fetch(place, np.array([address]), size)
    reach.deliver(place, np.array([address + 8]), size)
    print(reach.way)


if __name__ == "__main__":
    main()
