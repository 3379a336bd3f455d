"""The speed of the drive under a directory, by short raw writes and reads.

A child process measures it, because a drive may hang. It writes at most ``MOST_BYTES`` for at most
``MOST_SECONDS`` to a file without a name.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MiB = 1 << 20
MOST_BYTES = 256 * MiB
MOST_SECONDS = 0.75
"""Most seconds of writing, and again of reading."""

HANG_SECONDS = 15.0
_PIECE = 8 * MiB
_THREADS = 4


@dataclass(frozen=True)
class DriveSpeed:
    """Rates in bytes per second, None if they were not measured."""

    error: str = ""
    is_direct: bool = False
    read_rate: float | None = None
    write_rate: float | None = None


def measure_drive(directory: str) -> DriveSpeed:
    """Measure a directory's drive in a child process, with a deadline."""
    from kvferry.tiers.ipc.process import run_module  # not needed in the child

    try:
        return DriveSpeed(**json.loads(run_module(__name__, directory.encode(), HANG_SECONDS)))
    except TimeoutError:
        return DriveSpeed(error=f"it has not answered for {HANG_SECONDS:.0f} seconds")
    except (OSError, ValueError, TypeError) as error:
        return DriveSpeed(error=f"it could not be measured: {error}")


def nearest_directory(path: str) -> str:
    """Return the path if it is a directory, else its nearest parent that is one."""
    found = Path(path)
    while not found.is_dir() and found != found.parent:
        found = found.parent
    return str(found)


def file_system(path: str, mounts: str) -> str:
    """Return the type of a path's file system, from the text of ``/proc/self/mountinfo``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        point = fields[4].encode().decode("unicode_escape")  # a space is written \040
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, kinds[0]
    return kind


def measure(directory: str) -> DriveSpeed:
    """Write, then read the same bytes, with direct I/O if the file system supports it."""
    is_direct = False
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = file.fileno()
            piece = mmap.mmap(-1, _PIECE)
            piece[:] = os.urandom(_PIECE)
            with suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
                is_direct = os.pwrite(fd, piece, 0) == _PIECE
            if not is_direct:
                fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            size, began = 0, time.perf_counter()
            while size < MOST_BYTES and (not size or time.perf_counter() - began < MOST_SECONDS):
                if os.pwrite(fd, piece, size) != _PIECE:
                    raise OSError("a write was cut short")
                size += _PIECE
            os.fdatasync(fd)
            write_rate = size / (time.perf_counter() - began)
            if not is_direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return DriveSpeed("", is_direct, _read_rate(fd, size), write_rate)
    except OSError as error:
        return DriveSpeed(error=error.strerror or str(error), is_direct=is_direct)


def _read_rate(fd: int, size: int) -> float:
    began = time.perf_counter()

    def read(at: int) -> int:
        is_late = time.perf_counter() - began > MOST_SECONDS
        return 0 if is_late else os.preadv(fd, [mmap.mmap(-1, _PIECE)], at)

    with ThreadPoolExecutor(_THREADS) as pool:
        total = sum(pool.map(read, range(0, size, _PIECE)))
    return total / (time.perf_counter() - began)


def main() -> None:
    """Run in the child: measure the directory on standard input."""
    print(json.dumps(asdict(measure(sys.stdin.read()))))
