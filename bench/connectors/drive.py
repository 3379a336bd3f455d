"""What the drive under a directory gives: large reads past the page cache, at several depths."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MiB = 1 << 20
_DEPTHS = ((4, 8), (8, 4), (8, 8), (16, 4))
"""Threads, and the MiB of one of their reads."""


class RawDrive:
    """A file of random bytes on the drive, read again and again. Owns the file."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._path = folder / "raw-read-speed"
        self._num_bytes = num_bytes // (8 * MiB) * 8 * MiB
        self.rates: list[float] = []
        self.is_direct = _can_be_direct(folder)
        self._write()

    def _write(self) -> None:
        """Random, so that no drive can make less of it."""
        piece, chance = _aligned(8 * MiB), np.random.default_rng()
        with _opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self.is_direct) as fd:
            for _ in range(self._num_bytes // len(piece)):
                piece[:] = chance.bytes(len(piece))
                _write_all(fd, piece)
            os.fsync(fd)

    def measure(self, seconds: float = 0.6) -> float:
        """Bytes per second of the best depth, now; the best so far is :attr:`best`."""
        found = max(self._rate(threads, mib * MiB, seconds) for threads, mib in _DEPTHS)
        self.rates.append(found)
        return found

    @property
    def best(self) -> float:
        return max(self.rates)

    def _rate(self, num_threads: int, size: int, seconds: float) -> float:
        forget_pages(self._path)
        lock, places = threading.Lock(), self._places(size)
        end = time.perf_counter() + seconds

        def read() -> int:
            buffer, done = _aligned(size), 0
            with _opened(self._path, os.O_RDONLY, self.is_direct) as fd:
                while time.perf_counter() < end:
                    with lock:
                        at = next(places)
                    done += os.preadv(fd, [buffer], at)
            return done

        began = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            total = sum(job.result() for job in [pool.submit(read) for _ in range(num_threads)])
        return total / (time.perf_counter() - began)

    def _places(self, size: int) -> Iterator[int]:
        while True:
            yield from range(0, self._num_bytes - size + 1, size)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def forget_pages(path: Path) -> None:
    """Have the kernel drop what it holds of this file, or of all files below this folder."""
    for file in (
        [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    ):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _can_be_direct(folder: Path) -> bool:
    probe = folder / "raw-probe"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        os.write(fd, _aligned(4096))
    except OSError:
        return False
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
    return True


@contextmanager
def _opened(path: Path, flags: int, is_direct: bool) -> Iterator[int]:
    fd = os.open(path, flags | (os.O_DIRECT if is_direct else 0), 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _aligned(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


def _write_all(fd: int, data: mmap.mmap) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])
