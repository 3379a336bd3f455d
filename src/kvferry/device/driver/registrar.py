"""Lets a tier pin its memory without knowing a driver."""

from __future__ import annotations

from kvferry.device.driver.base import Driver


class DriverRegistrar:
    """Registers host memory with one driver, from any thread. Leaves the driver to its owner."""

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
