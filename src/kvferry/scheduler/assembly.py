"""Puts the parts of a scheduler together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvferry.config import Config
from kvferry.pool import Pool
from kvferry.scheduler.accounts import Accounts
from kvferry.scheduler.coming import ComingLoads
from kvferry.scheduler.engine_shape import EngineShape
from kvferry.scheduler.explainer import Explainer
from kvferry.scheduler.flight import Flights
from kvferry.scheduler.gate import gate_of, times_asked
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


def assemble(
    pool: Pool,
    shape: EngineShape,
    levels: Sequence[Level],
    config: Config,
    engine: EngineBlocks | None,
    clock: Callable[[], float],
) -> Parts:
    """As :class:`Scheduler` is asked for."""
    transit, flights = Transit(shape.block_bytes), Flights(shape.num_ranks)
    outbox = Outbox(flights, transit, config, len(shape.groups))
    lower = _lower(pool, levels, outbox, shape, config, clock)
    matcher = Matcher(shape.groups, pool, lower, shape.hash_tokens)
    on_device = _on_device(shape) if config.store_mode == "lazy" else None
    stores = Stores(matcher, pool, outbox, transit, config, shape, on_device)
    tenants = _divided(config.tenants, pool, levels) if config.tenants else None
    journal, admission = Journal(), stores.admission
    accounts = Accounts(
        matcher,
        Explainer(matcher, pool, admission, lower),
        journal,
        admission,
        lower,
        tenants,
        listening(pool, levels, matcher, is_late=engine is not None),
        on_device,
    )
    parts = Parts(
        pool=pool,
        matcher=matcher,
        hits=Hits(matcher, pool, transit, config, shape, clock),
        stores=stores,
        transit=transit,
        flights=flights,
        outbox=outbox,
        lower=lower,
        waits=Waits(),
        journal=journal,
        accounts=accounts,
        tenants=tenants,
        rests=_rests(engine, shape, matcher, clock) if engine is not None else None,
        sizes=shape.sizes,
        least_tokens=min(shape.sizes),
        spare_tokens=shape.spare_tokens,
        clock=clock,
    )
    parts.coming = ComingLoads(parts, shape, config)
    return parts


def _lower(
    pool: Pool,
    levels: Sequence[Level],
    outbox: Outbox,
    shape: EngineShape,
    config: Config,
    clock: Callable[[], float],
) -> LowerLevels:
    """What lies below the host, and what of the host may go there and stay."""
    for level in levels:
        _let_through(level, pool, config, shape.slot_bytes * shape.num_ranks, clock())
    lower = LowerLevels(
        pool,
        levels,
        outbox,
        clock,
        slot_bytes=shape.slot_bytes,
        lasting=frozenset(spec.name for spec in config.all_levels if spec.outlives_us),
        write_out=config.level_write_out,
    )
    for each in (pool, *(level.pool for level in levels if level.pool is not None)):
        each.holds.bound(config.keep_share)
    return lower


def _let_through(level: Level, pool: Pool, config: Config, block_bytes: int, now: float) -> None:
    """What of all that could go to a level does; ``block_bytes`` are those of all ranks."""
    num_keys = pool.num_slots + level.pool.num_slots if level.pool is not None else None
    level.gate = gate_of(config, level.name, num_keys=num_keys, block_bytes=block_bytes, now=now)
    if times_asked(config, level.name) > 1:  # as it is stored nobody has asked for it again
        level.write = WriteMode.SPILL


def _divided(shares: Sequence[TenantShare], pool: Pool, levels: Sequence[Level]) -> Tenants:
    """The tenants, who have their parts of every pool from now on."""
    pools: dict[str, Pool] = {HOST: pool}
    pools |= {level.name: level.pool for level in levels if level.pool is not None}
    tenants = Tenants(shares, pools)
    for each in pools.values():
        each.divide(tenants.shares, tenants.ceilings, tenants.before, tenants.at_most)
    for level in levels:
        if level.pool is None:
            log.warning(
                "tenants: shares and ceilings do not hold for level %s, which decides itself what "
                "it keeps; they hold for %s",
                level.name,
                " and ".join(pools),
            )
    return tenants


def _rests(
    engine: EngineBlocks, shape: EngineShape, matcher: Matcher, clock: Callable[[], float]
) -> Rests:
    return Rests(
        engine,
        least_tokens=min(shape.sizes),
        is_full=matcher.is_full,
        num_device_blocks=shape.num_device_blocks or 0,
        clock=clock,
    )


def _on_device(shape: EngineShape) -> OnDevice:
    """What the device has, as far as we were told: twice as many keys as it can have."""
    hash_tokens = shape.hash_tokens
    if shape.num_device_blocks is None:
        return OnDevice(_MOST_ON_DEVICE, hash_tokens)
    keys_a_block = -(-max(shape.sizes) // hash_tokens)
    return OnDevice(max(1024, 2 * shape.num_device_blocks * keys_a_block), hash_tokens)
