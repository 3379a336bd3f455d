"""One lower tier as the scheduler sees it: its blocks, reservations, health and reset number.

::

                  blocks are found in          a block is written to   after a copy
    slot tier     our pool of its slots        a slot of that pool     the lease ends
    keyed tier    cached answers of the tier   its key                 the outcome is cached, too
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import EventKind, EventLog
from kvferry.cache.policies.contract import EvictionPolicyMaker
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Index, Lease
from kvferry.core.keys import Key, Keys, Recovered
from kvferry.errors import InputError
from kvferry.types import NO_SLOT, NO_SLOTS, Opened, Rank, SlotArray, TierName

log = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]

REMEMBER_SECONDS = 10.0
REMEMBER_KEYS = 1 << 17

_NEVER = float("-inf")
_AGREE_BLOCKS = 1 << 18
"""Blocks compared per batch: ten million at once would take gigabytes."""

_RESTORE_BLOCKS = 4096
"""Blocks restored per batch. Blocks written together are mostly of one conversation; the first of
them are its beginning and are evicted last."""


class WriteMode(Enum):
    """When blocks are copied from the host to a lower tier."""

    THROUGH = "through"  # as soon as they are stored in the host
    SPILL = "spill"  # before the host evicts them
    NEVER = "never"  # this server only reads the tier


class Presence(NamedTuple):
    """The lookup result of some keys on one tier, key by key.

    ``readable``: the tier has the block. ``known``: the tier has the block or was sent it, so
    sending it again is useless. ``unknown``: only the tier itself can tell. ``slots`` are the slots
    of a slot tier, ``NO_SLOT`` where it does not have the block.
    """

    readable: Flags
    known: Flags
    unknown: Flags
    slots: SlotArray = NO_SLOTS


class LowerTier(ABC):
    """One lower tier, under the name that the workers use.

    Owns the knowledge of its blocks and its health, not the bytes. ``now`` is the scheduler's time.
    """

    pool: Pool | None = None

    def __init__(self, name: TierName, write: WriteMode = WriteMode.SPILL) -> None:
        self.name = name
        self.write = write
        self.log = EventLog(time.monotonic)
        """Log of blocks found, lost and promoted on this tier; a slot tier uses its pool's log."""
        self.ailment = ""
        """Why the tier is unavailable, as reported by the first such rank; empty if available."""
        self._ailing: dict[Rank, str] = {}
        self.has_remains = False
        """Whether ranks found blocks of an earlier run, but none that all of them have. The tier
        must forget those: a reset may have reached only some of the ranks."""
        self.reset_number = 0
        """The greatest reset number that a rank found; blocks of smaller ones never match."""

    def note_health(self, rank: Rank, reason: str) -> None:
        """Note why the tier is unavailable on a rank; empty ``reason``: it is available again."""
        self._ailing.pop(rank, None)
        if reason:
            self._ailing[rank] = reason
        reasons = (f"rank {rank}: {reason}" for rank, reason in self._ailing.items())
        self.ailment = next(reasons, "")

    @abstractmethod
    def lookup(self, keys: Keys, now: float) -> Presence:
        """Return what is known of these keys on this tier."""

    def known(self, keys: Keys, now: float) -> Flags:
        """Return, for each key, whether the tier has the block or was sent it."""
        return self.lookup(keys, now).known

    def read(self, slots: SlotArray) -> Lease | None:
        """Lease slots that a lookup just found readable; None if the tier has no slots."""
        return None

    @abstractmethod
    def reserve(
        self,
        keys: Keys,
        now: float,
        *,
        parent: Key | None = None,
        chained: bool = False,
        tenant: int = 0,
    ) -> tuple[SlotArray, Lease | None] | None:
        """Reserve room for the blocks that the tier lacks; return their positions in ``keys``.

        Also returns the lease of a slot tier's slots. The blocks are ``tenant``'s; a chain
        begins behind ``parent``. None if it lacks no block or has no room.
        """

    def answered(self, keys: Keys, there: Flags, now: float) -> None:  # noqa: B027  not slot tiers
        """Note a tier's answer for these blocks; a tier that did not answer in time has none."""

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        """Note a completed read from the tier or write to it; ``ok``: the blocks that succeeded."""
        if upward:
            self.log.append(EventKind.PROMOTED, keys=lambda: keys.take(ok))

    def dropped(self, keys: Keys) -> None:  # noqa: B027  a slot tier's lease informs its pool
        """Note that an ordered write of these blocks was cancelled before it was sent."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every block."""


