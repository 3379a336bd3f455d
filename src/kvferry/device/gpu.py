"""One call from KV tensors on a GPU to a working engine, and one close for all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvferry.device.driver import Driver, open_driver
from kvferry.device.engine import RANK_ZERO, GpuEngine
from kvferry.device.hostmem import HostRegistration
from kvferry.device.layout import GroupLayout
from kvferry.device.planner import MeasuredPlanner
from kvferry.device.toolbox import AUTO, Toolbox, open_planner, open_toolbox
from kvferry.types import Rank

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint8]

RING_BYTES = 64 << 20


class GpuDevice(GpuEngine):
    """A GpuEngine that also owns its driver, its paths and the registration of the host memory.

    Leaves the KV tensors and the host memory to their owners: close this before either of them.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        rows: Rows,
        *,
        compute_stream: Callable[[], int] | None = None,
        device: int = 0,
        rank: Rank = RANK_ZERO,
        copy_path: str = AUTO,
        ring_bytes: int = RING_BYTES,
        may_calibrate: bool = True,
        is_busy: Callable[[], bool] | None = None,
        host_chunk: int | None = None,
        driver: Driver | None = None,
        tools: tuple[Toolbox, MeasuredPlanner] | None = None,
    ) -> None:
        """``rows`` are the host slots, one row each, in memory that begins on a page.

        ``host_chunk`` says that their owner has registered them with the driver, in chunks of so
        many bytes; without it they are registered here. ``driver`` is opened on ``device`` if none
        is given. ``compute_stream`` is torch's current stream if none is given. ``tools`` are paths
        and a planner opened before, so that nothing is measured here; their opener closes them.
        """
        num_slots, slot_bytes = rows.shape
        address, pitch = int(rows.ctypes.data), int(rows.strides[0])
        with ExitStack() as undo:
            if driver is None:
                driver = open_driver(device)
                undo.callback(driver.close)
            registration = None
            if host_chunk is None:
                num_bytes = (num_slots - 1) * pitch + slot_bytes
                registration = HostRegistration(driver, address, num_bytes, slot_bytes=pitch)
                undo.callback(registration.close)
                host_chunk = registration.chunk_bytes
            if tools is None:
                toolbox = open_toolbox(driver, ring_bytes=ring_bytes)
                undo.callback(toolbox.close)
                if registration is not None:
                    registration.wait()  # pinning beside a calibration would be measured with it
                planner = open_planner(
                    driver, toolbox, copy_path=copy_path, may_calibrate=may_calibrate
                )
            else:
                toolbox, planner = tools
            super().__init__(
                driver,
                layouts,
                host_base=address,
                host_pitch=pitch,
                num_slots=num_slots,
                compute_stream=compute_stream or torch_compute_stream(device),
                planner=planner,
                paths=toolbox.paths,
                rank=rank,
                host_chunk=host_chunk,
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
