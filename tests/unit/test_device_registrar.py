"""Pinning from a background thread: inside the context, and beside another thread's capture."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.unit.test_device_cuda import FakeLibcuda

from kvferry.errors import DriverError
from kvferry.hostmem.memory import HostMemory
from kvferry.transfer.driver.cuda import CudaDriver
from kvferry.transfer.driver.opening import DriverRegistrar

THREAD_LOCAL = 1


class CapturingLibcuda(FakeLibcuda):
    """A library on which some other thread captures: memory may be pinned only in thread mode."""

    def __init__(self) -> None:
        super().__init__(13000)
        self.mode = 0
        self._functions["cuThreadExchangeStreamCaptureMode"] = self._exchange
        self._functions["cuMemHostRegister_v2"] = self._pin
        self._functions["cuMemHostUnregister"] = self._pin

    def _exchange(self, out: Any) -> int:
        out._obj.value, self.mode = self.mode, out._obj.value
        return 0

    def _pin(self, *args: Any) -> int:
        return 0 if self.mode == THREAD_LOCAL else 1


def test_memory_is_pinned_while_another_thread_captures_a_graph() -> None:
    library = CapturingLibcuda()
    driver = CudaDriver(library)
    driver.register_host(4096, 4096)
    driver.unregister_host(4096)
    assert library.mode == 0, "the thread's own mode was not put back"


def test_a_refusal_puts_the_mode_back_too() -> None:
    library = CapturingLibcuda()
    library._functions["cuMemHostRegister_v2"] = lambda *args: 1
    with pytest.raises(DriverError):
        CudaDriver(library).register_host(4096, 4096)
    assert library.mode == 0


def test_a_tier_pins_through_the_driver_and_gives_back() -> None:
    driver = FakeDriver()
    registrar = DriverRegistrar(driver)
    with HostMemory(1 << 20, 10_007, registrar=registrar, chunk_bytes=1 << 16) as host:
        assert host.growth.wait(60)
        assert host.is_pinned
        assert driver.leaks() == {"registrations": len(host.tier.chunks)}
    assert driver.leaks() == {}
    assert registrar.pci_bus_id == "0000:00:00.0"
