"""One tier below the host as the scheduler sees it: what it has, what it takes, whether it works.

::

                  what it has                     a block goes to       after a copy
    slot tier     a pool of ours says             a slot of that pool   its lease ends
    keyed tier    it is asked; answers are kept   its key               the outcome is an answer too
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
"""So many blocks at a time are compared: ten million at once would take gigabytes."""

_RESTORE_BLOCKS = 4096
"""So many blocks at a time are restored. Blocks written together are mostly one conversation; the
first of them are its beginning and are evicted last."""


class WriteMode(Enum):
    """When the host's blocks are copied to a lower tier."""

    THROUGH = "through"  # as soon as they are stored
    SPILL = "spill"  # when the host is about to evict them
    NEVER = "never"  # others write them


class Presence(NamedTuple):
    """What is known of some keys on one tier, key by key.

    ``readable``: the tier has the block. ``known``: it has it or was sent it, so that sending it
    again would be useless. ``unknown``: the tier would have to be asked. ``slots`` are those of a
    slot tier, ``NO_SLOT`` where it has none.
    """

    readable: Flags
    known: Flags
    unknown: Flags
    slots: SlotArray = NO_SLOTS


class LowerTier(ABC):
    """One tier below the host, by its name on the workers' side.

    Owns what is known of its blocks and its health, not the bytes. ``now`` is the scheduler's time.
    """

    pool: Pool | None = None

    def __init__(self, name: TierName, write: WriteMode = WriteMode.SPILL) -> None:
        self.name = name
        self.write = write
        self.log = EventLog(time.monotonic)
        """Which blocks the tier has, as far as that becomes known; for a slot tier its pool's."""
        self.ailment = ""
        """Why the tier cannot be used, as the first rank that says so puts it; else empty."""
        self._ailing: dict[Rank, str] = {}
        self.has_remains = False
        """Whether ranks found blocks of an earlier life here, but none that all of them have. Such
        blocks must be forgotten: one rank may have been told so, and the others not."""
        self.reset_number = 0
        """The greatest that a rank found; blocks of a smaller one do not count."""

    def note_health(self, rank: Rank, reason: str) -> None:
        """A rank says that the tier is away there, and why, or (no reason) that it is back."""
        self._ailing.pop(rank, None)
        if reason:
            self._ailing[rank] = reason
        reasons = (f"rank {rank}: {reason}" for rank, reason in self._ailing.items())
        self.ailment = next(reasons, "")

    @abstractmethod
    def lookup(self, keys: Keys, now: float) -> Presence:
        """What is known of these keys."""

    def known(self, keys: Keys, now: float) -> Flags:
        """For each key, whether sending its block would be useless."""
        return self.lookup(keys, now).known

    def read(self, slots: SlotArray) -> Lease | None:
        """Claim the slots of blocks that a lookup has just found readable, where it has slots."""
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
        """Claim room for the blocks that the tier lacks: their positions, and slots if it has any.

        They are a tenant's, and a chain behind ``parent`` or blocks by themselves. None where it
        lacks none of them or has no room.
        """

    def answered(self, keys: Keys, there: Flags, now: float) -> None:  # noqa: B027  not slot tiers
        """The tier was asked for these blocks; one that has not answered in time has none."""

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        """Blocks were read from the tier or written to it; ``ok`` tells for which that worked."""
        if upward:
            self.log.append(EventKind.PROMOTED, keys=lambda: keys.take(ok))

    def dropped(self, keys: Keys) -> None:  # noqa: B027  the lease of a slot tier tells its pool
        """A write that was ordered will not be sent after all."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every block."""


@dataclass(eq=False)
class Move:
    """Blocks on their way up or down. A late one keeps its slots, but no request waits for it."""

    tier: LowerTier
    keys: Keys
    upward: bool
    late: bool = False


