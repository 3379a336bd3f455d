"""The scheduler half of a ferry, over one rank's memory and the levels below it."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.identity import Namespace
from kvferry.policy import policy_named
from kvferry.pool import Pool
from kvferry.rank import RankMemory
from kvferry.reach import Group
from kvferry.scheduler import Scheduler, WriteMode, level_of


def scheduler_over(
    rank: RankMemory,
    layouts: Sequence[GroupLayout],
    groups: Sequence[Group],
    namespace: Namespace,
    config: Config,
) -> Scheduler:
    """The scheduler half over one rank's memory and the levels below it."""
    return Scheduler(
        Pool(
            rank.host.num_slots,
            policy_named(config.policy),
            num_ready=rank.ready_slots,
            together=True,
        ),
        groups,
        config=config,
        hash_block_tokens=namespace.block_tokens,
        block_bytes=[layout.block_bytes for layout in layouts],
        levels=[
            level_of(
                name,
                level.num_places,
                WriteMode(config.level_write),
                policy_named(config.level_policy),
                recovered=[level.recovered()],
                most_in_one=level.most_in_one,
            )
            for name, level in rank.levels.items()
        ],
        joins_loads=False,
    )
