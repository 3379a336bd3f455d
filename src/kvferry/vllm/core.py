"""Our scheduler for one server of vLLM's: made of what is known once its ranks were heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.policy import policy_named
from kvferry.pool import Pool
from kvferry.scheduler import Level, Scheduler
from kvferry.vllm.blocks import VllmBlocks
from kvferry.vllm.messages import RankShape
from kvferry.vllm.setup import Setup


def scheduler_for(
    setup: Setup,
    shapes: Mapping[int, RankShape],
    blocks: VllmBlocks,
    levels: Sequence[Level],
    *,
    spare_tokens: int,
) -> Scheduler:
    """As many slots as the rank with the fewest has; none of them counts as ready yet."""
    num_slots = min(shape.num_slots for shape in shapes.values())
    return Scheduler(
        Pool(num_slots, policy_named(setup.config.policy), num_ready=0, together=True),
        setup.groups,
        config=setup.config,
        num_ranks=setup.num_ranks,
        hash_block_tokens=blocks.hash_tokens,
        num_device_blocks=blocks.num_blocks,
        block_bytes=shapes[0].block_bytes,
        spare_tokens=spare_tokens,
        levels=levels,
        # By their blocks vLLM is told what of a load did not come, or it would compute all of it.
        loads_early=setup.support.fails_by_block
        and setup.told_tokens == setup.groups[0].block_tokens,
        engine=blocks,
    )
