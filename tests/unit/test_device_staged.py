"""The staged path's own concerns: chunks that fit, a ring both directions share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.driver import FakeDriver
from tests.unit.test_device_rows import layout

from kvferry.device.job import CopyJob, Direction
from kvferry.device.ring import NUM_QUARTERS, Ring
from kvferry.device.rows import RowTable, common_alignment, row_shape
from kvferry.device.staged import Cutter
from kvferry.errors import DriverError

PAGE = 4096


def cut(
    direction: Direction, sizes: list[int], num_blocks: int, slots: list[int], edge: int
) -> list[tuple[int, int, int, int]]:
    given_layout = layout(sizes)
    ids = np.arange(num_blocks, dtype=np.int64)
    job = CopyJob(direction, given_layout, ids, ids, 0, given_layout.block_bytes)
    rows = RowTable(given_layout, row_shape(given_layout, common_alignment(given_layout)))
    found: list[tuple[int, int, int, int]] = []
    chunk = Cutter(job, rows, (edge, edge))
    while not chunk.is_last:
        slot = slots[len(found) % len(slots)]
        chunk.fit(slot)
        found.append((chunk.first_row, chunk.last_row, chunk.start, chunk.end))
        assert chunk.end - chunk.start <= slot
    assert found[0][0] == found[0][2] == 0
    assert found[-1][1] == num_blocks * rows.rows_per_block
    assert found[-1][3] == job.num_bytes
    return found


@given(
    st.sampled_from(list(Direction)),
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.integers(1, 40),
    st.lists(st.sampled_from([PAGE, 2 * PAGE, 16 * PAGE]), min_size=1, max_size=3),
    st.integers(1, 5 * PAGE),
)
def test_chunks_cover_the_job_and_never_exceed_their_slot(
    direction: Direction, sizes: list[int], num_blocks: int, slots: list[int], edge: int
) -> None:
    found = cut(direction, sizes, num_blocks, slots, edge)
    for before, after in itertools.pairwise(found):
        assert before[1] == after[0]
        assert before[3] == after[2]
        assert after[1] > after[0]


def test_only_the_exposed_end_is_small() -> None:
    sizes, slots, edge = [PAGE] * 4, [16 * PAGE], 2 * PAGE
    store = [end - start for *_, start, end in cut(Direction.STORE, sizes, 16, slots, edge)]
    load = [end - start for *_, start, end in cut(Direction.LOAD, sizes, 16, slots, edge)]
    assert store == [2 * PAGE, 16 * PAGE, 16 * PAGE, 16 * PAGE, 14 * PAGE]
    assert load == [16 * PAGE, 16 * PAGE, 16 * PAGE, 14 * PAGE, 2 * PAGE]


def test_one_direction_alone_has_all_of_the_ring() -> None:
    driver = FakeDriver()
    with driver.current():
        ring = Ring(driver, 8 * PAGE)
        ring.open()
        slots = {ring.next(Direction.STORE) for _ in range(6)}
        assert {slot.num_bytes for slot in slots} == {4 * PAGE}
        assert len({quarter for slot in slots for quarter in slot.quarters}) == NUM_QUARTERS
        ring.close()
    assert driver.leaks() == {}


def test_both_directions_at_once_keep_out_of_each_others_way() -> None:
    driver = FakeDriver()
    with driver.current():
        ring = Ring(driver, 8 * PAGE)
        ring.open()
        stream = ring.inbound
        driver.timeline.frozen = {stream}
        load = ring.next(Direction.LOAD)
        driver.record_event(load.scattered, stream)  # a load that is not over yet
        stores = {ring.next(Direction.STORE) for _ in range(4)}
        driver.record_event(next(iter(stores)).copied_out, stream)
        for slot in stores:
            driver.record_event(slot.copied_out, stream)
        loads = {ring.next(Direction.LOAD) for _ in range(4)}
        quarters = [
            {quarter.address for slot in slots for quarter in slot.quarters}
            for slots in (stores, loads)
        ]
        assert not quarters[0] & quarters[1]
        driver.timeline.frozen = set()
        driver.timeline.run_all()
        assert ring.next(Direction.STORE).num_bytes == 4 * PAGE
        ring.close()
    assert driver.leaks() == {}


@pytest.mark.parametrize("call", ["alloc_device", "create_stream", "create_event"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_ring_that_cannot_open_takes_nothing(call: str, nth: int) -> None:
    driver = FakeDriver()
    driver.fail(call, nth if call != "alloc_device" else 1)
    with driver.current():
        ring = Ring(driver, 8 * PAGE)
        with pytest.raises(DriverError):
            ring.open()
        assert driver.leaks() == {}
        ring.open()
        ring.close()
    assert driver.leaks() == {}
