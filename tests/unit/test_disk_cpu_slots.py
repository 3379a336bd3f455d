"""Of a drive's threads few copy and prove at a time, and none of them while it waits for the drive.

One-line breaks that were tried: without ``with context.cpu_slots`` in a read or a write too many
work at once; with the drive's call inside of it no thread gets past the first that waits.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvferry.tiers.contract import Way
from kvferry.tiers.disk.io_queue import IoQueue
from kvferry.tiers.disk.io_workers import IoWorker, WorkerContext
from kvferry.tiers.ipc.messages import OrderMessage, ResultMessage

THREADS, BLOCKS, PITCH = 4, 8, 4096
LONG, PATIENCE = 60.0, 10.0


class Counted:
    """How many are in here at once, and the most there ever were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def stay(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.005)
        with self._lock:
            self._now -= 1


class Drive:
    """A drive that answers once as many calls wait for it as there are threads; and all else."""

    is_sealed, proof_bytes = False, 16

    def __init__(self) -> None:
        self.at_the_drive = threading.Barrier(THREADS)
        self.copying = Counted()

    # -- the file
    def read(self, place: int, data: memoryview) -> None:
        self.at_the_drive.wait(PATIENCE)

    write = read

    # -- the engine's memory
    def fetch(self, here: Any, there: Any, sizes: Any) -> Any:
        self.copying.stay()
        return np.ones(len(sizes), dtype=bool)

    deliver = fetch

    # -- the prover
    def prove(self, buffer: Any, places: Any, keys: Any) -> Any:
        return np.zeros((len(places), 16), dtype=np.uint8)

    def check(self, buffer: Any, places: Any, keys: Any, proofs: Any) -> Any:
        self.copying.stay()
        return np.ones(len(places), dtype=bool)

    # -- the write tracker
    def lookup(self, places: Any, generation: int) -> Any:
        return np.ones(len(places), dtype=bool), np.zeros((len(places), 16), dtype=np.uint8)

    def begin_write(self, places: Any) -> int:
        return 0

    def end_write(self, *_: Any) -> str:
        return ""

    def lose(self, places: Any) -> None: ...

    # -- health and status
    def succeeded(self, way: Way) -> None: ...

    def failed(self, way: Way, error: Exception) -> None: ...

    def add(self, what: Any, amount: int) -> None: ...

    def set_copying(self, thread: int, is_copying: bool) -> None: ...


@pytest.mark.parametrize("way", [Way.READ, Way.WRITE])
def test_one_copies_while_all_others_wait_for_the_drive(way: Way) -> None:
    drive: Any = Drive()
    answered: list[ResultMessage] = []
    queue = IoQueue(answered.append, blocks_per_job=1, deadline=LONG)
    slots = threading.Semaphore(1)
    context = WorkerContext(queue, drive, drive, drive, drive, drive, drive, PITCH, 1, slots)
    threads = [IoWorker(context, way, number) for number in range(THREADS)]
    numbers = np.arange(BLOCKS)
    queue.submit(
        OrderMessage(
            id=1,
            way=way,
            generation=0,
            deadline=time.monotonic() + LONG,
            places=numbers,
            keys=np.zeros((BLOCKS, 4), dtype=np.uint64),
            sizes=np.array([PITCH]),
            addresses=numbers[:, None] * PITCH,
        )
    )
    end = time.monotonic() + LONG
    while not answered and time.monotonic() < end:
        time.sleep(0.005)
    queue.close(LONG, "ended")
    for each in threads:
        each.thread.join(LONG)
    assert answered[0].ok.all(), answered[0].reasons
    assert drive.copying.most == 1
