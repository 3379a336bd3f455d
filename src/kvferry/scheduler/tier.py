"""One tier below the host, of either kind: what it has, what it takes, whether it can be used.

::

                  what it has                a block goes to       after a move
    placed tier  a pool of ours says        a slot of that pool   the leases tell the pool
    keyed tier   it is asked, and answers   its key, no slot      what happened is an answer too
                  are remembered
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.cache.index import Index
from kvferry.cache.leases import Lease, PoolCounts
from kvferry.cache.policies.admission import SeenOften
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Neighbours
from kvferry.config import Config
from kvferry.core.keys import Keys, Recovered
from kvferry.errors import InputError
from kvferry.scheduler.transfers import End
from kvferry.settings.tiers import DISK, REMOTE
from kvferry.types import NO_SLOT, NO_SLOTS, Key, Rank, RunNumbers, SlotArray, TierName

Flags = npt.NDArray[np.bool_]

_MOST = 1 << 16


class Joints:
    """Which blocks of one tier are known to end an object, and which should once they are sent.

    Owns that, for so many blocks; what it has forgotten is at worst written once more.
    """

    def __init__(self, capacity: int = _MOST) -> None:
        self._capacity = capacity
        self._ends: dict[Key, None] = {}
        self._awaited: dict[Key, None] = {}

    def heard(self, keys: Keys, there: Flags, runs: RunNumbers | None) -> None:
        """The tier was asked for chains: what is there, and not what follows, ends an object."""
        if runs is None:
            return
        continues = np.zeros(len(keys), dtype=bool)
        continues[:-1] = there[1:] & (runs[1:] == runs[:-1])
        self._note(self._ends, keys.take(there & ~continues))

    def cut(self, keys: Keys, starts: SlotArray, before: Sequence[Key | None]) -> RunNumbers:
        """The runs to write these blocks as, of which these follow each other.

        Each ends an object. ``before`` are the keys before the runs that begin at ``starts``.
        """
        self._note(self._awaited, (key for key in before if key is not None))
        is_first = np.zeros(len(keys), dtype=bool)
        is_first[starts] = True
        awaited = [at + 1 for at, key in enumerate(keys) if key in self._awaited]
        is_first[[at for at in awaited if at < len(keys)]] = True
        self._note(self._ends, keys.take(np.append(is_first[1:], True)))
        return np.cumsum(is_first)

    def ends(self, key: Key) -> bool:
        """Whether an object has its name, as far as is known."""
        return key in self._ends

    def lost(self, keys: Keys) -> None:
        """These are not there, or not under their names."""
        for key in keys:
            self._ends.pop(key, None)

    def clear(self) -> None:
        self._ends.clear()
        self._awaited.clear()

    def _note(self, where: dict[Key, None], keys: Iterable[Key]) -> None:
        for key in keys:
            where.pop(key, None)
            where[key] = None
        while len(where) > self._capacity:
            del where[next(iter(where))]


# ------------------------------------------------------------------------------------------------
# What may be written to a tier at all: blocks asked for often enough, and so many bytes a day.

_DAY = 86400.0
_BURST = 8
"""One part in so many of a day's bytes may be written at once; the others come over the day."""

_LEAST_KEYS, _MOST_KEYS = 1 << 18, 1 << 20
"""So many different blocks are told apart among all that were asked for lately, in 4 to 16 MiB."""

_TIMES = {"all": 1, "requested-twice": 2}
"""How often a block must have been asked for, by the settings' words."""


class WriteBudget:
    """Bytes that may be written, so that no 24 hours see more than a day's. Owns what is left.

    ::

        left at the start: 1/8 of a day's;  comes back: 7/8 of a day's each day

    Counted from the start: a restart begins anew.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._most = bytes_per_day / _BURST
        self._rate = (bytes_per_day - self._most) / _DAY
        self._left = self._most
        self._at = now

    def left(self, now: float) -> int:
        """Bytes that may be written now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return int(self._left)

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes


