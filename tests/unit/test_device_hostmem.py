from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.driver import FakeDriver

from kvferry.device.hostmem import HostRegistration, chunk_size
from kvferry.errors import DriverError, InputError

PAGE = mmap.PAGESIZE


@given(slot=st.integers(1, 1 << 22), wanted=st.integers(1, 1 << 28))
def test_chunks_end_between_slots_and_between_pages(slot: int, wanted: int) -> None:
    size = chunk_size(slot, wanted)
    assert size >= wanted
    assert size % slot == 0
    assert size % PAGE == 0


def memory(num_bytes: int) -> tuple[np.ndarray, int]:
    array = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    return array, array.ctypes.data


def test_all_of_it_is_registered_and_given_back() -> None:
    driver = FakeDriver()
    array, address = memory(10 * PAGE + 100)
    registration = HostRegistration(
        driver, address, array.nbytes, slot_bytes=PAGE, chunk_bytes=3 * PAGE
    ).wait()
    assert registration.chunk_bytes == 3 * PAGE
    assert registration.num_ready == array.nbytes
    assert driver.leaks() == {"registrations": 4}
    registration.close()
    registration.close()
    assert driver.leaks() == {}


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_one_refused_chunk_undoes_all(nth: int) -> None:
    driver = FakeDriver()
    array, address = memory(8 * PAGE)
    driver.fail("register_host", nth)
    registration = HostRegistration(
        driver, address, array.nbytes, slot_bytes=PAGE, chunk_bytes=2 * PAGE
    )
    with pytest.raises(DriverError, match="register_host"):
        registration.wait()
    assert driver.leaks() == {}


def test_memory_off_a_page_is_refused() -> None:
    array, address = memory(2 * PAGE)
    with pytest.raises(InputError, match="does not begin on a page"):
        HostRegistration(FakeDriver(), address + 8, array.nbytes - 8, slot_bytes=8)


def test_a_refused_unregistration_is_logged_and_the_rest_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    array, address = memory(4 * PAGE)
    registration = HostRegistration(
        driver, address, array.nbytes, slot_bytes=PAGE, chunk_bytes=PAGE
    ).wait()
    driver.fail("unregister_host", 2)
    registration.close()
    assert driver.leaks() == {"registrations": 1}
    assert "stays registered" in caplog.text
