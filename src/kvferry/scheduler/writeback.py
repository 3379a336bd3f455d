"""Writeback: which host blocks are copied to lower tiers, and when.

::

    stored   blocks whose store has completed      to write-through tiers, at once
    spill    the coldest blocks, before eviction   to spill tiers, once a step
    flush    blocks that only the host holds       to the first spill tier that outlives the
                                                   process, while idle and at close

A block that a tier already has is never copied there again; evicting it from the host is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.admission import SeenOften, Watermark
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Purpose
from kvferry.config import Config
from kvferry.core.keys import Key, Keys
from kvferry.scheduler.tier import LowerTier, Move, WriteMode
from kvferry.scheduler.transfers import Transfers
from kvferry.settings.tiers import DISK, REMOTE
from kvferry.types import HOST, TierName, TransferId

log = logging.getLogger(__name__)

_CLEAN_SHARE = 8
"""At least the coldest 1/8 of the host's slots is spilled before it must be evicted."""

_CLEAN_SECONDS = 0.1
"""Seconds between searches of the coldest slots while no slot was reserved and no block stored."""

_REST_SECONDS, _MOST_REST_SECONDS = 0.1, 30.0
"""First and longest pause, in seconds, of spills to a tier after a failed transfer to it."""

_LOOK_RESTS = 20
"""A flush searches the whole host again after 20 times the last search's duration. A search of
100,000 blocks takes 13 ms, and a new request waits for it. (2 vCPU, Python 3.11, 2026-11-16.)"""

_FLUSH_PIECES = 16
"""Pieces that a flush has in flight."""
_FLUSHING_SHARE = 8
"""A flush has at most 1/8 of the host's slots in flight: blocks being copied cannot be evicted."""

_LEAST_KEYS, _MOST_KEYS = 1 << 18, 1 << 20
"""Bounds on the number of keys that the request counts tell apart, in 4 to 16 MiB."""