class Gate:
    """Lets blocks through to one tier. Owns how often keys were asked for, and the budget."""

    def __init__(
        self,
        *,
        times: int = 1,
        num_keys: int = 1,
        bytes_per_day: int | None = None,
        block_bytes: int = 0,
        now: float = 0.0,
    ) -> None:
        """``block_bytes`` are those that a block costs on all ranks together."""
        self._seen = SeenOften(times, num_keys=min(max(num_keys, _LEAST_KEYS), _MOST_KEYS))
        self._block_bytes = block_bytes
        self._budget = WriteBudget(bytes_per_day, now) if bytes_per_day is not None else None

    def see(self, keys: Keys) -> None:
        """A request asked for these blocks."""
        self._seen.see(keys)

    def lets(self, keys: Keys, now: float) -> npt.NDArray[np.bool_]:
        """For each of these, from the first on, whether it may be written now."""
        lets = self._seen.admits(keys)
        if self._budget is not None and self._block_bytes:
            room = max(0, self._budget.left(now)) // self._block_bytes
            lets &= np.cumsum(lets) <= room
        return lets

    def wrote(self, num_blocks: int) -> None:
        """So many were sent."""
        if self._budget is not None:
            self._budget.spend(num_blocks * self._block_bytes)


def times_asked(config: Config, tier: TierName) -> int:
    """How often a block must have been asked for to go to this tier."""
    after = {DISK: config.disk_admission, REMOTE: config.remote_admission}.get(tier, "all")
    return _TIMES[after]


def gate_of(
    config: Config, tier: TierName, *, num_keys: int | None, block_bytes: int, now: float
) -> Gate | None:
    """What the settings let through to a tier; None where that is everything.

    ``num_keys``: about how many blocks host memory and the tier hold together; None: any number.
    """
    times = times_asked(config, tier)
    per_day = config.disk_write_per_day if tier == DISK else None
    if times == 1 and per_day is None:
        return None
    return Gate(
        times=times,
        num_keys=_MOST_KEYS if num_keys is None else num_keys,
        bytes_per_day=per_day,
        block_bytes=block_bytes,
        now=now,
    )


# ------------------------------------------------------------------------------------------------
# Where on a tier blocks should go so that each conversation's lie side by side.
#
# ::
#
#     spilled      ends before beginnings: each piece goes right before the one that follows it
#     stored       beginnings before ends: each piece goes right behind the one before it

Runs = tuple[SlotArray, tuple[Key | None, ...]]
"""Where runs of blocks that follow each other begin, and the key before each (``Pool.runs_of``)."""

_MOST_AWAITED = 1 << 14
"""So many conversations whose beginnings are still to come are remembered."""


class SideBySide:
    """Knows of pieces whose beginnings are not here yet. Owns where those should go."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._awaited: OrderedDict[Key, int] = OrderedDict()  # the slot after, by the key to come

    def clear(self) -> None:
        self._awaited.clear()

    def wish(self, keys: Keys, runs: Runs, *, grows_down: bool) -> Neighbours:
        """Right before the block that follows a run, or right behind the one it follows."""
        starts, before = runs
        lengths = np.diff(np.append(starts, len(keys)))
        numbers = np.repeat(np.arange(len(starts)), lengths)
        wanted = np.full(len(keys), NO_SLOT, dtype=np.int64)
        pieces = zip(starts.tolist(), lengths.tolist(), before, strict=True)
        for start, length, parent in pieces:
            after = self._awaited.pop(keys[start + length - 1], None) if grows_down else None
            if after is not None:
                wanted[start : start + length] = np.arange(after - length, after)
            elif parent is not None:
                slot = self._pool.slot_of(parent)
                if slot != NO_SLOT:
                    wanted[start : start + length] = np.arange(slot + 1, slot + 1 + length)
        return Neighbours(wanted, numbers, grows_down)

    def note(self, keys: Keys, runs: Runs, lease: Lease) -> None:
        """These got slots: what is before each run, and still to come, should lie before it."""
        starts, before = runs
        at = np.searchsorted(lease.positions, starts)
        for position, start, parent in zip(at.tolist(), starts.tolist(), before, strict=True):
            if parent is None or position >= len(lease) or lease.positions[position] != start:
                continue
            if self._pool.slot_of(parent) == NO_SLOT:
                self._awaited[parent] = lease.slots.item(position)
        while len(self._awaited) > _MOST_AWAITED:
            self._awaited.popitem(last=False)


# ------------------------------------------------------------------------------------------------
# What an earlier life left on a tier with places: believed where all ranks have the same.

_PIECE = 1 << 18


def agreed(recovered: Sequence[Recovered], num_places: int) -> Recovered:
    """The blocks that every rank has at the same place, in the first rank's order.

    A key that is at several places counts where it was written last. InputError where a rank names
    a place that does not exist, or one twice.
    """
    for rank, (keys, places) in enumerate(recovered):
        _check(rank, keys, places, num_places)
    keys, places = recovered[0]
    for other_keys, other_places in recovered[1:]:
        same = _same(keys, places, other_keys, other_places, num_places)
        if not same.all():
            keys, places = keys.take(same), places[same]
    return _newest(keys, places)


def _same(
    keys: Keys, places: SlotArray, other_keys: Keys, other_places: SlotArray, num_places: int
) -> npt.NDArray[np.bool_]:
    """For each block of one rank, whether another rank has the same at its place."""
    found = np.full(num_places, NO_SLOT, dtype=np.int32)
    found[other_places] = np.arange(len(other_places), dtype=np.int32)
    same = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _PIECE):  # of ten million all at once would be gigabytes
        there = found.take(places[start : start + _PIECE])
        both = np.flatnonzero(there != NO_SLOT)
        ours, theirs = keys.array[start + both], other_keys.array[there[both]]
        same[start + both] = (ours == theirs).all(axis=1)
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
    # Each rank's order as if all had written at the same pace: nobody knows better.
    ages = np.concatenate([np.arange(len(keys)) / max(1, len(keys)) for keys, _ in recovered])
    order = np.argsort(ages, kind="stable")
    return _newest(keys.take(order), places[order])


def within(recovered: Recovered, num_places: int) -> Recovered:
    """Those of a rank's blocks that lie in the first so many places: others have no more."""
    keys, places = recovered
    if not len(places) or int(places.max()) < num_places:
        return recovered
    fits = places < num_places
    return keys.take(fits), places[fits]


