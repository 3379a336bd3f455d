"""One call from KV tensors on a GPU to a working engine, and one close for all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from kvferry.device.driver import Driver, open_driver
from kvferry.device.engine import RANK_ZERO, GpuEngine
from kvferry.device.hostmem import HostRegistration
from kvferry.device.layout import GroupLayout
from kvferry.device.toolbox import AUTO, open_planner, open_toolbox
from kvferry.types import Rank

log = logging.getLogger(__name__)

RING_BYTES = 64 << 20


class HostMemory(Protocol):
    """Host slots in one run of mapped memory; slot ``i`` begins ``i * slot_bytes`` after 0."""

    num_slots: int
    slot_bytes: int

    @property
    def address(self) -> int: ...


class GpuDevice(GpuEngine):
    """A GpuEngine that also owns its driver, its paths and the registration of the host memory.

    Leaves the KV tensors and the host memory to their owners: close this before either of them.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        host: HostMemory,
        *,
        compute_stream: Callable[[], int] | None = None,
        device: int = 0,
        rank: Rank = RANK_ZERO,
        copy_path: str = AUTO,
        ring_bytes: int = RING_BYTES,
        may_calibrate: bool = True,
        is_busy: Callable[[], bool] | None = None,
        driver: Driver | None = None,
    ) -> None:
        with ExitStack() as undo:
            if driver is None:
                driver = open_driver(device)
                undo.callback(driver.close)
            # Registered in the background while the paths are measured, or loaded from a profile.
            registration = HostRegistration(
                driver, host.address, host.num_slots * host.slot_bytes, slot_bytes=host.slot_bytes
            )
            undo.callback(registration.close)
            toolbox = open_toolbox(driver, ring_bytes=ring_bytes)
            undo.callback(toolbox.close)
            planner = open_planner(
                driver, toolbox, copy_path=copy_path, may_calibrate=may_calibrate
            )
            registration.wait()
            super().__init__(
                driver,
                layouts,
                host_base=host.address,
                host_pitch=host.slot_bytes,
                num_slots=host.num_slots,
                compute_stream=compute_stream or torch_compute_stream(device),
                planner=planner,
                paths=toolbox.paths,
                rank=rank,
                host_chunk=registration.chunk_bytes,
                is_busy=is_busy,
            )
            self._rest = undo.pop_all()

    def close(self) -> None:
        """Drain, then give back everything, the registration of the host memory last."""
        super().close()
        if self.is_stuck:
            # A copy may still run: memory must stay registered, and a driver open, under it.
            self._rest.pop_all()
            return
        self._rest.close()


def torch_compute_stream(device: int = 0) -> Callable[[], int]:
    """Asks torch, at each submit, which stream the model's kernels go to now."""
    import torch

    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
