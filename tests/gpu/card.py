"""A copy engine on a real card, without torch: raw allocations, raw streams, host slots."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvferry.cache.slots import as_slots
from kvferry.transfer.driver import Driver, Priority
from kvferry.transfer.engine.gpu import GpuEngine
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.types import DEVICE, HOST, Outcome, Receipt, Transfer, TransferId

Bytes = npt.NDArray[np.uint8]


class Card:
    """Owns device memory, host slots, a compute stream and an engine; ``close`` gives all back."""

    def __init__(
        self,
        driver: Driver,
        device_bytes: int,
        layout: Callable[[int], GroupLayout],
        *,
        num_slots: int,
        paths: Mapping[Direction, Path],
        slot_guard: int = 64,
    ) -> None:
        self.driver = driver
        self.device_bytes = device_bytes
        self.rng = np.random.default_rng(0)
        self._stack = ExitStack()
        self._ids = itertools.count(1)
        with driver.current():
            self.device = driver.alloc_device(device_bytes)
            self._stack.callback(driver.free_device, self.device)
            self.compute = driver.create_stream(Priority.HIGH)
            self._stack.callback(driver.destroy_stream, self.compute)
        self.layout = layout(self.device)
        pitch = self.layout.block_bytes + slot_guard
        pitch = -(-pitch // 16) * 16
        self.host: Bytes = np.frombuffer(mmap.mmap(-1, num_slots * pitch), dtype=np.uint8)
        self.host = self.host.reshape(num_slots, pitch)
        with driver.current():
            driver.register_host(self.host.ctypes.data, self.host.nbytes)
        self._stack.callback(driver.unregister_host, self.host.ctypes.data)
        self.engine = GpuEngine(
            driver,
            [self.layout],
            host_base=self.host.ctypes.data,
            host_pitch=pitch,
            num_slots=num_slots,
            compute_stream=lambda: self.compute,
            paths=paths,
        )

    # -- bytes -------------------------------------------------------------------------------

    def read(self) -> Bytes:
        """All device memory, after everything queued."""
        out = np.empty(self.device_bytes, dtype=np.uint8)
        self._copy(out.ctypes.data, self.device, self.device_bytes)
        return out

    def write(self, content: Bytes) -> None:
        self._copy(self.device, content.ctypes.data, len(content))

    def _copy(self, dst: int, src: int, num_bytes: int) -> None:
        with self.driver.current():
            self.driver.copy_async(dst, src, num_bytes, self.compute)
            self.driver.synchronize_stream(self.compute)

    def ranges(self, block: int) -> list[tuple[slice, slice]]:
        """For every segment of a block: where in device memory, where in a slot."""
        layout = self.layout
        starts = (layout.bases - self.device + block * layout.strides).tolist()
        return [
            (slice(start, start + size), slice(offset, offset + size))
            for start, size, offset in zip(
                starts, layout.sizes.tolist(), layout.offsets.tolist(), strict=True
            )
        ]

    # -- transfers ---------------------------------------------------------------------------

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.engine.submit(
            Transfer(TransferId(next(self._ids)), DEVICE, HOST, as_slots(blocks), as_slots(slots))
        )

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> TransferId:
        load, ends = TransferId(next(self._ids)), (as_slots(slots), as_slots(blocks))
        self.engine.submit(Transfer(load, HOST, DEVICE, *ends, in_parts=in_parts))
        return load

    def drain(self) -> list[Receipt]:
        receipts = self.engine.drain(30.0)
        assert receipts
        for receipt in receipts:
            assert receipt.outcome is Outcome.OK, receipt.reason
        return receipts

    def stream(self, direction: Direction) -> int:
        return self.engine._queues[direction].stream

    def close(self) -> None:
        self.engine.close()
        with self.driver.current():
            self._stack.close()
