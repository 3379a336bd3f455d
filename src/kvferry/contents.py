"""What the blocks of one rank are: told to tiers, since what outlives us must know whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.errors import ConfigError
from kvferry.identity import Namespace, store_fingerprint
from kvferry.tiers import TierSetup
from kvferry.types import FIRST_RANK, Rank, TierName


@dataclass(frozen=True)
class Contents:
    """What the blocks of a rank are, besides the way they lie in memory.

    ``weights`` are sums over the model's, or any other numbers that change with them. Of several
    engines of one server on this host, ``engine`` says which this is, ``engines_here`` of how many,
    ``first_engine`` where they begin: each has blocks of its own.
    """

    namespace: Namespace
    weights: tuple[int, ...] = ()
    engine: int = 0
    engines_here: int = 1
    first_engine: int = 0


def tier_setup(
    config: Config,
    layouts: Sequence[GroupLayout],
    contents: Contents | None,
    rank: Rank = FIRST_RANK,
    num_ranks: int = 1,
    num_ranks_here: int | None = None,
) -> TierSetup:
    """What all levels of a rank are told; name and options are each level's own."""
    slot_bytes = max(layout.block_bytes for layout in layouts)
    here = num_ranks_here or num_ranks
    if contents is None:
        for setting, where in (("disk", config.disk), ("remote", config.remote)):
            if where:
                raise ConfigError(
                    f"{setting}: blocks there outlive this process, so say what they are: open the "
                    "rank with contents=Contents(namespace)"
                )
        return TierSetup(TierName(""), slot_bytes, rank, num_ranks, num_ranks_here=here)
    formats = [layout.format for layout in layouts]
    server = (num_ranks, contents.engine)
    first, count = contents.first_engine, contents.engines_here
    engines = range(first, first + count) if count > 1 else ()
    return TierSetup(
        TierName(""),
        slot_bytes,
        rank,
        num_ranks,
        num_ranks_here=here * contents.engines_here,
        namespace=store_fingerprint(
            contents.namespace, server, formats, slot_bytes, rank, contents.weights
        ),
        family=store_fingerprint(contents.namespace, server),
        families=tuple(
            store_fingerprint(contents.namespace, (num_ranks, engine)) for engine in engines
        ),
        label=contents.namespace.model,
        disk=config.disk_settings,
        shared_namespace=store_fingerprint(
            contents.namespace, num_ranks, formats, slot_bytes, rank, contents.weights
        ),
        remote=config.remote_settings,
    )
