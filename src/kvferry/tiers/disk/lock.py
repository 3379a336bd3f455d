"""Who has a store open: one process at a time, and its name for all others.

The kernel keeps the lock (``flock``) and lets it go with the process, however that ends. What is
written in the file is only for people; when it was written says when the store was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from kvferry.errors import StoreInUseError

FILE_NAME = "lock"
_TIMED = (FILE_NAME, "journal-0", "journal-1")
_MOST_BYTES = 4096
_MOST_COMMAND = 200
_TRIES, _PAUSE_SECONDS = 5, 0.02


class StoreLock:
    """The right to a folder's store, until ``release`` or the end of the process."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd: int | None = fd

    @classmethod
    def take(cls, folder: Path, *, on_behalf_of: int | None = None) -> StoreLock:
        """StoreInUseError if another process has it; its words name who, where and what to do.

        ``on_behalf_of`` is the process to name, if it is not this one.
        """
        lock = try_lock(folder)
        if lock is None:
            raise StoreInUseError(
                f"{folder} is open in {holder(folder) or 'another process'}; two servers cannot "
                "share a store: stop that one, or give this one another directory (setting disk)"
            )
        try:
            lock._sign(on_behalf_of or os.getpid())
        except BaseException:
            lock.release()
            raise
        return lock

    def _sign(self, pid: int) -> None:
        """Say who holds it, and that the store is in use now."""
        words = {
            "pid": pid,
            "host": socket.gethostname(),
            "command": _command(pid),
            "since": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a full disk: it is locked all the same
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, json.dumps(words).encode()[:_MOST_BYTES], 0)

    def release(self) -> None:
        """Let it go. Safe to call twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # the drive may be gone; the lock goes all the same
                os.ftruncate(fd, 0)
                os.utime(fd)
            os.close(fd)


def try_lock(folder: Path) -> StoreLock | None:
    """The lock of a folder, or None while another process has it. Writes nothing."""
    lock = _try_once(folder)
    for _ in range(_TRIES):
        if lock is not None:
            break
        time.sleep(_PAUSE_SECONDS)  # it may be somebody who only looks
        lock = _try_once(folder)
    return lock


def _try_once(folder: Path) -> StoreLock | None:
    path = folder / FILE_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A store that was removed between the two calls left us the lock of nothing.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return StoreLock(folder, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def holder(folder: Path) -> str:
    """Who says to have the store open, for people; empty where nobody has it.

    Asks the kernel first: what a killed process wrote is not believed.
    """
    try:
        fd = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        # Shared, and let go at once: whoever opens the store in this moment tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return _said(os.pread(fd, _MOST_BYTES, 0))
    finally:
        os.close(fd)


def set_last_used(folder: Path, when: float) -> None:
    """It was opened for others' sake: it counts as used when it was before."""
    for name in _TIMED:
        with contextlib.suppress(OSError):
            os.utime(folder / name, (when, when))


def last_used(folder: Path) -> float:
    """When the store was last opened, closed or written to, in seconds since 1970."""
    times = [0.0]
    for name in _TIMED:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _said(data: bytes) -> str:
    try:
        words = json.loads(data)
        who = f"process {int(words['pid'])} on {words['host']}"
        return f"{who} ({words['command']}) since {words['since']} UTC"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    text = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in text)[:_MOST_COMMAND] or "?"
