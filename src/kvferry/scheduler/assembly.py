"""Puts the parts of a scheduler together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvferry import reach
from kvferry.config import Config
from kvferry.level_kinds import DISK
from kvferry.pool import Pool
from kvferry.scheduler.accounts import Accounts
from kvferry.scheduler.coming import ComingLoads
from kvferry.scheduler.explainer import Explainer
from kvferry.scheduler.gate import TIMES, gate_of
from kvferry.scheduler.hearing import listening
from kvferry.scheduler.hit import Hits
from kvferry.scheduler.journal import Journal
from kvferry.scheduler.level import Level, WriteMode
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.on_device import OnDevice
from kvferry.scheduler.orders import EngineBlocks
from kvferry.scheduler.outbox import Outbox
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.rests import Rests
from kvferry.scheduler.storing import Stores
from kvferry.scheduler.transit import Transit
from kvferry.scheduler.waits import Waits
from kvferry.tenant_shares import TenantShare
from kvferry.tenants import Tenants
from kvferry.types import HOST

log = logging.getLogger("kvferry")

_MOST_ON_DEVICE = 1 << 20
"""Keys, where nobody says how many blocks the device has."""

_LOADING, _STORING = 7 / 8, 1 / 4
"""Shares of the device's blocks that loads and stores may hold. With half of a small device cache
one long load at a time fits, and the link rests while its request is told and runs; what runs
needs a new block only now and then.
"""

_COMING = 1 / 2
"""The share that loads may hold whose last blocks still come up from a level."""


def assemble(
    pool: Pool,
    groups: Sequence[reach.Group],
    outbox: Outbox,
    transit: Transit,
    config: Config,
    *,
    hash_tokens: int,
    num_ranks: int,
    num_device_blocks: int | None,
    block_bytes: Sequence[int],
    spare_tokens: int,
    levels: Sequence[Level],
    joins_loads: bool,
    loads_early: bool,
    engine: EngineBlocks | None,
    clock: Callable[[], float],
) -> Parts:
    """As :class:`Scheduler` is asked for."""
    if disk := next((level for level in levels if level.name == DISK), None):
        _let_through(disk, pool, config, max(block_bytes) * num_ranks, clock())
    lower = LowerLevels(
        pool,
        levels,
        outbox,
        clock,
        slot_bytes=max(block_bytes),
        lasting=frozenset(spec.name for spec in config.all_levels if spec.outlives_us),
        write_out=config.level_write_out,
    )
    for each in (pool, *(level.pool for level in levels if level.pool is not None)):
        each.holds.bound(config.keep_share)
    matcher = Matcher(groups, pool, lower, hash_tokens)
    on_device = None
    if config.store_mode == "lazy":
        on_device = _on_device(num_device_blocks, groups, hash_tokens)
    stores = Stores(
        matcher,
        pool,
        outbox,
        transit,
        config,
        max_blocks=_bound(config.max_storing_blocks, num_device_blocks, _STORING),
        block_bytes=block_bytes,
        on_device=on_device,
    )
    hits = Hits(
        matcher,
        pool,
        transit,
        config,
        max_blocks=_bound(config.max_loading_blocks, num_device_blocks, _LOADING),
        block_bytes=block_bytes,
        joins_loads=joins_loads,
        clock=clock,
    )
    tenants = _divided(config.tenants, pool, levels) if config.tenants else None
    journal, admission = Journal(), stores.admission
    explainer = Explainer(matcher, pool, admission, lower)
    sizes = tuple(group.block_tokens for group in groups)
    parts = Parts(
        pool=pool,
        matcher=matcher,
        hits=hits,
        stores=stores,
        outbox=outbox,
        lower=lower,
        waits=Waits(),
        journal=journal,
        accounts=Accounts(
            matcher,
            explainer,
            journal,
            admission,
            lower,
            tenants,
            listening(pool, levels, matcher, is_late=engine is not None),
            on_device,
        ),
        tenants=tenants,
        sizes=sizes,
        least_tokens=min(sizes),
        spare_tokens=spare_tokens,
        clock=clock,
    )
    if engine is not None:
        parts.rests = Rests(
            engine,
            least_tokens=min(sizes),
            is_full=matcher.is_full,
            num_device_blocks=num_device_blocks or 0,
            clock=clock,
        )
    is_early = loads_early and len(groups) == 1 and matcher.is_full and not spare_tokens
    parts.coming = ComingLoads(
        parts,
        transit,
        is_on=is_early,
        max_blocks=_bound(None, num_device_blocks, _COMING),
        deadline=config.promote_deadline,
    )
    return parts


def _let_through(disk: Level, pool: Pool, config: Config, block_bytes: int, now: float) -> None:
    """What of all that could go to the disk does; ``block_bytes`` are those of all ranks."""
    num_keys = pool.num_slots + (disk.pool.num_slots if disk.pool is not None else 0)
    disk.gate = gate_of(config, num_keys=num_keys, block_bytes=block_bytes, now=now)
    if TIMES[config.disk_after] > 1:  # as it is stored nobody has asked for it again
        disk.write = WriteMode.SPILL


def _divided(shares: Sequence[TenantShare], pool: Pool, levels: Sequence[Level]) -> Tenants:
    """The tenants, who have their parts of every pool from now on."""
    pools: dict[str, Pool] = {HOST: pool}
    pools |= {level.name: level.pool for level in levels if level.pool is not None}
    tenants = Tenants(shares, pools)
    for each in pools.values():
        each.divide(tenants.shares, tenants.ceilings, tenants.before)
    for level in levels:
        if level.pool is None:
            log.warning(
                "tenants: shares and ceilings do not hold for level %s, which decides itself what "
                "it keeps; they hold for %s",
                level.name,
                " and ".join(pools),
            )
    return tenants


def _bound(given: int | None, num_device_blocks: int | None, share: float) -> int | None:
    """A bound as given, or this share of the device's blocks; None where neither is known."""
    if given is not None or num_device_blocks is None:
        return given
    return max(1, int(num_device_blocks * share))


def _on_device(
    num_device_blocks: int | None, groups: Sequence[reach.Group], hash_tokens: int
) -> OnDevice:
    """What the device has, as far as we were told: twice as many keys as it can have."""
    if num_device_blocks is None:
        return OnDevice(_MOST_ON_DEVICE, hash_tokens)
    largest = max(group.block_tokens for group in groups)
    return OnDevice(max(1024, 2 * num_device_blocks * -(-largest // hash_tokens)), hash_tokens)
