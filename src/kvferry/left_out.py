"""Why a store kept fewer blocks than it was given."""

from __future__ import annotations

import numpy as np

from kvferry.config import Config
from kvferry.identity import scope
from kvferry.keys import Keys
from kvferry.scheduler import Scheduler


def why_left_out(
    scheduler: Scheduler,
    config: Config,
    keys: Keys,
    *,
    first: int,
    num_ordered: int,
    block_bytes: int,
    most: int | None = None,
) -> str:
    """Why of the blocks just given, those of ``keys`` from ``first`` on, only these are copied.

    Empty if the others are kept already, unless that is all of them. ``most`` is how many blocks a
    hint lets be kept, where one does.
    """
    given = len(keys) - first
    if num_ordered == given:
        return ""
    known = scheduler.pool.known(keys.masked(scope(scheduler.epoch, 0)))
    if known[first:].all():
        return "" if num_ordered else "kept already"
    gap = int(np.argmin(known))
    if most is not None and most <= max(gap, first):
        return _told_not_to(max(gap, first), len(keys), most)
    if gap < first:
        return (
            f"block {gap} is not kept, so the blocks from {first} on could never be found; "
            "store from there on"
        )
    where = _blocks(gap, len(keys))
    if block_bytes > config.max_bytes_in_flight:
        return f"{where}: one has {block_bytes} bytes, more than max_bytes_in_flight"
    if scheduler.stores_wait:
        return f"{where}: as much is on its way as may be (max_bytes_in_flight); store them later"
    if config.store_after > 1:
        return f"{where}: not asked for often enough yet (store_after = {config.store_after})"
    pool = scheduler.pool
    if len(keys) > pool.num_slots:
        return f"{where}: the host memory holds no more than {pool.num_slots} blocks"
    if pool.counts.cached and config.tenants:
        return (
            f"{where}: host memory is full, and others keep to their shares (tenants), its policy "
            f"({config.policy}) would rather keep what is there, or what is being copied depends "
            "on it"
        )
    if pool.counts.cached:
        return (
            f"{where}: host memory is full, and its policy ({config.policy}) would rather keep "
            "what is there, or what is being copied depends on it"
        )
    return (
        f"{where}: no slot can be freed now, for all {pool.num_ready} that are ready are being "
        "copied or pinned by hits"
    )


def _blocks(first: int, stop: int) -> str:
    return f"blocks {first} to {stop - 1}" if first < stop - 1 else f"block {first}"


def _told_not_to(first: int, stop: int, most: int) -> str:
    where = _blocks(first, stop)
    if not most:
        return f"{where}: a hint says that nothing is to be kept (do_not_store, max_store_tokens)"
    return f"{where}: a hint lets nothing be kept from block {most} on (max_store_tokens)"
