"""The staged path's own concerns: chunks that fit, a ring both directions share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.driver import FakeDriver
from tests.fakes.rig import Rig
from tests.unit.test_device_rows import layout

from kvferry.errors import DriverError
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import RowTable, common_alignment, row_shape
from kvferry.transfer.paths.staged import ChunkCursor, Ring

PAGE = 4096


def cut(sizes: list[int], num_blocks: int, slots: list[int], keep: int) -> list[tuple[int, ...]]:
    given_layout = layout(sizes)
    ids = np.arange(num_blocks, dtype=np.int64)
    job = CopyJob(Direction.LOAD, given_layout, ids, ids, 0, given_layout.block_bytes)
    rows = RowTable(given_layout, row_shape(given_layout, common_alignment(given_layout)))
    found: list[tuple[int, ...]] = []
    chunk = ChunkCursor(job, rows)
    while chunk.num_left:
        left = chunk.num_left
        slot = slots[len(found) % len(slots)]
        chunk.fit(slot, keep=keep)
        found.append((chunk.first_row, chunk.last_row, chunk.start, chunk.end))
        assert chunk.end - chunk.start <= slot
        assert chunk.num_left == left - (chunk.end - chunk.start)
    assert found[0][0] == found[0][2] == 0
    assert found[-1][1] == num_blocks * rows.rows_per_block
    assert found[-1][3] == job.num_bytes
    return found


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.integers(1, 40),
    st.lists(st.sampled_from([PAGE, 2 * PAGE, 16 * PAGE]), min_size=1, max_size=3),
    st.integers(0, 5 * PAGE),
)
def test_chunks_cover_the_job_and_never_exceed_their_slot(
    sizes: list[int], num_blocks: int, slots: list[int], keep: int
) -> None:
    found = cut(sizes, num_blocks, slots, keep)
    for before, after in itertools.pairwise(found):
        assert before[1] == after[0]
        assert before[3] == after[2]
        assert after[1] > after[0]


LARGE, SMALL = 15 * PAGE, 2 * PAGE
RING_BYTES = 4 * LARGE + 2 * SMALL


@pytest.mark.parametrize("call", ["alloc_device", "create_stream", "create_event"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_ring_that_cannot_open_takes_nothing(call: str, nth: int) -> None:
    driver = FakeDriver()
    driver.fail(call, nth if call != "alloc_device" else 1)
    with driver.current():
        ring = Ring(driver, RING_BYTES)
        with pytest.raises(DriverError):
            ring.open()
        assert driver.leaks() == {}
        ring.open()
        ring.close()
    assert driver.leaks() == {}


def test_kernels_are_prepared_without_the_lock_of_the_ring() -> None:
    """Tables are taken and given back by calls that wait for the device."""
    rig = Rig(path="staged")
    ring = rig.engine._paths["staged"]._ring  # type: ignore[attr-defined]
    taken: list[bool] = []

    class Watched(FakeDriver):
        def alloc_host(self, num_bytes: int) -> int:
            taken.append(ring.lock.locked())
            return super().alloc_host(num_bytes)

    rig.driver.__class__ = Watched
    rig.store([1, 2], [3, 4])
    rig.drain_ok()
    assert taken
    assert not any(taken)