@dataclass(eq=False)
class Move:
    """A promotion (``upward``) or writeback in flight. No request waits for a ``late`` one."""

    tier: LowerTier
    keys: Keys
    upward: bool
    late: bool = False


class SlotTier(LowerTier):
    """A tier whose slots the scheduler assigns. Owns the pool that knows which slot has a block."""

    pool: Pool

    def __init__(self, name: TierName, pool: Pool, write: WriteMode = WriteMode.SPILL) -> None:
        super().__init__(name, write)
        self.pool = pool
        self.log = pool.log
        self.num_restored = 0
        """Blocks restored from an earlier run."""
        self._ranks: list[Opened | None] = []
        self._is_shared = False

    def open_all(self, ranks: Sequence[Opened | None], *, is_shared: bool = False) -> None:
        """Restore the blocks that the ranks found, once all ranks have opened the tier.

        No slot can be used before that. With ``is_shared`` each rank has slots of its own.
        """
        self._ranks, self._is_shared = list(ranks), is_shared
        for rank, opened in enumerate(ranks):
            if opened is None:
                self.note_health(Rank(rank), "it is not open yet")
        self._open()

    def open(self, rank: Rank, opened: Opened) -> None:
        """Note that a rank has opened the tier after it failed to at the start."""
        if rank < len(self._ranks) and self._ranks[rank] is None:
            self._ranks[rank] = opened
            self._open()

    def _open(self) -> None:
        found = [opened for opened in self._ranks if opened is not None]
        if len(found) < len(self._ranks) or not found:
            return
        self._ranks = []
        num_places = min(opened.num_places for opened in found)
        recovered = []
        for each in found:
            keys, places = Keys(each.keys), each.places.astype(np.int64)
            if each.num_places > num_places:  # this rank has more slots than another
                fits = places < num_places
                keys, places = keys.take(fits), places[fits]
            recovered.append((keys, places))
        if self._is_shared:
            recovered = [united(recovered, num_places)]
            num_places *= len(found)
        self.pool.grow(min(num_places, self.pool.num_slots))
        self.reset_number = max(opened.reset_number for opened in found)
        if any(opened.reset_number < self.reset_number for opened in found):
            self.has_remains = True  # the last reset did not reach a rank
        elif any(len(places) for _, places in recovered):
            self.has_remains = not self.restore(recovered)

    def restore(self, recovered: Sequence[Recovered]) -> int:
        """Restore the blocks that all ranks have from an earlier run; return how many are new."""
        keys, places = agreed(recovered, self.pool.num_slots)
        new = ~self.pool.known(keys)
        if not new.all():
            keys, places = keys.take(new), places[new]
        self.pool.table.free.give_out_next(places)
        for start in range(0, len(keys), _RESTORE_BLOCKS):
            part = slice(start, start + _RESTORE_BLOCKS)
            # The chain is not known yet: the pool learns it when the blocks are stored again.
            lease = self.pool.reserve(keys[part], chained=False, tenant=self.pool.eviction.before)
            assert lease is not None
            assert np.array_equal(lease.slots, places[part])
            lease.commit()
        self.num_restored += len(keys)
        return len(keys)

    def lookup(self, keys: Keys, now: float) -> Presence:
        slots, cached = self.pool.locate(keys)
        unknown = np.zeros(len(slots), dtype=bool)  # the pool knows every block
        return Presence(cached, slots != NO_SLOT, unknown, slots)

    def read(self, slots: SlotArray) -> Lease:
        return self.pool.claim(slots)

    def reserve(
        self,
        keys: Keys,
        now: float,
        *,
        parent: Key | None = None,
        chained: bool = False,
        tenant: int = 0,
    ) -> tuple[SlotArray, Lease] | None:
        lease = self.pool.reserve(keys, parent=parent, chained=chained, tenant=tenant)
        return None if lease is None else (lease.positions, lease)

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        if not upward:
            here = ok & self.pool.cached(keys)  # some may have been dropped meanwhile
            self.log.append(EventKind.FOUND, keys=keys.take(here))

    def reset(self) -> None:
        self.pool.reset()


