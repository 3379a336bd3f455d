"""What the scheduler's side must know of a rank, once that has opened its memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.device.layout import GroupLayout
from kvferry.rank import RankMemory
from kvferry.vllm.geometry import words_of
from kvferry.vllm.levels import shapes_of
from kvferry.vllm.messages import RankShape
from kvferry.vllm.ranks import Place


def shape_of(memory: RankMemory, layouts: Sequence[GroupLayout], place: Place) -> RankShape:
    """Its slots and blocks, what it picks paths by, and its levels."""
    return RankShape(
        rank=place.rank,
        num_slots=memory.host.num_slots,
        ready_slots=memory.ready_slots,
        slot_bytes=memory.host.tier.slot_bytes,
        block_bytes=tuple(layout.block_bytes for layout in layouts),
        layout=words_of(layouts),
        is_shared=place.replicates,
        choices=getattr(memory.engine, "choices", None),
        levels=shapes_of(memory),
    )
