"""The slots of one tier: which are free, which hold what, which are claimed.

A slot's life::

    FREE --reserve--> WRITING --commit--> CACHED --evict--> FREE
                         |                  |  ^
                         +--abort--> FREE   +--+ pin / release (counted in readers)

    reset, spoil or disown while claimed: -> DOOMED, not in the index, FREE when the claim ends
    memory still being made ready:           UNREADY --grow--> FREE

Chained keys remember their parent's slot. A slot with children is never evicted, so what is left
of a conversation is always a prefix of it, and a match stops at a hole only if bytes were lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvferry.cache.events import MANY_EVENTS, EventKind
from kvferry.cache.eviction import PoolWishes
from kvferry.cache.integrity import PoolCheck
from kvferry.cache.leases import Ending, Lease, PoolCounts, Purpose, SlotState
from kvferry.cache.policies.contract import Arriving, EvictionPolicyMaker
from kvferry.cache.policies.lru import Lru
from kvferry.cache.slots import Neighbours
from kvferry.core.keys import Duplicates, Keys, require_key
from kvferry.errors import InputError, LeaseError
from kvferry.types import NO_SLOT, NO_SLOTS, Key, SlotArray

PIN_SHARE = 0.25
# As plain numbers: numpy takes an IntEnum the long way.
_FREE, _WRITING, _CACHED, _DOOMED, _UNREADY = (int(state) for state in SlotState)


class Pool(PoolWishes):
    """The slots of one tier. Owns states, index and claims; leaves the bytes to the tier.

    Every call takes a whole request's keys. Not thread-safe: it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicyMaker = Lru,
        *,
        num_ready: int | None = None,
        pin_share: float = PIN_SHARE,
        side_by_side: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All slots, of which the first ``num_ready`` (default: all) can be used from the start.

        ``policy`` makes what says who goes first; ``clock`` is the time it sees, in seconds.
        ``pin_share`` of the slots, at most, are held for who asks for that. ``side_by_side`` gives
        out slots as neighbours, for a medium that is read in runs.
        """
        if num_slots <= 0:
            raise InputError(f"a pool needs at least one slot, got {num_slots}")
        super().__init__(num_slots, policy, pin_share, clock, side_by_side)
        self.num_ready = 0
        """Slots from the first on that can be used; the others wait for :meth:`grow`."""
        self.num_reserved = 0
        """Slots given out for writing so far."""
        self._duplicates = Duplicates()
        self._leases: set[Lease] = set()
        self.grow(num_slots if num_ready is None else num_ready)

    def grow(self, num_ready: int) -> None:
        """The first ``num_ready`` slots can be used from now on; fewer than before is no news."""
        if num_ready > self.num_slots:
            raise InputError(f"a pool of {self.num_slots} slots cannot have {num_ready} ready")
        if num_ready > self.num_ready:
            self._push_free(np.arange(self.num_ready, num_ready))
            self.num_ready = num_ready

    # -- asking ---------------------------------------------------------------------------------

    def keys_of(self, lease: Lease) -> Keys:
        """The keys of a lease's slots that can be matched."""
        slots = lease.slots
        return self._index.keys_of(slots[self._state.take(slots) == _CACHED])

    def key_before(self, lease: Lease) -> Key | None:
        """The key that a lease's first slot follows, if it is here."""
        parent = self._chains.parent_of(int(lease.slots[0]))
        return self._index.key_of(parent) if parent != NO_SLOT else None

    @property
    def num_free(self) -> int:
        return self._free.count

    # -- claiming -------------------------------------------------------------------------------

    def pin(self, keys: Keys, purpose: Purpose = Purpose.READ) -> Lease | None:
        """Claim the leading cached keys for reading; None when the first is not cached."""
        slots = self.leading(keys)
        return self.claim(slots, purpose) if len(slots) else None

    def claim(self, slots: SlotArray, purpose: Purpose = Purpose.READ) -> Lease:
        """Claim slots that were just found, and can be read, for reading."""
        if not self._chains.all_distinct(slots):
            raise InputError(f"{len(slots)} blocks to pin are not distinct; a chain never repeats")
        readers = self._readers.take(slots)
        self._num_idle -= len(slots) - int(np.count_nonzero(readers))
        self._readers[slots] = readers + 1
        lease = Lease(purpose, slots, np.arange(len(slots)), self)
        self._leases.add(lease)
        if len(self._feed) >= MANY_EVENTS:
            self._feed.drain()
        return lease

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None = None,
        chained: bool = True,
        beside: Neighbours | None = None,
        tenant: int = 0,
    ) -> Lease | None:
        """Claim slots to write the keys that are neither cached nor on their way in.

        Evicts as needed. What does not fit is not stored: the lease covers the leading missing
        keys that got a slot (see ``Lease.positions``), None if there are none. ``parent`` is the
        key before the first; ``chained=False`` says that the keys do not depend on each other.
        ``beside`` says where they should lie, in a pool that is ``side_by_side``.
        Where the pool is divided, they are the ``tenant``'s.
        """
        self.require_distinct(keys)
        found = self._index.find(keys)
        above = NO_SLOT
        if chained and parent is not None:
            require_key("a parent", parent)
            above = self._index.find_one(parent)
        if above != NO_SLOT and np.count_nonzero(found == above):
            raise InputError("a key to reserve is its own parent; a chain never repeats")
        missing = (found == NO_SLOT).nonzero()[0]
        all_new = above == NO_SLOT and len(missing) == len(found)
        own = NO_SLOTS
        if not all_new:
            own = np.concatenate(([above], found))
            own = own[own != NO_SLOT]
        if self._fair is not None:
            arriving = Arriving(keys, found, above, chained)
            missing = self._within_ceiling(missing, own, arriving, tenant)
        if len(missing) > self._free.count:
            if self._fair is not None:
                self._fair.expect(tenant, len(missing), self.num_ready)
            self._make_room(
                len(missing) + self._num_spare, own, Arriving(keys, found, above, chained)
            )
        if len(own):
            self._use(own[self._state.take(own) == _CACHED])
        # Chains change below; the policy hears of what happened while they are as they were then.
        self._feed.drain()
        positions = missing[: self._free.count]
        near = beside.at(positions) if beside is not None else None
        slots = self._give_out(len(positions), near)
        if self._fair is not None:
            self._fair.own(slots, tenant)
        arriving = Arriving(keys, found, above, chained)
        self._link(arriving, positions, slots)
        if not len(slots):
            return None
        lease = Lease(Purpose.WRITE, slots, positions, self)
        self._leases.add(lease)
        return lease

    def require_distinct(self, keys: Keys) -> None:
        """InputError where a key is there twice: a chain that closes on itself has no end."""
        if self._duplicates.any_in(keys):
            raise InputError(f"{len(keys)} keys to reserve are not distinct; a chain never repeats")

    def touch(self, keys: Keys) -> None:
        """These keys were used (a hit elsewhere, say): keep them longer."""
        found = self._index.find(keys)
        found = found[self._state.take(found) == _CACHED]
        self._use(found[self._chains.last_mentions(found)])

    def give_out_next(self, slots: SlotArray) -> None:
        """The next slots to be reserved are these free ones, in this order."""
        self._free.give_out_next(slots)

    # -- letting go -----------------------------------------------------------------------------

    def disown(self, lease: Lease) -> None:
        """Stop believing in a lease that is still open: its keys may be stored elsewhere now.

        The slots stay claimed until the lease ends, because a slow rank may still touch them.
        """
        if lease.ended is not None:
            raise LeaseError(f"{lease!r} cannot be disowned: it ended by {lease.ended.value}")
        self._doom(lease.slots)

    def reset(self) -> None:
        """Forget everything at once. Claimed slots come back when their leases end."""
        self._unclaim(self._holds.drop_all())
        self._feed.drain()
        self._first.clear()
        state = self._state[:-1]
        idle = (state == _CACHED) & (self._readers == 0)
        in_use = (state != _FREE) & (state != _UNREADY)
        cached = np.flatnonzero(state == _CACHED)
        if len(cached):
            self.log.append(EventKind.EVICT, NO_SLOTS, self._index.keys_of(cached))
        self._index.clear()
        self._feed.policy.clear()
        self._chains.clear()
        state[in_use] = _DOOMED
        self._push_free(np.flatnonzero(idle))
        self._num_idle = 0
        self._num_doomed = int(np.count_nonzero(state == _DOOMED))

    def end(self, lease: Lease, ending: Ending, failed: SlotArray) -> None:
        """Take a lease's slots back. Called by the lease itself, exactly once."""
        self._leases.remove(lease)
        slots = lease.slots
        readers = None
        if lease.purpose is not Purpose.WRITE:
            readers = self._readers.take(slots) - 1
            self._readers[slots] = readers
        unused = slots[:0]
        if ending is Ending.ABORT or ending is Ending.SPOIL:
            self._doom(slots)
        elif len(failed):
            lost = slots[failed]
            unused = slots[self._chains.follow(slots, lost)]
            self._doom(np.union1d(lost, unused) if ending is Ending.COMMIT else np.unique(lost))
        if readers is not None and np.count_nonzero(readers):
            slots = slots[self._readers.take(slots) == 0]  # what was lost is held no more
        if self._num_doomed:
            doomed = self._state.take(slots) == _DOOMED
            self._num_doomed -= int(np.count_nonzero(doomed))
            self._push_free(np.sort(slots[doomed]))
            slots = slots[~doomed]
        # What was claimed by nobody else and is not doomed is cached from here on.
        self._num_idle += len(slots)
        if ending is Ending.COMMIT:
            self._state[slots] = _CACHED
            self.generation += 1
            self._news.append(self._index.first_words_of(slots))
            self.log.append(EventKind.STORE, slots)
        elif lease.purpose is Purpose.COPY:
            self.log.append(EventKind.RETURN, slots)
        elif len(unused):
            idle = np.isin(slots, unused)
            self.log.append(EventKind.RETURN, slots[idle][::-1])
            self._use(slots[~idle])
        elif len(slots):
            self._use(slots)

    # -- looking --------------------------------------------------------------------------------

    @property
    def counts(self) -> PoolCounts:
        """How the slots are used now. Kept up to date, so that asking costs nothing."""
        return PoolCounts(
            free=self._free.count,
            cached=self._num_idle,
            leased=self.num_ready - self._free.count - self._num_idle,
            total=self.num_slots,
            evicted=self._num_evicted,
            unready=self.num_slots - self.num_ready,
            held=self._holds.count,
            refused_holds=self._holds.num_refused,
        )

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check_integrity(self) -> None:
        """Prove the bookkeeping from scratch; raises IntegrityError with what is wrong."""
        PoolCheck(
            state=self._state[:-1],
            readers=self._readers,
            free=self._free.slots,
            num_ready=self.num_ready,
            index=self._index,
            chains=self._chains,
            policy=self._policy,
            leases=self._leases,
            held=self._holds.all_held(),
            counts=self.counts,
            num_doomed=self._num_doomed,
        ).check()

    def _give_out(self, count: int, beside: Neighbours | None) -> SlotArray:
        """So many free slots, to be written from now on."""
        slots = self._free.take(count, beside)
        if count:
            self.num_reserved += count
            self._state[slots] = _WRITING
        return slots

    def _link(self, arriving: Arriving, positions: SlotArray, slots: SlotArray) -> None:
        """These keys have these slots, and follow each other, from now on.

        ``positions`` are those of the missing keys; ``arriving`` says where the others are.
        """
        keys, found, above, chained = arriving
        if len(slots):
            # Not a copy of the whole request: so many bytes are mapped and faulted in anew.
            new = keys if len(slots) == len(keys.array) else keys.take(positions)
            self._index.insert(new, slots)
            if self._feed.policy.wants_chains:
                chains = self._chains if chained else None
                self._conversations.arrive(slots, positions, found, above, chains)
        if chained and len(slots) == len(found):
            self._chains.begin(slots, above)
        elif chained:
            found[positions] = slots
            self._chains.link(found, np.concatenate(([above], found[:-1])))