class KeyedTier(LowerTier):
    """A tier that finds blocks by their keys. Owns the cache of its answers.

    An answer, yes or no, is valid for ``remember`` seconds; answers for ``capacity`` keys are kept.
    """

    def __init__(
        self,
        name: TierName,
        write: WriteMode = WriteMode.SPILL,
        *,
        remember: float = REMEMBER_SECONDS,
        capacity: int = REMEMBER_KEYS,
    ) -> None:
        super().__init__(name, write)
        self.num_asked = 0
        self.num_found = 0
        self.num_refused = 0
        self._remember = remember
        self._answers = AnswerCache(capacity)

    def lookup(self, keys: Keys, now: float) -> Presence:
        return self._answers.lookup(keys, now)

    def reserve(self, keys: Keys, now: float, **_: object) -> tuple[SlotArray, None] | None:
        positions = np.flatnonzero(~self.known(keys, now))[: self._answers.capacity]
        if not len(positions):
            return None
        self._answers.note_sent(keys.take(positions))
        return positions, None

    def answered(self, keys: Keys, there: Flags, now: float) -> None:
        self.num_asked += len(keys)
        self.num_found += int(there.sum())
        self._note(keys, there, now)

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        if not upward:  # a refused block may be on the tier, written by another server
            self.num_refused += int(np.count_nonzero(~ok))
            self.dropped(keys.take(~ok))
            keys, ok = keys.take(ok), ok[ok]
        # A "yes" whose read failed is cached as "no": a request that asked again at once would get
        # the same answer and wait for the same failure.
        if not upward or not ok.all():
            self._note(keys, ok, now)

    def dropped(self, keys: Keys) -> None:
        self._answers.answer(keys, np.zeros(len(keys), dtype=bool), _NEVER)

    def note_health(self, rank: Rank, reason: str) -> None:
        super().note_health(rank, reason)
        self._answers.doubt()

    def reset(self) -> None:
        self._answers.clear()
        self.log.append(EventKind.LOST)

    def _note(self, keys: Keys, there: Flags, now: float) -> None:
        self._answers.answer(keys, there, now + self._remember)
        self.log.append(EventKind.FOUND, keys=lambda: keys.take(there))
        self.log.append(EventKind.LOST, keys=lambda: keys.take(~there))


def lower_tier(
    name: TierName,
    num_places: int | None,
    write: WriteMode,
    policy: EvictionPolicyMaker = Lru,
    *,
    recovered: Sequence[Opened | None] = (),
    is_shared: bool = False,
) -> LowerTier:
    """Return a slot tier with ``num_places`` slots; if that is None, a keyed tier.

    ``policy`` chooses the blocks to evict. ``recovered`` are the blocks of each rank from an
    earlier run (``TierMover.recovered``), None for a rank that has not opened the tier. With
    ``is_shared`` each rank has ``num_places`` slots of its own.
    """
    if num_places is None:
        return KeyedTier(name, write)
    total = num_places * (len(recovered) if is_shared else 1)
    pool = Pool(total, policy, num_ready=0 if None in recovered else total)
    tier = SlotTier(name, pool, write)
    try:
        tier.open_all(recovered, is_shared=is_shared)
    except InputError as error:  # bad data of a tier must not keep an engine from starting
        log.error("tier %s begins empty: %s", name, error)
    return tier


# -- blocks recovered from an earlier run --------------------------------------------------------


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """Return the blocks that every rank has in the same slot, in the first rank's order.

    If a key is in several slots, the one written last counts.

    Raises:
        InputError: a rank names a slot that does not exist, or names one twice.
    """
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys, places = recovered[0]
    for others in recovered[1:]:
        same = _same((keys, places), others, num_places)
        if not same.all():
            keys, places = keys.take(same), places[same]
    return _newest(keys, places)


def _same(ours: Recovered, theirs: Recovered, num_places: int) -> npt.NDArray[np.bool_]:
    """Return, for each block of one rank, whether another rank has the same block in its slot."""
    (keys, places), (other_keys, other_places) = ours, theirs
    found = np.full(num_places, NO_SLOT, dtype=np.int32)
    found[other_places] = np.arange(len(other_places), dtype=np.int32)
    same = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _AGREE_BLOCKS):
        there = found.take(places[start : start + _AGREE_BLOCKS])
        both = np.flatnonzero(there != NO_SLOT)
        is_same = keys.array[start + both] == other_keys.array[there[both]]
        same[start + both] = is_same.all(axis=1)
    return same


