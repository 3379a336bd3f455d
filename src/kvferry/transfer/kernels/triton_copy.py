"""The copy kernel, in Triton: copies blocks between paged and packed memory, in both directions.

The device side is paged: segment ``s`` of block ``b`` is at ``bases[s] + b * strides[s]``. The
other side is packed, with whole blocks: pinned host slots for loads (path ``kernel``), a ring in
device memory for stores (path ``staged``).

A copy is cut into *rows*: at most ``row_bytes`` contiguous bytes of one segment of one block::

    rows   0        1        2        3        4   ...
           |seg 0 ---------->|seg 1 ---------->|      block ids[0], then block ids[1], ...

A program copies tiles of ``ROWS`` rows. It reads the addresses of the next tile while the bytes of
this tile are in flight: a table read that waits for the link takes as long as a tile.

This module imports Triton, so import it only to compile a kernel.
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
):
    """Return paged address, packed address and length of each row; length 0 beyond the end."""
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
    id_table = ids.to(tl.pointer_type(tl.int64))
    block = tl.load(id_table + index, mask=live, other=0)
    if LINEAR:
        slot = index.to(tl.int64)
    else:
        slot = tl.load(id_table + num_blocks + index, mask=live, other=0)
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
    UNIFORM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Copy rows ``first_row`` to ``last_row`` between paged and packed memory.

    ``ids`` holds ``num_blocks`` block ids, then as many slot numbers. ``TO_PACKED`` does not read
    the slot numbers: the packed side then has the job's blocks in order.
    ``WIDE``: all addresses and lengths are multiples of 16 bytes, so every access moves 16.

    Otherwise a row is written in words of 8 bytes, from the first aligned word of its target on.
    Each word is combined from two aligned words of the source::

        source   |......01|23456789|abc.....|        two neighbours, shifted into one word
        target   |...01234|56789abc|                 one whole word; 0 to 4 are stored as bytes

    The bytes after the last whole word are also stored as bytes. Every word read holds at least one
    byte of the row, so no access leaves its page.

    With as many ``ROWS`` as warps each warp has one row: its threads hold one pair of addresses
    and ``STEPS`` accesses in flight.
    """
    LANES: tl.constexpr = 64 if WIDE else 32
    ROW_BYTES: tl.constexpr = 8 * LANES * STEPS
    null = null_address.to(tl.int64)
    words = tl.multiple_of(null.to(tl.pointer_type(tl.uint64)), 16)
    each = null.to(tl.pointer_type(tl.int8))
    lane = tl.arange(0, LANES)[None, :]
    stride = tl.num_programs(0) * ROWS
    first_tile = first_row + tl.program_id(0) * ROWS
    row = first_tile + tl.arange(0, ROWS)
    paged, packed, length = row_addresses(
        row, last_row, ids, num_blocks, tables, num_segments, segment_bytes, packed_base,
        packed_pitch, rows_per_block, rows_per_segment, ROW_BYTES, UNIFORM, TO_PACKED,
    )  # fmt: skip
    for _tile in range(first_tile, last_row, stride):
        source = paged if TO_PACKED else packed
        target = packed if TO_PACKED else paged
        if WIDE:
            # Counting in words shows the compiler the alignment of every address.
            read = words + (tl.multiple_of(source // 8, 2)[:, None] + lane)
            write = words + (tl.multiple_of(target // 8, 2)[:, None] + lane)
            end = tl.multiple_of((length // 8).to(tl.int32), 2)[:, None]
        else:
            head = tl.minimum(-target & 7, length)
            num_words = (length - head) // 8
            read = words + (((source + head) // 8)[:, None] + lane)
            write = words + (((target + head) // 8)[:, None] + lane)
            end = num_words.to(tl.int32)[:, None]
            shift = ((source + head) % 8 * 8).to(tl.uint64)[:, None]
            # Lanes 0 to 7 copy the bytes before the words, the next lanes those after them.
            at = tl.where(lane < 8, lane, (head + 8 * num_words - 8)[:, None] + lane)
            is_edge = at < tl.where(lane < 8, head[:, None], length[:, None])
            edge = tl.load(each + (source[:, None] + at), mask=is_edge)
        low = ()
        high = ()
        for step in tl.static_range(STEPS):
            is_inside = lane + step * LANES < end
            low = low + (tl.load(read + step * LANES, mask=is_inside),)
            if not WIDE:
                high = high + (tl.load(read + step * LANES + 1, mask=is_inside & (shift > 0)),)
        row += stride
        paged, packed, length = row_addresses(
            row, last_row, ids, num_blocks, tables, num_segments, segment_bytes, packed_base,
            packed_pitch, rows_per_block, rows_per_segment, ROW_BYTES, UNIFORM, TO_PACKED,
        )  # fmt: skip
        for step in tl.static_range(STEPS):
            is_inside = lane + step * LANES < end
            if WIDE:
                tl.store(write + step * LANES, low[step], mask=is_inside)
            else:
                # Two shifts, as a shift by all 64 bits is undefined.
                word = (low[step] >> shift) | (high[step] << 1 << (63 - shift))
                tl.store(write + step * LANES, word, mask=is_inside)
        if not WIDE:
            tl.store(each + (target[:, None] + at), edge, mask=is_edge)
