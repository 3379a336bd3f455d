"""A whole copy engine on the fake driver: KV tensors, host slots, streams, and a compute stream."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from importlib import util
from typing import Any, ClassVar

import numpy as np
from tests.fakes.driver import FakeDriver
from tests.fakes.host_launcher import HostLauncher
from tests.fakes.kv import Kv, make_kv

from kvferry.cache.slots import as_slots
from kvferry.transfer.driver import Priority
from kvferry.transfer.engine.gpu import GpuEngine
from kvferry.transfer.job import Direction
from kvferry.transfer.kernels.launch import Launcher
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.paths.direct import DmaPath
from kvferry.transfer.paths.opening import open_paths
from kvferry.types import DEVICE, HOST, Outcome, Receipt, Transfer, TransferId

PathMaker = Callable[[Any], Mapping[Direction, Path]]


def both(make: Callable[[Any], Path]) -> PathMaker:
    """One path for both directions."""
    return lambda driver: dict.fromkeys(Direction, make(driver))


def _kernels(make_launcher: Callable[[Any], Launcher]) -> PathMaker:
    """With a ring so small that large stores go around it."""
    return lambda driver: open_paths(driver, make_launcher(driver), ring_bytes=1 << 13)


PATHS: dict[str, PathMaker] = {
    "one by one": both(lambda driver: DmaPath(driver, is_pinned=False)),
    "dma": both(DmaPath),
    "kernels": _kernels(HostLauncher),
}
"""All ways to copy, with kernels that need neither a GPU nor Triton."""

INTERPRETED: dict[str, PathMaker] = {}
"""The same with the kernel itself, where Triton's interpreter is: for what its bytes depend on."""

if util.find_spec("triton") is not None and util.find_spec("torch") is not None:
    from tests.fakes.launcher import InterpretedLauncher

    INTERPRETED = {"kernels, interpreted": _kernels(InterpretedLauncher)}

LONG = 60.0
"""Seconds: only for what would be for ever. A loaded machine may take many to warm a kernel up."""

SLOT_GUARD = 40
"""Bytes between the block in a slot and the next slot: a copy that runs over lands here."""


class Rig:
    """Owns everything an engine needs, on a fake device. ``tests/conftest.py`` closes it."""

    opened: ClassVar[list[Rig]] = []

    def __init__(
        self,
        kv: Kv | Sequence[Kv] | None = None,
        *,
        path: str | PathMaker = "dma",
        driver: FakeDriver | None = None,
        num_slots: int = 9,
        patience: float = 0.05,
        seed: int = 0,
    ) -> None:
        if kv is None:
            kv = make_kv("layers", seed=seed)
        self.groups = (kv,) if isinstance(kv, Kv) else tuple(kv)
        self.kv = self.groups[0]
        self.driver = driver or FakeDriver(seed=seed)
        self.rng = np.random.default_rng(seed + 1)
        for group in self.groups:
            for memory in group.memory:
                self.driver.adopt(memory)
        self.num_slots = num_slots
        self.path = path
        self.pitch = max(group.layout.block_bytes for group in self.groups) + SLOT_GUARD
        mapping = mmap.mmap(-1, num_slots * self.pitch)
        self.host = np.frombuffer(mapping, dtype=np.uint8).reshape(num_slots, self.pitch)
        self.host[...] = self.rng.integers(0, 256, self.host.shape, dtype=np.uint8)
        with self.driver.current():
            self.driver.register_host(self.host.ctypes.data, self.host.nbytes)
            self.compute = self.driver.create_stream(Priority.HIGH)
        self._ids = itertools.count(1)
        make = {**PATHS, **INTERPRETED}[path] if isinstance(path, str) else path
        try:
            self.engine = GpuEngine(
                self.driver,
                [group.layout for group in self.groups],
                host_base=self.host.ctypes.data,
                host_pitch=self.pitch,
                num_slots=num_slots,
                compute_stream=lambda: self.compute,
                paths=make(self.driver),
            )
        except Exception:
            self.let_go()
            raise
        self.engine.close_timeout = LONG
        for queue in self.engine._queues.values():
            queue.patience = patience
        self.opened.append(self)

    def store(self, blocks: Sequence[int], slots: Sequence[int], group: int = 0) -> TransferId:
        return self._submit(DEVICE, HOST, blocks, slots, group)

    def load(
        self,
        slots: Sequence[int],
        blocks: Sequence[int],
        group: int = 0,
        *,
        in_parts: bool = False,
    ) -> TransferId:
        return self._submit(HOST, DEVICE, slots, blocks, group, in_parts)

    def launch(self, function: Callable[[], None]) -> None:
        """Queue work on the compute stream; not a call of ours, so no fault is injected here."""
        self.driver.timeline.put(self.compute, function)

    def wait_until_queued(self) -> None:
        """Until the engine's threads have handed everything to the driver."""
        for lane in self.engine._queues.values():
            assert lane.flush(LONG)

    def drain(self) -> dict[TransferId, Receipt]:
        receipts = self.engine.drain(LONG)
        assert not self.engine.num_in_flight
        by_id = {receipt.transfer_id: receipt for receipt in receipts}
        assert len(by_id) == len(receipts), "a transfer has two receipts"
        return by_id

    def drain_ok(self) -> None:
        for receipt in self.drain().values():
            assert receipt.outcome is Outcome.OK, receipt.reason

    def stream(self, direction: Direction) -> int:
        return self.engine._queues[direction].stream

    def ring(self) -> Any:
        """The ring through which stores go, open."""
        found = self.engine._queues[Direction.STORE].path._ring  # type: ignore[attr-defined]
        with self.driver.current():
            found.open()
        return found

    def ring_streams(self) -> set[int]:
        """The streams of the ring, as far as it is open."""
        others = {0, self.compute, *(queue.stream for queue in self.engine._queues.values())}
        return set(self.driver.timeline.streams) - others

    def slot(self, slot: int, group: int = 0) -> bytes:
        return self.host[slot, : self.groups[group].layout.block_bytes].tobytes()

    def fresh(self, group: int = 0) -> bytes:
        """Random bytes for one block, never the same twice."""
        return self.rng.bytes(self.groups[group].layout.block_bytes)

    def close(self) -> None:
        self.engine.close()
        self.let_go()

    def let_go(self) -> None:
        """Give back what the rig itself took; what is left then is the engine's leak."""
        if self in self.opened:
            self.opened.remove(self)
        with self.driver.current():
            self.driver.destroy_stream(self.compute)
            self.driver.unregister_host(self.host.ctypes.data)

    @classmethod
    def close_all(cls) -> None:
        """Close the rigs that a test left open, and check that the driver got all back."""
        while cls.opened:
            rig = cls.opened[-1]
            rig.close()
            assert rig.driver.leaks() == {}

    def _submit(
        self,
        src: Any,
        dst: Any,
        src_slots: Sequence[int],
        dst_slots: Sequence[int],
        group: int,
        in_parts: bool = False,
    ) -> TransferId:
        transfer_id = TransferId(next(self._ids))
        slots = as_slots(src_slots), as_slots(dst_slots)
        self.engine.submit(Transfer(transfer_id, src, dst, *slots, group, in_parts=in_parts))
        return transfer_id