class SlotTier(LowerTier):
    """A tier whose slots we give out. Owns the pool that says which block lies where."""

    pool: Pool

    def __init__(self, name: TierName, pool: Pool, write: WriteMode = WriteMode.SPILL) -> None:
        super().__init__(name, write)
        self.pool = pool
        self.log = pool.log
        self.num_restored = 0
        """Blocks that were here from an earlier life."""
        self._ranks: list[Opened | None] = []
        self._is_shared = False

    def open_all(self, ranks: Sequence[Opened | None], *, is_shared: bool = False) -> None:
        """Take up what the ranks have, as soon as all of them have opened the tier.

        With ``is_shared`` each rank has places of its own. Before, no place can be used.
        """
        self._ranks, self._is_shared = list(ranks), is_shared
        for rank, opened in enumerate(ranks):
            if opened is None:
                self.note_health(Rank(rank), "it is not open yet")
        self._open()

    def open(self, rank: Rank, opened: Opened) -> None:
        """A rank has opened the tier that it could not open at the start."""
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
            if each.num_places > num_places:  # more than other ranks have
                fits = places < num_places
                keys, places = keys.take(fits), places[fits]
            recovered.append((keys, places))
        if self._is_shared:
            recovered = [united(recovered, num_places)]
            num_places *= len(found)
        self.pool.grow(min(num_places, self.pool.num_slots))
        self.reset_number = max(opened.reset_number for opened in found)
        if any(opened.reset_number < self.reset_number for opened in found):
            self.has_remains = True  # a rank was not told of the last reset
        elif any(len(places) for _, places in recovered):
            self.has_remains = not self.restore(recovered)

    def restore(self, recovered: Sequence[Recovered]) -> int:
        """Take up what all ranks have from an earlier life; returns how many blocks are new."""
        keys, places = agreed(recovered, self.pool.num_slots)
        new = ~self.pool.known(keys)
        if not new.all():
            keys, places = keys.take(new), places[new]
        self.pool.table.free.give_out_next(places)
        for start in range(0, len(keys), _RESTORE_BLOCKS):
            part = slice(start, start + _RESTORE_BLOCKS)
            # Which block follows which is learnt when the chain is stored again.
            lease = self.pool.reserve(keys[part], chained=False, tenant=self.pool.eviction.before)
            assert lease is not None
            assert np.array_equal(lease.slots, places[part])
            lease.commit()
        self.num_restored += len(keys)
        return len(keys)

    def lookup(self, keys: Keys, now: float) -> Presence:
        slots, cached = self.pool.locate(keys)
        unknown = np.zeros(len(slots), dtype=bool)  # the pool knows all
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
    """A tier that finds blocks by their keys. Owns what is remembered of its answers.

    An answer, yes or no, is believed for ``remember`` seconds; ``capacity`` keys are remembered.
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
        if not upward:  # a block that is not taken may be there, written by another server
            self.num_refused += int(np.count_nonzero(~ok))
            self.dropped(keys.take(~ok))
            keys, ok = keys.take(ok), ok[ok]
        # A wrong "yes" is a "no" for a while: a request that asked again at once would get the
        # same answer and wait for the same failure.
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
    """The tier with so many places, or (None) one that finds blocks by their keys.

    ``policy`` chooses the blocks to evict from the places. ``recovered`` is what each rank's tier
    still has from an earlier life (``TierMover.recovered``), None where it is not open yet; with
    ``is_shared`` each rank has ``num_places`` of its own.
    """
    if num_places is None:
        return KeyedTier(name, write)
    total = num_places * (len(recovered) if is_shared else 1)
    pool = Pool(total, policy, num_ready=0 if None in recovered else total)
    tier = SlotTier(name, pool, write)
    try:
        tier.open_all(recovered, is_shared=is_shared)
    except InputError as error:  # a tier's mistake must not keep an engine from starting
        log.error("tier %s begins empty: %s", name, error)
    return tier


# -- what ranks found of an earlier life ---------------------------------------------------------


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks that every rank has at the same place, in the first rank's order.

    Of a key at several places the one written last counts.

    Raises:
        InputError: a rank names a place that does not exist, or names one twice.
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
    """For each block of one rank, whether another rank has the same at its place."""
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
    """The blocks of all ranks, where each has places of its own: see ``SharedMover``.

    ``num_places`` are those of one rank.
    """
    num_ranks = len(recovered)
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys = Keys(np.concatenate([keys.array for keys, _ in recovered]))
    places = np.concatenate(
        [places * num_ranks + rank for rank, (_, places) in enumerate(recovered)]
    )
    # The ranks' orders are merged as if all had written at the same pace: more is not known.
    ages = np.concatenate([np.arange(len(keys)) / max(1, len(keys)) for keys, _ in recovered])
    order = np.argsort(ages, kind="stable")
    return _newest(keys.take(order), places[order])


def _newest(keys: Keys, places: SlotArray) -> Recovered:
    """Each key once, at the place that was written last.

    First words alone are compared: of two keys that share one, the older is lost, which is safe.
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


# -- what tiers remember --------------------------------------------------------------------------


class AnswerCache:
    """The last ``capacity`` keys that a tier was asked about or sent; the oldest go first.

    Owns, for each, the last answer (there or not), how long it is believed, and whether we sent the
    block there ourselves, which is believed until the tier says otherwise.
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
        """What is believed of each key; unknown are those without an answer that still holds."""
        found = self._index.find(keys)
        here = found != NO_SLOT
        believed = here & (self._until.take(found, mode="wrap") > now)
        readable = believed & self._there.take(found, mode="wrap")
        known = readable | (here & self._sent.take(found, mode="wrap"))
        return Presence(readable, known, ~believed)

    def answer(self, keys: Keys, there: Flags, until: float) -> None:
        """Believe this answer until then. A block that is not there counts as not sent."""
        slots = self._slots(keys)
        self._there[slots] = there[: len(slots)]
        self._until[slots] = until
        self._sent[slots] &= there[: len(slots)]

    def note_sent(self, keys: Keys) -> None:
        """The blocks of these keys are on their way to the tier."""
        self._sent[self._slots(keys)] = True

    def doubt(self) -> None:
        """Believe no answer any more; what we sent we still know."""
        self._until.fill(_NEVER)

    def clear(self) -> None:
        self._index.clear()
        self._used.fill(False)

    def _slots(self, keys: Keys) -> SlotArray:
        """The places of these (distinct) keys, as the newest; what was known of them stays."""
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
