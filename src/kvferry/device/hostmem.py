"""Making host memory reachable for the card: populated and registered, chunk by chunk.

One call for the whole pool is slow (one thread) and, at 512 GiB or more, refused by recent
drivers. Chunks end between slots, because one copy may not cross from one registration into the
next::

    slots      |0|1|2|3|4|5|6|7|8|9|...
    chunks     |   chunk 0     |   chunk 1     |...     every boundary is a slot's and a page's
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvferry.device.driver import Driver
from kvferry.errors import DriverError, InputError

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""16 GiB in 0.6 s with 8 threads; 1 GiB chunks took 2 s (H200 host, 16 vCPU, driver 580)."""

NUM_THREADS = 8
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


def chunk_size(slot_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """The least multiple of slots and pages that is no smaller than ``chunk_bytes``."""
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    return unit * math.ceil(chunk_bytes / unit)


class HostRegistration:
    """Owns the registration of one run of host memory; leaves the memory to its owner.

    The constructor returns at once; ``wait`` returns when every chunk is usable. Memory must stay
    mapped until ``close``. If any chunk is refused, ``wait`` raises and nothing stays registered.
    """

    def __init__(
        self,
        driver: Driver,
        address: int,
        num_bytes: int,
        *,
        slot_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        if address % mmap.PAGESIZE:
            raise InputError(
                f"host memory at {address:#x} does not begin on a page of {mmap.PAGESIZE} bytes; "
                "map it instead of allocating it"
            )
        if num_bytes < 1 or slot_bytes < 1 or chunk_bytes < 1:
            raise InputError("bytes to register, slot size and chunk size must all be positive")
        self._driver = driver
        self._address = address
        self._num_bytes = num_bytes
        self.chunk_bytes = chunk_size(slot_bytes, chunk_bytes)
        self._lock = threading.Lock()
        self._registered: list[int] = []
        self._failure: Exception | None = None
        self._closed = False
        _advise(address, num_bytes, _MADV_HUGEPAGE)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvferry-pin")
        self._chunks: list[Future[None]] = [
            self._pool.submit(self._register, start, min(self.chunk_bytes, num_bytes - start))
            for start in range(0, num_bytes, self.chunk_bytes)
        ]
        self._pool.shutdown(wait=False)  # no more chunks; the threads end after the last one

    @property
    def num_ready(self) -> int:
        """Bytes from the start of the memory that are usable now."""
        ready = 0
        for chunk in self._chunks:
            if not chunk.done() or self._failure is not None:
                break
            ready += self.chunk_bytes
        return min(ready, self._num_bytes)

    def wait(self) -> HostRegistration:
        """Block until all chunks are registered; raises the first refusal, after undoing all."""
        wait(self._chunks)
        if self._failure is not None:
            self.close()
            raise self._failure
        return self

    def close(self) -> None:
        """Unregister every chunk. Nothing may be copying to or from them. Safe to call twice."""
        with self._lock:
            self._closed = True
        wait(self._chunks)
        with self._lock:
            registered, self._registered = self._registered, []
        if not registered:
            return
        with self._driver.current():
            for address in registered:
                try:
                    self._driver.unregister_host(address)
                except DriverError as error:
                    log.warning("host memory stays registered: %s", error)

    def _register(self, start: int, num_bytes: int) -> None:
        if self._closed or self._failure is not None:
            return
        try:
            # Touched by this thread first: registering untouched memory faults page by page,
            # under a lock in the kernel that all threads share.
            _advise(self._address + start, num_bytes, _MADV_POPULATE_WRITE)
            with self._driver.current():
                self._driver.register_host(self._address + start, num_bytes)
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
            return
        with self._lock:
            self._registered.append(self._address + start)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Advice may be refused (old kernels): it only makes registration faster."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(address, pages, advice)