def united(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """Return the blocks of all ranks, if each rank has slots of its own: see ``SharedMover``.

    ``num_places`` are the slots of one rank.
    """
    num_ranks = len(recovered)
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys = Keys(np.concatenate([keys.array for keys, _ in recovered]))
    places = np.concatenate(
        [places * num_ranks + rank for rank, (_, places) in enumerate(recovered)]
    )
    # The ages of blocks on different ranks are unknown: merge as if all wrote at the same pace.
    ages = np.concatenate([np.arange(len(keys)) / max(1, len(keys)) for keys, _ in recovered])
    order = np.argsort(ages, kind="stable")
    return _newest(keys.take(order), places[order])


def _newest(keys: Keys, places: SlotArray) -> Recovered:
    """Return each key once, with the slot that was written last.

    Compares only the first word of keys: of two that share it, the older is lost, which is safe.
    """
    words = keys.array[:, 0]
    order = np.argsort(words, kind="stable")
    words = words.take(order)
    older = order[:-1][words[1:] == words[:-1]]
    if not len(older):
        return keys, places
    newest = np.ones(len(keys), dtype=bool)
    newest[older] = False
    return keys.take(newest), places[newest]


def _check(rank: int, keys: Keys, places: SlotArray, num_places: int) -> None:
    if len(keys) != len(places):
        raise InputError(f"rank {rank} recovered {len(keys)} blocks at {len(places)} places")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_places:
        raise InputError(
            f"rank {rank} recovered places {int(places.min())} to {int(places.max())}; there are "
            f"places 0 to {num_places - 1}"
        )
    named = np.zeros(num_places, dtype=bool)
    named[places] = True
    if np.count_nonzero(named) != len(places):
        raise InputError(f"rank {rank} recovered a place twice")


# -- cached answers of keyed tiers ----------------------------------------------------------------


class AnswerCache:
    """The last ``capacity`` keys that a tier was asked for or sent; the oldest are dropped first.

    Owns each key's last answer (there or not), the time until which it is valid, and whether we
    sent the block. A block counts as sent until the tier answers that it is not there.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"a cache of answers needs room for at least one, got {capacity}")
        self.capacity = capacity
        self._index = Index(capacity)
        self._used = np.zeros(capacity, dtype=bool)
        self._there = np.zeros(capacity, dtype=bool)
        self._until = np.full(capacity, _NEVER)
        self._sent = np.zeros(capacity, dtype=bool)
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def lookup(self, keys: Keys, now: float) -> Presence:
        """Return what the valid answers say; keys without a valid answer are unknown."""
        found = self._index.find(keys)
        here = found != NO_SLOT
        believed = here & (self._until.take(found, mode="wrap") > now)
        readable = believed & self._there.take(found, mode="wrap")
        known = readable | (here & self._sent.take(found, mode="wrap"))
        return Presence(readable, known, ~believed)

    def answer(self, keys: Keys, there: Flags, until: float) -> None:
        """Cache an answer, valid until ``until``. A block that is not there counts as not sent."""
        slots = self._slots(keys)
        self._there[slots] = there[: len(slots)]
        self._until[slots] = until
        self._sent[slots] &= there[: len(slots)]

    def note_sent(self, keys: Keys) -> None:
        """Note that the blocks of these keys are being written to the tier."""
        self._sent[self._slots(keys)] = True

    def doubt(self) -> None:
        """Invalidate all answers; the blocks we sent still count as sent."""
        self._until.fill(_NEVER)

    def clear(self) -> None:
        self._index.clear()
        self._used.fill(False)

    def _slots(self, keys: Keys) -> SlotArray:
        """Return the entries of these distinct keys, made the newest; their contents are kept."""
        keys = keys[: self.capacity]
        old = self._index.find(keys)
        known = old != NO_SLOT
        was = [of.take(old, mode="wrap") for of in (self._there, self._until, self._sent)]
        self._drop(old[known])
        slots = (self._next + np.arange(len(keys))) % self.capacity
        self._next = (self._next + len(keys)) % self.capacity
        self._drop(slots[self._used.take(slots)])
        self._index.insert(keys, slots)
        self._used[slots] = True
        self._there[slots] = was[0] & known
        self._until[slots] = np.where(known, was[1], _NEVER)
        self._sent[slots] = was[2] & known
        return slots

    def _drop(self, slots: SlotArray) -> None:
        self._index.remove(slots)
        self._used[slots] = False
