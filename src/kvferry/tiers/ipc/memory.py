"""Memory shared by an engine and a child process: the engine's own, and a status page.

``process_vm_readv`` and ``process_vm_writev`` copy between two processes at the speed of memory. If
the kernel forbids them (Yama, a container's rules), the engine opens its own ``/proc/self/mem`` for
the child. Copies through it are slower.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
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
    """Copies segments from and to the memory of process ``pid``. Any thread may use it."""

    def __init__(self, pid: int, mem_fd: int | None = None) -> None:
        self._pid = pid
        self._mem_fd = mem_fd
        self._is_refused = False

    def fetch(self, here: Numbers, there: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Copy segments from ``there`` in the engine to ``here``; return which are whole."""
        return self._move(_libc.process_vm_readv, _libc.pread, here, there, sizes)

    def deliver(self, here: Numbers, there: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Copy segments from ``here`` to ``there`` in the engine; return which are whole."""
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
                ok[:] = True  # the usual case
                break
            ends = vectors[0, at : at + count, 1].cumsum()
            whole = int(np.searchsorted(ends, max(moved, 0), side="right"))
            ok[at : at + whole] = True
            at += whole
            if whole < count and moved <= 0:
                at += 1  # this segment cannot be accessed; those after it may be
            elif whole < count:
                # It stopped at a missing page. The next call begins with the rest of this segment,
                # moves nothing, and so skips it.
                rest = moved - (int(ends[whole - 1]) if whole else 0)
                vectors[:, at, 0] += rest
                vectors[:, at, 1] -= rest
        return ok


def allow_child_access() -> None:
    """Let child processes access this process's memory if Yama restricts that.

    The kernel remembers one process that may, with all its descendants. Our own pid admits all our
    children; a child's pid would be replaced by the next child's.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)


def open_own_memory() -> int | None:
    """Open this process's memory as a file, for a child; return None if that is not allowed."""
    try:
        return os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


PAGE_BYTES = 4096
MAX_THREADS = 64
HEARTBEAT = 0
_COPYING = 64


class StatusPage:
    """Counters and arrays that the child writes and the engine reads; neither waits for the other.

    Owns its mapping and its descriptor; leaves the meaning of the counters to its users::

        words 0..      counters, one word each; word 0 is the heartbeat
        words 64..     for each thread of the child: 1 while it writes into the engine's memory
        from 4096 on   arrays that the child writes once for the engine
    """

    def __init__(self, fd: int | None = None) -> None:
        """Map the page behind ``fd``, or make a new one."""
        self.fd = os.memfd_create("kvferry-child", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, PAGE_BYTES)
        self._mapping = mmap.mmap(self.fd, PAGE_BYTES)
        self._words = np.frombuffer(self._mapping, dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, counter: int, amount: int) -> None:
        """Add to a counter. Threads of the child may add concurrently."""
        with self._lock:
            self._words[counter] += amount

    def put(self, counter: int, value: int) -> None:
        self._words[counter] = value

    def get(self, counter: int) -> int:
        return int(self._words[counter])

    def set_copying(self, thread: int, is_copying: bool) -> None:
        """Flag that a thread writes into the engine's memory; called around every such write."""
        self._words[_COPYING + thread] = is_copying

    @property
    def is_copying(self) -> bool:
        """Whether any thread of the child is writing into the engine's memory."""
        return bool(self._words[_COPYING : _COPYING + MAX_THREADS].any())

    def array_memory(self, num_bytes: int) -> memoryview:
        """Return the memory behind the page, for arrays that the child writes and the engine reads.

        It is freed with the last view.
        """
        if os.fstat(self.fd).st_size < PAGE_BYTES + num_bytes:
            os.ftruncate(self.fd, PAGE_BYTES + num_bytes)
        return memoryview(mmap.mmap(self.fd, PAGE_BYTES + num_bytes))[PAGE_BYTES:]

    def close(self) -> None:
        """Close the descriptor; the counters can still be read."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