class Writeback:
    """Copies host blocks to lower tiers. Owns admission to tiers, pauses after failures, the flush.

    Orders go to ``transfers`` and into ``moves``; the caller removes a move when its transfer
    completes. Only tiers that are available are written to.
    """

    def __init__(
        self,
        host: Pool,
        tiers: Sequence[LowerTier],
        transfers: Transfers,
        clock: Callable[[], float],
        moves: dict[TransferId, Move],
        config: Config,
        *,
        piece_slots: int,
    ) -> None:
        """``piece_slots`` are the host slots of one piece; a flush has 16 pieces in flight."""
        self._host = host
        self._tiers = tiers
        self._transfers = transfers
        self._clock = clock
        self._moves = moves
        self._admissions: dict[TierName, SeenOften] = {}
        for tier in tiers:
            self._set_up(tier, config)
        self._rests: dict[TierName, tuple[float, float]] = {}  # end and length of a tier's pause
        self._watermark = Watermark(
            least=host.num_slots // _CLEAN_SHARE, most=max(1, host.num_slots // 2)
        )
        self._num_reserved = host.num_reserved
        self._clean = (-1, -1)  # the host's state when a search last found nothing to spill
        self._clean_until = 0.0
        lasting = {spec.name for spec in config.all_tiers if spec.persists}
        spilled = [tier for tier in tiers if tier.name in lasting and tier.pool is not None]
        spilled = [tier for tier in spilled if tier.write is WriteMode.SPILL]
        self._flushed = spilled[0] if spilled else None  # the tier that outlives this process
        self._flush_seconds = config.tier_flush if spilled else 0.0  # of one flush
        most_flushing = min(_FLUSH_PIECES * piece_slots, host.num_slots // _FLUSHING_SHARE)
        self._most_flushing = max(1, most_flushing)
        self._left = Keys.empty()  # blocks of the last search that the flush has not sent yet
        self._seen = host.generation
        self._began = self._look_at = 0.0

    def _set_up(self, tier: LowerTier, config: Config) -> None:
        setting = {DISK: config.disk_admission, REMOTE: config.remote_admission}
        if setting.get(tier.name, "all") != "all":
            tier.write = WriteMode.SPILL  # at its store, a block was requested only once
            num_keys = self._host.num_slots
            num_keys += tier.pool.num_slots if tier.pool is not None else _MOST_KEYS
            num_keys = min(max(num_keys, _LEAST_KEYS), _MOST_KEYS)
            self._admissions[tier.name] = SeenOften(2, num_keys=num_keys)
        if tier.name == REMOTE and config.remote_mode == "read-only":
            tier.write = WriteMode.NEVER

    @property
    def counts_requests(self) -> bool:
        """Whether admission to some tier depends on how often a block was requested."""
        return bool(self._admissions)

    def requested(self, keys: Keys) -> None:
        """Count a request for these blocks."""
        for admission in self._admissions.values():
            admission.see(keys)

    def wrote(self, tier: TierName, *, ok: bool) -> None:
        """Note that a copy to a tier ended. Each failure doubles the pause before the next spill.

        Without a pause every step would resend the same blocks: they are still the coldest.
        """
        if ok:
            self._rests.pop(tier, None)
            return
        _, seconds = self._rests.get(tier, (0.0, _REST_SECONDS / 2))
        seconds = min(2 * seconds, _MOST_REST_SECONDS)
        self._rests[tier] = (self._clock() + seconds, seconds)

    def note_health(self, tier: TierName) -> None:
        """Note that a tier's health changed: its failures no longer count; the flush looks again.

        Writes that an outage failed are of blocks that the last search had found.
        """
        self._rests.pop(tier, None)
        self._seen = -1

    def reset(self) -> None:
        """Drop the flush and never flush again: no later process can ask for these blocks."""
        self._flush_seconds = 0.0
        self._left = Keys.empty()

    def _is_resting(self, tier: LowerTier) -> bool:
        return self._rests.get(tier.name, (0.0, 0.0))[0] > self._clock()

    # -- write-through --------------------------------------------------------------------------

    def stored(self, keys: Keys, *, parent: Key | None, chained: bool) -> None:
        """Write blocks through that were just stored in the host, after ``parent`` in a chain."""
        for tier in self._tiers:
            if tier.write is WriteMode.THROUGH and not tier.ailment:
                self._send(tier, keys, parent, chained=chained)

    # -- spill ----------------------------------------------------------------------------------

    def spill(self) -> None:
        """Copy the blocks that the host would evict next to spill tiers. Call this once a step.

        A burst that outruns the watermark evicts blocks that no lower tier has yet.
        """
        self._watermark.demand(self._host.num_reserved - self._num_reserved)
        self._num_reserved = self._host.num_reserved
        wanted = self._watermark.depth - self._host.num_free
        # Searching the coldest slots takes as long as the rest of a step, and mostly finds nothing.
        now = self._clock()
        state = (self._num_reserved, self._host.generation)
        if wanted <= 0 or (state == self._clean and now < self._clean_until):
            return
        has_sent = False
        for tier in self._tiers:
            if tier.write is WriteMode.SPILL and not tier.ailment and not self._is_resting(tier):
                has_sent |= self._spill_to(tier, wanted, now)
        if not has_sent:
            self._clean, self._clean_until = state, now + _CLEAN_SECONDS

    def _spill_to(self, tier: LowerTier, wanted: int, now: float) -> bool:
        coldest = self._host.eviction.coldest(wanted)
        missing = coldest.take(~tier.known(coldest, now))
        # Not chained. Reversed: the tier evicts the last block first, which is the coldest then.
        return self._send(tier, missing.take(self._admits(tier, missing))[::-1])

    # -- flush ----------------------------------------------------------------------------------

    @property
    def can_flush(self) -> bool:
        """Whether there is an available spill tier that outlives the process."""
        return bool(self._flush_seconds and self._flushed and not self._flushed.ailment)

    @property
    def flush_is_due(self) -> bool:
        """Whether blocks may remain to flush now, so that the engine should keep stepping."""
        return self.can_flush and (len(self._left) > 0 or self._host.generation != self._seen)

    @property
    def is_flushing(self) -> bool:
        """Whether blocks may remain to flush, or are being stored or written to a lower tier.

        Promotions do not count, or ``close`` would wait for a read that hangs.
        """
        is_writing = any(not (move.upward or move.late) for move in self._moves.values())
        return self.flush_is_due or is_writing or self._transfers.blocks_from_device > 0

    def flush(self) -> None:
        """Order the next blocks that only the host holds. Call this only while the engine is idle.

        Searches the whole host if a block was stored since the last search.
        """
        tier = self._flushed
        if tier is None or not self.flush_is_due:
            return
        now = self._clock()
        if self._host.generation != self._seen and now >= self._look_at:
            self._search(tier, now)
        elif not len(self._left):
            return
        elif now >= self._began + self._flush_seconds or self._is_resting(tier):
            log.info("%d blocks that only host memory holds are not written", len(self._left))
            self._left = Keys.empty()
            return
        moves = self._moves.values()
        num_going = sum(len(m.keys) for m in moves if m.tier is tier and not m.upward)
        count = self._most_flushing - num_going
        if count > 0:
            # Reversed: the ends of chains come last, so the tier evicts them first.
            keys, self._left = self._left[:count][::-1], self._left[count:]
            wanted = self._host.cached(keys) & ~tier.known(keys, now)
            wanted[wanted] = self._admits(tier, keys.take(wanted))
            self._send(tier, keys.take(wanted))

    def _search(self, tier: LowerTier, now: float) -> None:
        self._seen = self._host.generation
        found = self._host.eviction.coldest(self._host.num_slots)
        self._left = found.take(~tier.known(found, now))
        self._began = now
        done = self._clock()
        self._look_at = done + _LOOK_RESTS * (done - now)

    # -- sending --------------------------------------------------------------------------------

    def _send(
        self, tier: LowerTier, keys: Keys, parent: Key | None = None, *, chained: bool = False
    ) -> bool:
        """Order copies of these blocks to a tier, by tenant; return whether any was ordered."""
        owners, parts, has_sent = self._host.eviction.tenants_of(keys), {0: keys}, False
        if owners is not None:  # blocks of one chain are stored together, by one tenant
            parts = {tenant: keys.take(owners == tenant) for tenant in np.unique(owners).tolist()}
        for tenant, part in parts.items() if len(keys) else ():
            room = tier.reserve(part, self._clock(), parent=parent, chained=chained, tenant=tenant)
            if room is None:
                continue
            positions, writing = room
            going = part.take(positions)
            reading = self._host.lease(going, Purpose.COPY)
            assert reading is not None
            transfer_id = self._transfers.move(HOST, tier.name, going, reading, writing)
            self._moves[transfer_id] = Move(tier, going, upward=False)
            has_sent = True
        return has_sent

    def _admits(self, tier: LowerTier, keys: Keys) -> npt.NDArray[np.bool_]:
        admission = self._admissions.get(tier.name)
        return admission.admits(keys) if admission is not None else np.full(len(keys), True)
