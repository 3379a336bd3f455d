"""Every cut falls between two slots and between two pages, whatever the slot's size."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.hostmem.slots import CHUNK_BYTES, Chunks

PAGE = mmap.PAGESIZE

slot_sizes = st.one_of(
    st.integers(1, 1 << 27),
    st.integers(0, 24).map(lambda power: 1 << power),
    st.integers(1, 24).map(lambda power: (1 << power) + 1),
    st.integers(1, 24).map(lambda power: (1 << power) - 1),
)
chunk_sizes = st.one_of(st.just(CHUNK_BYTES), st.integers(PAGE, 1 << 28))


@given(num_slots=st.integers(1, 1 << 24), slot=slot_sizes, wanted=chunk_sizes)
def test_cuts_fall_between_slots_and_between_pages(num_slots: int, slot: int, wanted: int) -> None:
    chunks = Chunks.lay_out(num_slots, slot, wanted)
    assert chunks.pitch >= slot
    assert chunks.chunk_bytes % PAGE == 0
    assert chunks.chunk_bytes % chunks.pitch == 0
    assert chunks.chunk_bytes <= max(wanted, chunks.pitch)
    for index in {0, len(chunks) // 2, len(chunks) - 1}:
        chunk = chunks[index]
        assert chunk.start == index * chunks.chunk_bytes
        assert chunk.start + chunk.num_bytes >= chunk.slots_after * chunks.pitch
        assert chunk.num_bytes % PAGE == 0
        # Nothing of the last slot lies in the next chunk, nothing of the next one in this.
        assert (chunk.slots_after - 1) * chunks.pitch + slot <= chunk.start + chunk.num_bytes
    last = chunks[len(chunks) - 1]
    assert last.slots_after == num_slots
    assert last.start + last.num_bytes == chunks.num_bytes


@given(num_slots=st.integers(1, 1 << 20), slot=slot_sizes)
def test_odd_slots_waste_next_to_nothing(num_slots: int, slot: int) -> None:
    chunks = Chunks.lay_out(num_slots, slot)
    assert (chunks.pitch - slot) * 8192 <= slot
    assert chunks.num_bytes - num_slots * chunks.pitch < PAGE


@pytest.mark.parametrize("wrong", [(0, 1, PAGE), (1, 0, PAGE), (1, 1, PAGE - 1)])
def test_nonsense_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="must be positive"):
        Chunks.lay_out(*wrong)
