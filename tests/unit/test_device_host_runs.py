"""Host slots that follow each other become one copy, but never across a registration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths import direct
from kvferry.transfer.paths.direct import HostRuns

BLOCK = 64
HOST, RING = 1 << 20, 1 << 30


class Recorder:
    """Writes down the copies it is asked for."""

    batch_form = "any"

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self.copies.append((dst, src, num_bytes))

    def copy_batch_async(self, dsts: Any, srcs: Any, sizes: Any, stream: int) -> None:
        self.copies += zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True)


def job(
    slots: list[int],
    *,
    pitch: int = BLOCK,
    chunk: int | None = None,
) -> CopyJob:
    layout = GroupLayout(
        bases=np.array([0]), strides=np.array([BLOCK]), sizes=np.array([BLOCK]), num_blocks=100
    )
    ids = np.array(slots, dtype=np.int64)
    return CopyJob(Direction.STORE, layout, ids, ids, HOST, pitch, chunk)


def copies_of(given_job: CopyJob, start: int, end: int) -> list[tuple[int, int, int]]:
    driver: Any = Recorder()
    HostRuns(given_job).copy(driver, start, end, RING, stream=9)
    return [(src, dst, size) for dst, src, size in driver.copies]


@given(
    st.permutations(range(12)), st.integers(0, 12 * BLOCK - 1), st.integers(1, 12 * BLOCK),
    st.sampled_from([None, BLOCK, 3 * BLOCK]), st.sampled_from([BLOCK, BLOCK + 16]),
    st.sampled_from([1, 5, 16]),
)  # fmt: skip
def test_every_byte_goes_to_its_place(
    slots: list[int],
    start: int,
    length: int,
    chunk: int | None,
    pitch: int,
    most: int,
) -> None:
    chunk = None if chunk is None else chunk // BLOCK * pitch
    end = min(start + length, 12 * BLOCK)
    expected = {
        RING + byte - start: HOST + slots[byte // BLOCK] * pitch + byte % BLOCK
        for byte in range(start, end)
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(direct, "MAX_CALL", most)
        copies = copies_of(job(slots, pitch=pitch, chunk=chunk), start, end)
    found = {}
    for ring, host, size in copies:
        if chunk is not None:
            assert (host - HOST) // chunk == (host + size - 1 - HOST) // chunk
        found.update({ring + i: host + i for i in range(size)})
    assert found == expected
    breaks = sum(
        expected[at + 1] != expected[at] + 1
        or (pitch != BLOCK and (expected[at + 1] - HOST) % pitch == 0)
        or (chunk is not None and (expected[at + 1] - HOST) % chunk == 0)
        for at in range(RING, RING + end - start - 1)
    )
    assert len(copies) == breaks + 1
    assert sum(size for *_, size in copies) == end - start