def _newest(keys: Keys, places: SlotArray) -> Recovered:
    """Each key once, at the place that was written last.

    By first words alone: of two keys that share one, the older block is lost, which harms nobody.
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


# ------------------------------------------------------------------------------------------------
# What was lately heard of keys that others know: a memory with a bound, for whole requests.


_NEVER = float("-inf")


class Remembered:
    """The last ``capacity`` keys that were asked about or sent; the oldest go first.

    Owns, for each, the last answer (there or not), how long it is believed, and whether we sent the
    block there ourselves, which is believed until we hear otherwise.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"a memory of answers needs room for at least one, got {capacity}")
        self.capacity = capacity
        self._index = Index(capacity)
        self._used = np.zeros(capacity, dtype=bool)
        self._there = np.zeros(capacity, dtype=bool)
        self._until = np.full(capacity, _NEVER)
        self._sent = np.zeros(capacity, dtype=bool)
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def there(self, keys: Keys, now: float) -> Flags:
        """For each key, whether the answer was yes, and is still believed."""
        found = self._index.find(keys)
        return self._believed(found, now) & self._there.take(found, mode="wrap")

    def unknown(self, keys: Keys, now: float) -> Flags:
        """For each key, whether there is no answer that is still believed."""
        return ~self._believed(self._index.find(keys), now)

    def _believed(self, found: SlotArray, now: float) -> Flags:
        return (found != NO_SLOT) & (self._until.take(found, mode="wrap") > now)

    def sent(self, keys: Keys) -> Flags:
        """For each key, whether we sent its block there, and have not heard that it is gone."""
        found = self._index.find(keys)
        return (found != NO_SLOT) & self._sent.take(found, mode="wrap")

    def answer(self, keys: Keys, there: Flags, until: float) -> None:
        """Believe until then what was said of these keys. What is not there was not sent either."""
        slots = self._slots(keys)
        self._there[slots] = there[: len(slots)]
        self._until[slots] = until
        self._sent[slots] &= there[: len(slots)]

    def doubt_sent(self, keys: Keys) -> None:
        """Somebody did not find these: do not rely on having sent them."""
        found = self._index.find(keys)
        self._sent[found[found != NO_SLOT]] = False

    def note_sent(self, keys: Keys) -> None:
        """The blocks of these keys are on their way there."""
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


# ------------------------------------------------------------------------------------------------
# One tier below the host, of either kind: what it has, what it takes, whether it can be used.
#
# ::
#
#                   what it has                a block goes to       after a move
#     placed tier  a pool of ours says        a slot of that pool   the leases tell the pool
#     keyed tier   it is asked, and answers   its key, no slot      what happened is an answer too
#                   are remembered

log = logging.getLogger(__name__)

_FIRST = np.zeros(1, dtype=np.int64)


REMEMBER_SECONDS = 10.0
REMEMBER_KEYS = 1 << 17

_RESTORE_BLOCKS = 4096
"""So many at a time are taken up again. Of those that were written together, which is mostly one
conversation, the first are its beginning: they are to be evicted last."""


class WriteMode(Enum):
    """When the host's blocks are copied to a lower tier."""

    THROUGH = "through"  # as soon as they are stored
    SPILL = "spill"  # when the host is about to evict them


