"""The engine's memory as a child process reaches it: by address, from outside.

``process_vm_readv`` and ``process_vm_writev`` copy between two processes at the speed of memory.
Where the kernel forbids them (Yama, a container's rules), the engine opens its own
``/proc/self/mem`` and hands it over, which does the same more slowly.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.tiers.ipc.messages import Numbers

_IOV_MAX, _IOV_BYTES = 1024, 16
_PR_SET_PTRACER = 0x59616D61
_Call = Callable[..., int]
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _call = getattr(_libc, _name)
    _call.argtypes = (ctypes.c_int,) + (ctypes.c_void_p, ctypes.c_ulong) * 2 + (ctypes.c_ulong,)
    _call.restype = ctypes.c_ssize_t
for _name in ("pread", "pwrite"):
    _call = getattr(_libc, _name)
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


class EngineMemory:
    """Copies segments from and to the process ``pid``. Any thread may use it."""

    def __init__(self, pid: int, mem_fd: int | None = None) -> None:
        self._pid = pid
        self._mem_fd = mem_fd
        self._is_refused = False

    @property
    def way(self) -> str:
        """By which means the last copy was made."""
        return "/proc/self/mem" if self._is_refused else "process_vm"

    def fetch(self, here: Numbers, there: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Copy segments from there to here; return which of them are whole."""
        return self._move(_libc.process_vm_readv, _libc.pread, here, there, sizes)

    def deliver(self, here: Numbers, there: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Copy segments from here to there; return which of them are whole."""
        return self._move(_libc.process_vm_writev, _libc.pwrite, here, there, sizes)

    def _move(
        self, vectored: _Call, plain: _Call, here: Numbers, there: Numbers, sizes: Numbers
    ) -> npt.NDArray[np.bool_]:
        vectors = np.empty((2, len(sizes), 2), dtype=np.int64)
        vectors[0, :, 0], vectors[1, :, 0] = here, there
        vectors[:, :, 1] = sizes
        ours, theirs = vectors[0].ctypes.data, vectors[1].ctypes.data
        ok = np.zeros(len(sizes), dtype=bool)
        at = 0
        while at < len(sizes):
            count = min(_IOV_MAX, len(sizes) - at)
            if self._is_refused:
                (first, size), (second, _) = vectors[:, at].tolist()
                count, moved = 1, plain(self._mem_fd, first, size, second)
            else:
                skip = at * _IOV_BYTES
                moved = vectored(self._pid, ours + skip, count, theirs + skip, count, 0)
                if moved < 0:
                    code = ctypes.get_errno()
                    self._is_refused = code in _REFUSED and self._mem_fd is not None
                    if self._is_refused or code == errno.EINTR:
                        continue
            if at == 0 and count == len(sizes) and moved == int(sizes.sum()):
                ok[:] = True  # nearly always
                break
            ends = vectors[0, at : at + count, 1].cumsum()
            whole = int(np.searchsorted(ends, max(moved, 0), side="right"))
            ok[at : at + whole] = True
            at += whole
            if whole < count and moved <= 0:
                at += 1  # this segment cannot be reached; those after it may be
            elif whole < count:
                # It stopped at a missing page. The rest of this segment begins the next call,
                # which then moves nothing.
                rest = moved - (int(ends[whole - 1]) if whole else 0)
                vectors[:, at, 0] += rest
                vectors[:, at, 1] -= rest
        return ok


def let_children_in() -> None:
    """Let child processes reach this process's memory where Yama guards it.

    The kernel remembers one process that may, with all its descendants. With our own pid all our
    children may; a child's pid would be replaced by the next child's.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)


def open_own_memory() -> int | None:
    """Return this process's memory as a file, for a child; None where that is not allowed."""
    try:
        return os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
