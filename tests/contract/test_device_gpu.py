"""The whole device in one call: what it takes it gives back, also when it cannot be opened."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv

from kvferry.device.gpu import GpuDevice
from kvferry.errors import DriverError, InputError, LayoutError
from kvferry.tiers import HostTier
from kvferry.types import DEVICE, HOST, Outcome, Transfer, TransferId, as_slots


def open_device(
    driver: FakeDriver, host: HostTier, copy_path: str = "dma", host_chunk: int | None = None
) -> GpuDevice:
    kv = make_kv("split")
    for memory in kv.memory:
        driver.adopt(memory)
    device = GpuDevice(
        [kv.layout],
        host.rows,
        driver=driver,
        compute_stream=lambda: 0,
        copy_path=copy_path,
        host_chunk=host_chunk,
    )
    slots = as_slots([2])
    device.submit(Transfer(TransferId(1), DEVICE, HOST, as_slots([4]), slots))
    (receipt,) = device.drain(60.0)
    assert receipt.outcome is Outcome.OK, receipt.reason
    assert host.rows[2, : kv.layout.block_bytes].tobytes() == kv.block(4)
    return device


def test_it_copies_and_gives_everything_back() -> None:
    driver = FakeDriver()
    host = HostTier(8, 4096)
    device = open_device(driver, host)
    assert driver.leaks()
    device.close()
    device.close()
    assert driver.leaks() == {}
    host.close()


def test_memory_that_its_owner_registered_is_left_alone() -> None:
    driver = FakeDriver()
    host = HostTier(8, 4096)
    with driver.current():
        driver.register_host(host.address, 8 * 4096)
    device = open_device(driver, host, host_chunk=8 * 4096)
    device.close()
    assert driver.leaks() == {"registrations": 1}
    host.close()


def test_slots_may_lie_further_apart_than_they_are_long() -> None:
    driver = FakeDriver()
    memory = mmap.mmap(-1, 8 * 4096)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(8, 4096)[:, :1000]
    kv = make_kv("split")
    for part in kv.memory:
        driver.adopt(part)
    with GpuDevice(
        [kv.layout], rows, driver=driver, compute_stream=lambda: 0, copy_path="dma"
    ) as device:
        device.submit(Transfer(TransferId(1), DEVICE, HOST, as_slots([4]), as_slots([7])))
        device.drain(60.0)
        assert rows[7, : kv.layout.block_bytes].tobytes() == kv.block(4)
    assert driver.leaks() == {}


def test_without_triton_or_a_profile_it_still_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    driver = FakeDriver()
    kv = make_kv("layers")
    device = GpuDevice(
        [kv.layout],
        HostTier(8, 4096).rows,
        driver=driver,
        compute_stream=lambda: 0,
        may_calibrate=False,
    )
    device.close()
    assert driver.leaks() == {}


@pytest.mark.parametrize("name", ["register_host", "create_stream"])
def test_a_refusal_while_opening_leaves_nothing_behind(name: str) -> None:
    driver = FakeDriver()
    driver.fail(name)
    with pytest.raises(DriverError, match=name):
        open_device(driver, HostTier(8, 4096))
    assert driver.leaks() == {}


def test_a_path_that_is_not_there_cannot_be_pinned() -> None:
    driver = FakeDriver()
    with pytest.raises(InputError, match="teleport"):
        open_device(driver, HostTier(8, 4096), copy_path="teleport")
    assert driver.leaks() == {}


def test_blocks_larger_than_slots_are_refused() -> None:
    driver = FakeDriver()
    with pytest.raises(LayoutError, match="a host slot only 64"):
        open_device(driver, HostTier(64, 64))
    assert driver.leaks() == {}
