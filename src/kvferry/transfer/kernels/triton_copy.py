"""The copy kernel, in Triton: blocks addressed by block tables, in both directions.

The device side of a copy is paged: segment ``s`` of block ``b`` lies at
``bases[s] + b * strides[s]``. The other side is packed: whole blocks one after another, either in
pinned host slots (``kernel``) or in a ring in device memory (``staged``). One kernel serves both;
it never sees a descriptor.

A copy is cut into *rows*: at most ``row_bytes`` contiguous bytes of one segment of one block::

    rows   0        1        2        3        4   ...
           |seg 0 ---------->|seg 1 ---------->|      block ids[0], then block ids[1], ...

A program takes tiles of ``ROWS`` rows. The addresses of the next tile are read while the bytes of
this one are on their way, because a table read that waits for the link costs as much as a tile.

This module needs Triton and is imported only when a kernel is wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_addresses(
    row,
    last_row,
    ids,
    num_blocks,
    tables,
    num_segments,
    segment_bytes,
    packed_base,
    packed_pitch,
    rows_per_block,
    rows_per_segment,
    ROW_BYTES: tl.constexpr,
    UNIFORM: tl.constexpr,
    LINEAR: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Paged address, packed address and length in bytes of each row; length 0 beyond the end."""
    live = row < last_row
    index = row // rows_per_block
    within = row - index * rows_per_block
    table = tables.to(tl.pointer_type(tl.int64))
    if UNIFORM:
        segment = within // rows_per_segment
        start = (within - segment * rows_per_segment).to(tl.int64) * ROW_BYTES
        size = segment_bytes
        offset = segment * segment_bytes
    else:
        row_table = table + 4 * num_segments
        segment = tl.load(row_table + within, mask=live, other=0).to(tl.int32)
        start = tl.load(row_table + rows_per_block + within, mask=live, other=0)
        size = tl.load(table + 2 * num_segments + segment, mask=live, other=0)
        offset = tl.load(table + 3 * num_segments + segment, mask=live, other=0)
    base = tl.load(table + segment, mask=live, other=0)
    stride = tl.load(table + num_segments + segment, mask=live, other=0)
    if SINGLE:
        block = ids.to(tl.int64)
    else:
        block = tl.load(ids.to(tl.pointer_type(tl.int64)) + index, mask=live, other=0)
    if LINEAR:
        slot = index.to(tl.int64)
    else:
        slot_table = ids.to(tl.pointer_type(tl.int64)) + num_blocks
        slot = tl.load(slot_table + index, mask=live, other=0)
    paged = base + block * stride + start
    packed = packed_base + slot * packed_pitch + offset + start
    length = tl.where(live, tl.minimum(size - start, ROW_BYTES), 0)
    return paged, packed, length


@triton.jit
def copy_rows(
    null_address,
    ids,
    num_blocks,
    tables,
    num_segments,
    segment_bytes,
    packed_base,
    packed_pitch,
    rows_per_block,
    rows_per_segment,
    first_row,
    last_row,
    TO_PACKED: tl.constexpr,
    LINEAR: tl.constexpr,
    SINGLE: tl.constexpr,
    UNIFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Copy rows ``first_row`` to ``last_row`` between paged and packed memory.

    ``ids`` holds ``num_blocks`` block ids and then, unless ``LINEAR``, as many slot numbers.
    Under ``LINEAR`` block ``i`` of the job is slot ``i``: the packed side is one run, no slots.
    Under ``SINGLE`` there is one block and ``ids`` is its number, which saves a read over the link.
    ``WIDTH`` is the bytes of one element and ``VECTOR`` how many elements every address and length
    is a multiple of: 8 and 2 make 16-byte accesses, 1 and 1 copy anything.

    With as many ``ROWS`` as warps, the shape of the tile gives each warp one row: its threads hold
    one pair of addresses and ``STEPS`` accesses in flight. Rows shared between warps would cost a
    pair of addresses per access, and the registers run out long before the link is full.
    """
    if WIDTH == 8:
        element = tl.int64
    elif WIDTH == 4:
        element = tl.int32
    elif WIDTH == 2:
        element = tl.int16
    else:
        element = tl.int8
    LANES: tl.constexpr = 32 * VECTOR
    ROW_BYTES: tl.constexpr = WIDTH * LANES * STEPS
    null = tl.multiple_of(null_address.to(tl.int64).to(tl.pointer_type(element)), 16)
    lane = tl.arange(0, LANES)[None, :]
    stride = tl.num_programs(0) * ROWS
    first_tile = first_row + tl.program_id(0) * ROWS
    row = first_tile + tl.arange(0, ROWS)
    paged, packed, length = row_addresses(
        row, last_row, ids, num_blocks, tables, num_segments, segment_bytes, packed_base,
        packed_pitch, rows_per_block, rows_per_segment, ROW_BYTES, UNIFORM, LINEAR, SINGLE,
    )  # fmt: skip
    for _tile in range(first_tile, last_row, stride):
        # Counting in elements lets the compiler see how far every address is aligned.
        paged_at = null + (tl.multiple_of(paged // WIDTH, VECTOR)[:, None] + lane)
        packed_at = null + (tl.multiple_of(packed // WIDTH, VECTOR)[:, None] + lane)
        end = tl.multiple_of((length // WIDTH).to(tl.int32), VECTOR)[:, None]
        source = paged_at if TO_PACKED else packed_at
        target = packed_at if TO_PACKED else paged_at
        data = ()
        for step in tl.static_range(STEPS):
            data = data + (tl.load(source + step * LANES, mask=lane + step * LANES < end),)
        row += stride
        paged, packed, length = row_addresses(
            row, last_row, ids, num_blocks, tables, num_segments, segment_bytes, packed_base,
            packed_pitch, rows_per_block, rows_per_segment, ROW_BYTES, UNIFORM, LINEAR, SINGLE,
        )  # fmt: skip
        for step in tl.static_range(STEPS):
            tl.store(target + step * LANES, data[step], mask=lane + step * LANES < end)
