"""Ways to keep blocks on a drive, each behind the same two calls: write all, read all.

Every way moves the blocks ``0, 1, ...`` of the same data between the same host memory and a folder,
``IN_FLIGHT`` bytes at a time, as an engine would that never waits for the last batch before it
sends the next. Bytes that were read are compared after the clock has stopped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.quantities import GiB, MiB
from kvferry.hostmem.slots import Bytes, PrivateMemory, populate
from kvferry.tiers.contract import Batch, BatchId, Way
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.superblock import DiskBound, StoreIdentity
from kvferry.tiers.disk.tier import DiskTier
from kvferry.types import TierName

IN_FLIGHT = 256 * MiB
BATCH_BYTES = 32 * MiB
NUM_FILE_THREADS = 16


class Blocks:
    """The data, and where it is in host memory: ``memory`` holds all of it once."""

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_bytes // block_bytes
        self.num_bytes = self.num_blocks * block_bytes
        self.memory: Bytes = PrivateMemory(self.num_bytes).bytes
        populate(self.memory)
        self._seed = 0
        self.refill()

    def refill(self) -> None:
        """Fresh bytes: every block another, none of zeros that a drive could leave out."""
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        words = self.memory.view(np.uint64)
        part = 8 * MiB // 8
        noise = rng.integers(0, 1 << 63, part, dtype=np.uint64)
        for at in range(0, len(words), part):
            chunk = words[at : at + part]
            np.multiply(noise[: len(chunk)], np.uint64(2 * at + 1), out=chunk)
        self._sums = self._sum()

    def poison(self) -> None:
        self.memory[:] = 0xEE

    def check(self) -> None:
        assert (self._sum() == self._sums).all(), "wrong bytes were read"

    def _sum(self) -> Any:
        words = self.memory.view(np.uint64).reshape(self.num_blocks, -1)
        return np.bitwise_xor.reduce(words, axis=1) + words[:, ::511].sum(axis=1)

    def batches(self) -> Iterator[tuple[int, int]]:
        """First block and number of blocks of each batch."""
        step = max(1, BATCH_BYTES // self.block_bytes)
        for first in range(0, self.num_blocks, step):
            yield first, min(step, self.num_blocks - first)


class DiskWay(Protocol):
    """One way to keep blocks."""

    def write(self) -> None: ...
    def read(self) -> None: ...
    def close(self) -> None: ...


class Raw:
    """The drive itself: one file, long O_DIRECT calls by a few threads."""

    def __init__(self, folder: Path, blocks: Blocks, num_threads: int, call_bytes: int) -> None:
        self._blocks = blocks
        self._call_bytes = call_bytes
        self._num_threads = num_threads
        path = folder / "raw"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, blocks.num_bytes)

    def write(self) -> None:
        self._all(os.pwritev)

    def read(self) -> None:
        self._all(os.preadv)

    def _all(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        view = self._blocks.memory.data

        def part(at: int) -> None:
            data = view[at : at + self._call_bytes]
            assert call(self._fd, [data], at) == len(data)

        with ThreadPoolExecutor(self._num_threads) as threads:
            list(threads.map(part, range(0, len(view), self._call_bytes)))

    def close(self) -> None:
        os.close(self._fd)


class Tier:
    """kvferry's tier, through its contract."""

    def __init__(
        self, folder: Path, blocks: Blocks, options: dict[str, float], key: bytes | None = None
    ) -> None:
        """``options``: of :class:`DriveSetup`, where not its own defaults are to be tried."""
        self._blocks = blocks
        rng = np.random.default_rng(7)
        self._keys = Keys(rng.integers(0, 1 << 63, (blocks.num_blocks, 4), dtype=np.uint64))
        size = blocks.num_bytes + blocks.num_blocks * 4096 + 64 * MiB
        identity = StoreIdentity(bytes(32), blocks.block_bytes, is_sealed=key is not None)
        setup = DriveSetup(str(folder), identity, DiskBound(size), os.getpid(), key)
        setup = replace(setup, **options)  # type: ignore[arg-type]
        self._tier = DiskTier(TierName("disk"), [setup])
        self._next = 0

    def write(self) -> None:
        self._all(Way.WRITE)

    def read(self) -> None:
        self._all(Way.READ)

    def _all(self, way: Way) -> None:
        blocks, tier = self._blocks, self._tier
        size = np.array([blocks.block_bytes])
        under_way = 0
        for first, count in blocks.batches():
            places = np.arange(first, first + count)
            addresses = blocks.memory.ctypes.data + places[:, None] * blocks.block_bytes
            keys = self._keys[first : first + count]
            end = time.monotonic() + 60
            self._next += 1
            tier.submit(Batch(BatchId(self._next), way, keys, end, addresses, size, places))
            under_way += 1
            while under_way * BATCH_BYTES >= IN_FLIGHT:
                under_way -= self._ended()
                time.sleep(0.0005)
        for result in tier.drain():
            assert result.ok.all(), result.reasons

    def _ended(self) -> int:
        results = self._tier.poll()
        for result in results:
            assert result.ok.all(), result.reasons
        return len(results)

    def close(self) -> None:
        self._tier.close()


