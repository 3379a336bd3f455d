"""Finding the driver of this machine."""

from __future__ import annotations

from kvferry.device.driver.base import Driver
from kvferry.device.driver.cuda import CudaDriver
from kvferry.device.driver.hip import HipDriver
from kvferry.errors import DriverError


def open_driver(device: int = 0) -> Driver:
    """The driver of this machine, on ``device``; DriverError says what was tried."""
    try:
        return CudaDriver.open(device)
    except OSError as error:
        without_cuda = error
    try:
        return HipDriver.open(device)
    except OSError as error:
        raise DriverError(f"no GPU driver could be loaded: {without_cuda}; {error}") from None