@dataclass(frozen=True, eq=False)
class Room:
    """Where blocks may go: ``end`` takes those at ``positions`` of the keys asked for."""

    positions: SlotArray
    end: End


@dataclass(frozen=True, eq=False)
class Answer:
    """What a tier said of some keys: which are ``there``, or that it has not said ``in_time``.

    ``runs`` is what the asker knew to follow what.
    """

    keys: Keys
    there: Flags
    in_time: bool = True
    runs: RunNumbers | None = None


class TierListener(Protocol):
    """Who wants to know what a tier has, as far as that is heard."""

    def came(self, tier: TierName, keys: Keys) -> None:
        """These blocks can be read there."""

    def went(self, tier: TierName, keys: Keys | None) -> None:
        """These cannot be read there any more; None: whatever was there.

        Blocks that a placed tier evicts are events in the log of its pool.
        """

    def rose(self, keys: Keys) -> None:
        """These were copied up into the host."""


class LowerTier(ABC):
    """One tier below the host, by its name on the workers' side.

    Owns what is known of its blocks and of its health; bytes and orders are others'. ``now`` is the
    scheduler's time.
    """

    pool: Pool | None = None
    most_in_one = 1
    """How many blocks of a chain may lie in one object, which has the name of the last."""
    joints: Joints | None = None
    """What of it ends an object, where not every block does."""

    def __init__(self, name: TierName, write: WriteMode = WriteMode.SPILL) -> None:
        self.name = name
        self.write = write
        self.gate: Gate | None = None
        """What may be written to it; None where that is everything."""
        self.listeners: list[TierListener] = []
        self._ailing: dict[Rank, str] = {}
        self.has_remains = False
        """Whether ranks found blocks of an earlier life here, and none that all of them have. One
        of them may have been told to forget: then the others have what nobody may find again."""

    @property
    def ailment(self) -> str:
        """Why it cannot be used: what the first rank that says so says; empty if none does."""
        return next((f"rank {rank}: {why}" for rank, why in self._ailing.items()), "")

    def heard(self, rank: Rank, reason: str) -> None:
        """A rank says that the tier is away there, and why, or (no reason) that it is back."""
        self._ailing.pop(rank, None)
        if reason:
            self._ailing[rank] = reason

    def listen(self, listener: TierListener) -> None:
        """Tell it from now on what comes and goes."""
        self.listeners.append(listener)

    @abstractmethod
    def there(self, keys: Keys, now: float) -> Flags:
        """For each key, whether its block can be read, as far as is known."""

    def unknown(self, keys: Keys, now: float, runs: RunNumbers | None = None) -> Flags:
        """For each key, whether one would have to ask who knows that these follow each other."""
        return np.zeros(len(keys), dtype=bool)

    @abstractmethod
    def known(self, keys: Keys, now: float) -> Flags:
        """For each key, whether its block is there or on its way, so that sending it is vain."""

    @abstractmethod
    def may_follow(self, parent: Key, now: float) -> bool:
        """Whether a block behind this one could be reached."""

    @abstractmethod
    def read(self, keys: Keys) -> End:
        """Where to read these blocks, which are there; claims them."""

    @abstractmethod
    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        """Where those of these blocks can go that it lacks and has room for; claims that.

        ``runs`` tells what follows what among them where they are no chain, ``tenant`` whose they
        are.
        """

    def answered(self, answer: Answer, now: float) -> None:  # noqa: B027  may be no news
        """It was asked, and has answered or not."""

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        """Blocks were read from it or written to it: which of them really."""
        if upward:
            for listener in self.listeners:
                listener.rose(keys.take(ok))

    def dropped(self, keys: Keys) -> None:  # noqa: B027
        """A write to it will not be sent after all."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing is known to be there any more."""

    def counts(self) -> PoolCounts | None:
        """Its slots, where it has slots of ours."""
        return self.pool.counts if self.pool is not None else None

    def check_integrity(self) -> None:
        if self.pool is not None:
            self.pool.check_integrity()