class FilePerBlock:
    """A file for every block, as published systems have it: written aside, then renamed."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self._blocks = blocks
        self._folder = folder / "files"
        self._folder.mkdir()
        self._threads = ThreadPoolExecutor(NUM_FILE_THREADS)

    def write(self) -> None:
        list(self._threads.map(self._write, range(self._blocks.num_blocks)))

    def read(self) -> None:
        list(self._threads.map(self._read, range(self._blocks.num_blocks)))

    def _data(self, number: int) -> memoryview:
        size = self._blocks.block_bytes
        return self._blocks.memory.data[number * size : (number + 1) * size]

    def _write(self, number: int) -> None:
        aside = self._folder / f"{number}.tmp"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.write(fd, self._data(number))
        os.close(fd)
        os.replace(aside, self._folder / f"{number}")

    def _read(self, number: int) -> None:
        fd = os.open(self._folder / f"{number}", os.O_RDONLY | os.O_DIRECT)
        os.readv(fd, [self._data(number)])
        os.close(fd)

    def close(self) -> None:
        self._threads.shutdown()


class VllmFs:
    """vLLM's own tier of files (``fs``), driven by the calls its scheduler makes."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._blocks = blocks
        self._job: Any = TransferJob
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        )
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(
            config=config,
            blocks_per_chunk=1,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        )
        rows = blocks.memory.reshape(blocks.num_blocks, blocks.block_bytes)
        self._manager: Any = FileSystemTierManager(spec, rows.data, "fs", str(folder / "vllm"))
        self._round = 0
        self._next = 0

    def write(self) -> None:
        self._round += 1  # a file that is there is not written again
        self._all(self._manager.submit_store, is_promotion=False)

    def read(self) -> None:
        self._all(self._manager.submit_load, is_promotion=True)

    def _all(self, submit: Callable[[Any], None], *, is_promotion: bool) -> None:
        from vllm.v1.kv_offload.base import make_offload_key

        for first, count in self._blocks.batches():
            self._next += 1
            numbers = range(first, first + count)
            keys = [
                make_offload_key(sha256(b"%d %d" % (self._round, number)).digest(), 0)
                for number in numbers
            ]
            chunks = np.array(numbers)
            submit(self._job(self._next, keys, chunks, is_promotion, SimpleNamespace()))
        self._manager.drain_jobs()
        assert all(job.success for job in self._manager.get_finished_jobs())

    def close(self) -> None:
        self._manager.shutdown()


class BusyThread:
    """A thread that keeps the interpreter busy, as an engine's own does between its calls."""

    def __enter__(self) -> None:
        self._is_over = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        count = 0
        while not self._is_over:
            count += 1

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


def default_bytes(folder: Path) -> int:
    """A few GiB, if there is room for several ways of it, one after another, on the drive."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return max(256 * MiB, min(2 * GiB, free // 8 // GiB * GiB))
