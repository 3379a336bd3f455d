"""Finding the driver of this machine."""

from __future__ import annotations

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import Driver
from kvferry.transfer.driver.cuda import CudaDriver
from kvferry.transfer.driver.hip import HipDriver


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


class DriverRegistrar:
    """Registers host memory with one driver, from any thread, so that a tier needs no driver.

    Leaves the driver to its owner.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def pci_bus_id(self) -> str:
        """Where the GPU is, for memory that should be near to it."""
        return self._driver.identity().pci_bus_id

    def register(self, address: int, num_bytes: int) -> None:
        with self._driver.current():
            self._driver.register_host(address, num_bytes)

    def unregister(self, address: int) -> None:
        with self._driver.current():
            self._driver.unregister_host(address)