class SlotTier(LowerTier):
    """A tier whose places we give out. Owns the pool that says which block lies where."""

    pool: Pool

    def __init__(self, name: TierName, pool: Pool, write: WriteMode = WriteMode.SPILL) -> None:
        super().__init__(name, write)
        self.pool = pool
        self._beside = SideBySide(pool)
        self.num_restored = 0
        """Blocks that were here from an earlier life."""

    def restore(self, recovered: Sequence[Recovered]) -> int:
        """What each rank found here from an earlier life; returns how many blocks all of them have.

        Before anything is stored.
        """
        num_blocks = self.take_up(agreed(recovered, self.pool.num_slots))
        self.has_remains = not num_blocks and any(len(places) for _, places in recovered)
        return num_blocks

    def take_up(self, recovered: Recovered) -> int:
        """These blocks are here, whatever ranks they are on; returns how many are new."""
        keys, places = recovered
        new = ~self.pool.known(keys)
        if not new.all():
            keys, places = keys.take(new), places[new]
        self.pool.give_out_next(places)
        for start in range(0, len(keys), _RESTORE_BLOCKS):
            part = slice(start, start + _RESTORE_BLOCKS)
            # A chain is known when it is stored again.
            lease = self.pool.reserve(keys[part], chained=False, tenant=self.pool.before)
            assert lease is not None
            assert np.array_equal(lease.slots, places[part])
            lease.commit()
        self.num_restored += len(keys)
        return len(keys)

    def there(self, keys: Keys, now: float) -> Flags:
        return self.pool.cached(keys)

    def known(self, keys: Keys, now: float) -> Flags:
        return self.pool.known(keys)

    def may_follow(self, parent: Key, now: float) -> bool:
        return bool(self.pool.known(Keys.from_bytes((parent,)))[0])

    def read(self, keys: Keys) -> End:
        lease = self.pool.pin(keys)
        assert lease is not None
        assert len(lease) == len(keys)
        return End.of(self.name, lease)

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        beside = None
        if runs is None and chained:
            runs = (_FIRST, (parent,))
        if runs is not None and len(keys):
            beside = self._beside.wish(keys, runs, grows_down=not chained)
        lease = self.pool.reserve(
            keys, parent=parent, chained=chained, beside=beside, tenant=tenant
        )
        if lease is None:
            return None
        if runs is not None and not chained:
            self._beside.note(keys, runs, lease)
        return Room(lease.positions, End.of(self.name, lease))

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        if not upward:
            here = ok & self.pool.cached(keys)  # what was dropped meanwhile has not come
            for listener in self.listeners:
                listener.came(self.name, keys.take(here))

    def reset(self) -> None:
        self._beside.clear()
        self.pool.reset()


class KeyedTier(LowerTier):
    """A tier that finds blocks by their keys. Owns what is remembered of its answers.

    ``remember`` seconds an answer is believed, yes or no; ``capacity`` keys are remembered at most.
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
        self._remember = remember
        self._answers = Remembered(capacity)

    def there(self, keys: Keys, now: float) -> Flags:
        return self._answers.there(keys, now)

    def unknown(self, keys: Keys, now: float, runs: RunNumbers | None = None) -> Flags:
        return self._answers.unknown(keys, now)

    def known(self, keys: Keys, now: float) -> Flags:
        return self._answers.sent(keys) | self._answers.there(keys, now)

    def may_follow(self, parent: Key, now: float) -> bool:
        """It has room for all: only what is known to be unreachable is not worth sending."""
        key = Keys.from_bytes((parent,))
        return bool(self.known(key, now)[0] or self._answers.unknown(key, now)[0])

    def read(self, keys: Keys) -> End:
        return End(self.name, NO_SLOTS)

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        positions = np.flatnonzero(~self.known(keys, now))[: self._answers.capacity]
        if not len(positions):
            return None
        self._answers.note_sent(keys.take(positions))
        return Room(positions, End(self.name, NO_SLOTS))

    def answered(self, answer: Answer, now: float) -> None:
        self.num_asked += len(answer.keys)
        self.num_found += int(answer.there.sum())
        self._answers.answer(answer.keys, answer.there, now + self._remember)
        self._tell_found(answer.keys, answer.there)

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        # A "yes" that turned out false, or a write that failed, is a "no" for a while: whoever
        # asked the tier again at once would be told the same, and wait for the same failure.
        if not upward or not ok.all():
            self._answers.answer(keys, ok, now + self._remember)
            self._tell_found(keys, ok)

    def dropped(self, keys: Keys) -> None:
        self._answers.answer(keys, np.zeros(len(keys), dtype=bool), float("-inf"))

    def heard(self, rank: Rank, reason: str) -> None:
        super().heard(rank, reason)
        self._answers.doubt()

    def reset(self) -> None:
        self._answers.clear()
        for listener in self.listeners:
            listener.went(self.name, None)

    def _tell_found(self, keys: Keys, there: Flags) -> None:
        for listener in self.listeners:
            listener.came(self.name, keys.take(there))
            listener.went(self.name, keys.take(~there))
