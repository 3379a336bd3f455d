"""What the drive under a directory gives: its file system, and short raw reads and writes.

::

    python -m kvferry.doctor.drive DIRECTORY    measured in a process of its own: a drive may hang

At most ``MOST_BYTES`` are written, for at most ``MOST_SECONDS``, to a file that has no name.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MiB = 1 << 20
MOST_BYTES = 256 * MiB
MOST_SECONDS = 0.75
"""For each of writing and reading."""

HANGS_AFTER = 15.0
_PIECE = 8 * MiB
_THREADS = 4


@dataclass(frozen=True)
class DriveFacts:
    """What was found; rates in bytes per second, None where nothing was measured."""

    error: str = ""
    is_direct: bool = False
    read_rate: float | None = None
    write_rate: float | None = None


def look_at_drive(directory: str) -> DriveFacts:
    """Measure in a child, with a bound on all of it."""
    command = [sys.executable, "-m", "kvferry.tools.doctor.drive", directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            out, _ = child.communicate(timeout=HANGS_AFTER)
            return DriveFacts(**json.loads(out))
        except subprocess.TimeoutExpired:
            child.kill()
            return DriveFacts(error=f"it has not answered for {HANGS_AFTER:.0f} seconds")
        except (ValueError, TypeError):
            return DriveFacts(error="it could not be measured")


def nearest_directory(path: str) -> str:
    """The path, or what of it exists."""
    found = Path(path)
    while not found.is_dir() and found != found.parent:
        found = found.parent
    return str(found)


def file_system(path: str, mounts: str) -> str:
    """The kind of file system a path is on, from the text of ``/proc/self/mountinfo``."""
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


def measure(directory: str) -> DriveFacts:
    """Write, then read what was written, past the page cache where the file system can."""
    try:
        fd, is_direct = _open_nameless(directory)
    except OSError as error:
        return DriveFacts(error=error.strerror or str(error))
    try:
        piece = mmap.mmap(-1, _PIECE)
        piece[:] = os.urandom(_PIECE)
        began = time.perf_counter()
        size = _until(lambda at: os.pwrite(fd, piece, at), MOST_BYTES)
        os.fdatasync(fd)
        write_rate = size / (time.perf_counter() - began)
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return DriveFacts("", is_direct, _read_rate(fd, size), write_rate)
    except OSError as error:
        return DriveFacts(error=error.strerror or str(error), is_direct=is_direct)
    finally:
        os.close(fd)


def _read_rate(fd: int, size: int) -> float:
    starts = iter(range(0, size, _PIECE))
    began = time.perf_counter()

    def read() -> int:
        buffer, done = mmap.mmap(-1, _PIECE), 0
        for at in starts:
            done += os.preadv(fd, [buffer], at)
            if time.perf_counter() - began > MOST_SECONDS:
                break
        return done

    with ThreadPoolExecutor(_THREADS) as pool:
        total = sum(job.result() for job in [pool.submit(read) for _ in range(_THREADS)])
    return total / (time.perf_counter() - began)


def _until(write: Callable[[int], int], most: int) -> int:
    """Whole pieces, one after the other, until the bytes or the time are used up."""
    at, end = 0, time.perf_counter() + MOST_SECONDS
    while at < most and (at == 0 or time.perf_counter() < end):
        if write(at) != _PIECE:
            raise OSError("a write was cut short")
        at += _PIECE
    return at


def _open_nameless(directory: str) -> tuple[int, bool]:
    """A file nobody sees and that is gone when it is closed; whether it is past the page cache."""
    for direct in (os.O_DIRECT, 0):
        with suppress(OSError):
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | direct, 0o600)
            if not direct or _takes_pages(fd):
                return fd, bool(direct)
            os.close(fd)
    name = os.path.join(directory, f".kvferry-doctor-{os.getpid()}")
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.unlink(name)
    return fd, False


def _takes_pages(fd: int) -> bool:
    try:
        return os.pwrite(fd, mmap.mmap(-1, 4096), 0) == 4096
    except OSError:
        return False


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
