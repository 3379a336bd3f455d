"""Memory from the kernel: mapped at once, given pages later, freed with the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.quantities import format_size
from kvferry.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


class Memory(Protocol):
    """A run of bytes that begins on a page. It stays mapped while a reference to ``bytes`` exists.

    ``fd`` is the file that other processes may map; None for private memory.
    """

    @property
    def bytes(self) -> Bytes: ...
    @property
    def fd(self) -> int | None: ...


class PrivateMemory:
    """Anonymous memory of this process alone, in huge pages where the machine allows them.

    A crash leaves nothing behind. A forked child does not inherit it: the fork would have to copy
    all pages of a pinned pool.
    """

    fd: int | None = None

    def __init__(self, num_bytes: int) -> None:
        # Room to begin on a huge page: kernels before 6.7 do not align by themselves.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = map_memory(-1, num_bytes + HUGE_PAGE, flags)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE
        self.bytes: Bytes = whole[skip : skip + num_bytes]
        ask_huge(self.bytes)
        advise(self.bytes, _MADV_DONTFORK)


def ask_huge(memory: Bytes) -> None:
    """Ask for huge pages, and for core dumps without this memory."""
    advise(memory, _MADV_HUGEPAGE)
    advise(memory, _MADV_DONTDUMP)


def map_memory(fd: int, num_bytes: int, flags: int) -> mmap.mmap:
    """As ``mmap.mmap``; a refusal says what was asked and what to do."""
    try:
        return mmap.mmap(fd, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"host: {format_size(num_bytes)} of memory cannot be mapped: {error}; ask for less, "
            "or raise the address space limit (ulimit -v) or vm.overcommit_memory"
        ) from error


def advise(memory: Bytes, advice: int) -> bool:
    """Whether the kernel took the advice; it may be older than the advice, and need not."""
    return _libc.madvise(memory.ctypes.data, memory.nbytes, advice) == 0


def populate(memory: Bytes) -> None:
    """Back every page of ``memory`` now; it must not be in use yet.

    OSError where the machine has no memory left.
    """
    # A call for each huge page: several threads that each ask for 64 MiB at once get 5.5 GB/s of
    # memory that a hypervisor has yet to back, with 2 MiB at a time 8. (16 vCPU, Linux 6.18.)
    for start in range(0, memory.nbytes, HUGE_PAGE):
        _populate_page(memory[start : start + HUGE_PAGE])


def _populate_page(memory: Bytes) -> None:
    while not advise(memory, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14
            memory[:: mmap.PAGESIZE] = 0
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, f"{memory.nbytes} bytes got no pages: {os.strerror(code)}")
