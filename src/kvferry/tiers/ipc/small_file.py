"""Reads and writes small files on a drive that may hang, each in a child process.

A thread in a call that never returns would keep the engine from starting or ending.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

_MOST_BYTES = 1 << 20
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_small(path: Path, timeout: float) -> bytes:
    """Return a file's first MiB; empty if there is no file. Raises OSError or TimeoutError."""
    lines = _run_in_child(path, b"", timeout).splitlines()
    return bytes.fromhex(lines[-1].decode()) if lines else b""


def write_small(path: Path, data: bytes, timeout: float) -> None:
    """Replace a file atomically. Raises OSError or TimeoutError."""
    _run_in_child(path, data, timeout)


def _run_in_child(path: Path, data: bytes, timeout: float) -> bytes:
    from kvferry.tiers.ipc.process import run_module  # not needed in the child

    return run_module(__name__, os.fsencode(path) + b"\0" + data, timeout)


def main() -> None:
    """Run in the child: write the data that follows the path, or print the file's bytes as hex."""
    name, _, data = sys.stdin.buffer.read().partition(b"\0")
    path = Path(os.fsdecode(name))
    try:
        print(_read(path).hex()) if not data else _write(path, data)
    except OSError as error:
        sys.exit(f"{error.strerror or error}")


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(_MOST_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
