"""The pool of one tier: which slots are free, which block each holds, and which are leased.

A slot's life::

    FREE --reserve--> WRITING --commit--> CACHED --evict--> FREE
                         |                  |  ^
                         +--abort--> FREE   +--+ lease / release (counted in readers)

    reset, spoil or disown while claimed: -> DOOMED, not in the index, FREE when the claim ends
    memory still being made ready:           UNREADY --grow--> FREE

Chained keys record their parent's slot. A slot with children is never evicted, so the blocks left
of a conversation are always a prefix of it. A lookup stops at a hole only if bytes were lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import MANY_EVENTS, EventKind, EventLog
from kvferry.cache.eviction import Eviction
from kvferry.cache.integrity import check_pool
from kvferry.cache.policies.contract import Arriving, EvictionPolicyMaker, Evidence
from kvferry.cache.policies.lru import Lru
from kvferry.cache.slots import (
    ALL_WELL,
    CACHED,
    DOOMED,
    WRITING,
    Ending,
    Lease,
    Places,
    PoolCounts,
    Purpose,
    SlotState,
    SlotTable,
    as_slots,
)
from kvferry.core.keys import Key, Keys, require_key
from kvferry.errors import InputError, IntegrityError, StateError
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

PIN_SHARE = 0.25


class Pool:
    """The slots of one tier. Owns leases, lookups and slot states; leaves the bytes to the tier.

    Leaves eviction order, pins and quotas to ``eviction``. Appends its events to ``log``, for the
    eviction policy and all other readers.

    Calls take a whole request's keys. Not thread-safe: call it on the scheduler's thread only.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicyMaker = Lru,
        *,
        num_ready: int | None = None,
        pin_share: float = PIN_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pool whose first ``num_ready`` slots (default: all) can be used from the start.

        ``policy`` makes the eviction policy; ``clock`` gives it the time in seconds. At most
        ``pin_share`` of the slots are pinned.
        """
        if num_slots <= 0:
            raise InputError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self.num_ready = 0
        """The first this many slots can be used; the others wait for :meth:`grow`."""
        self.num_reserved = 0
        """Slots leased for writing so far."""
        self.generation = 0
        """Grows whenever blocks become matchable: an unchanged value means no new hits."""
        self.log = EventLog(clock)
        self.table = SlotTable(num_slots, self.log)
        self.eviction = Eviction(self.table, policy, pin_share, clock)
        self.leases: set[Lease] = set()
        """Leases that have not ended."""
        self.grow(num_slots if num_ready is None else num_ready)

    def grow(self, num_ready: int) -> None:
        """Make the first ``num_ready`` slots usable; does nothing if that many are already."""
        if num_ready > self.num_slots:
            raise InputError(f"a pool of {self.num_slots} slots cannot have {num_ready} ready")
        if num_ready > self.num_ready:
            self.table.add_free(np.arange(self.num_ready, num_ready))
            self.num_ready = num_ready

    # -- lookups: they change nothing -----------------------------------------------------------

    def lookup(self, keys: Keys) -> SlotArray:
        """Return the slots of the leading keys whose blocks can be read now."""
        found = self.table.index.find_leading(keys)
        if not len(found):
            return found
        readable = self.table.state.take(found) == CACHED
        first = int(readable.argmin())  # the first unreadable slot; 0 if all are readable
        return found if readable[first] else found[:first]

    def match(self, keys: Keys) -> int:
        """Return how many leading keys have blocks that can be read now."""
        return len(self.lookup(keys))

    def find(self, keys: Keys) -> SlotArray:
        """Return the slot of each key whose block is cached or being written, else ``NO_SLOT``."""
        return self.table.index.find(keys)

    def locate(self, keys: Keys) -> tuple[SlotArray, npt.NDArray[np.bool_]]:
        """Return what :meth:`find` returns, and for each key whether its block can be read now."""
        slots = self.table.index.find(keys)
        return slots, self.table.state.take(slots) == CACHED

    def cached(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its block can be read now."""
        return self.table.state.take(self.table.index.find(keys)) == CACHED

    def known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its block is cached or being written."""
        return self.table.index.find(keys) != NO_SLOT

    def state_of(self, key: Key) -> SlotState:
        """Return the state of one key's slot; FREE if the key has none."""
        slot = self.table.index.find_few(key)[0]
        return SlotState(self.table.state.item(slot)) if slot != NO_SLOT else SlotState.FREE

    def keys_of(self, lease: Lease) -> Keys:
        """Return the keys of those of a lease's slots that can be matched."""
        slots = lease.slots
        return self.table.index.keys_of(slots[self.table.state.take(slots) == CACHED])

    def key_before(self, lease: Lease) -> Key | None:
        """Return the key before a lease's first slot in its chain; None if it is not cached."""
        parent = self.table.chains.parents_of(lease.slots[:1]).item()
        return self.table.index.key_of(parent) if parent != NO_SLOT else None

    # -- claiming -------------------------------------------------------------------------------

    def lease(self, keys: Keys, purpose: Purpose = Purpose.READ) -> Lease | None:
        """Lease the slots of the leading cached keys; None if the first is not cached."""
        slots = self.lookup(keys)
        return self.claim(slots, purpose) if len(slots) else None

    def claim(self, slots: SlotArray, purpose: Purpose = Purpose.READ) -> Lease:
        """Lease slots that a lookup has just returned, for reading."""
        if not self.table.chains.all_distinct(slots):
            raise InputError(
                f"{len(slots)} blocks to lease are not distinct; a chain never repeats"
            )
        self.table.claim(slots)
        lease = Lease(purpose, slots, np.arange(len(slots)), self)
        self.leases.add(lease)
        if len(self.eviction.feed.events) >= MANY_EVENTS:
            self.eviction.feed.drain()
        return lease

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None = None,
        chained: bool = True,
        found: SlotArray | None = None,
        tenant: int = 0,
        must_stay: bool = False,
    ) -> Lease | None:
        """Lease slots to write the keys that are neither cached nor being written.

        Evicts as needed. The lease covers the leading missing keys that got a slot (see
        ``Lease.positions``); the others are not stored. None if no key got a slot.

        ``parent`` is the key before the first; ``chained=False`` says that the keys do not depend
        on each other. ``found`` is what :meth:`find` returned for these keys, if nothing has
        changed since. Where slots belong to tenants, the lease's slots become ``tenant``'s.
        ``must_stay`` says that the blocks will be pinned: if the bound on pins has room for them,
        the policy does not refuse them.
        """
        if keys.has_duplicates():
            raise InputError(f"{len(keys)} keys to reserve are not distinct; a chain never repeats")
        table, eviction = self.table, self.eviction
        if found is None:
            found = table.index.find(keys)
        above = NO_SLOT
        if chained and parent is not None:
            require_key("a parent", parent)
            above = table.index.find_few(parent)[0]
        if above != NO_SLOT and np.count_nonzero(found == above):
            raise InputError("a key to reserve is its own parent; a chain never repeats")
        missing = (found == NO_SLOT).nonzero()[0]
        own = NO_SLOTS
        if above != NO_SLOT or len(missing) != len(found):
            own = np.concatenate(([above], found))
            own = own[own != NO_SLOT]
        if must_stay:  # as far as there is room for pins
            must_stay = eviction.pins.count + len(missing) <= eviction.pins.most
        arriving = Arriving(keys, found, above, chained, must_stay)
        quotas = eviction.quotas
        if len(missing) > table.free.count:
            if quotas is not None:
                quotas.expect(tenant, len(missing), self.num_ready)
            eviction.make_room(len(missing), own, arriving)
        if len(own):
            eviction.use(own[table.state.take(own) == CACHED])
        # The code below changes chains; the policy must get past events while they are unchanged.
        eviction.feed.drain()
        positions = missing[: table.free.count]
        slots = table.free.take(len(positions)) if len(positions) else NO_SLOTS
        table.state[slots] = WRITING
        if quotas is not None:
            quotas.own(slots, tenant)
        self._link(arriving, positions, slots)
        if not len(slots):
            return None
        self.num_reserved += len(slots)
        lease = Lease(Purpose.WRITE, slots, positions, self)
        self.leases.add(lease)
        return lease

    def _link(self, arriving: Arriving, positions: SlotArray, slots: SlotArray) -> None:
        """Index the missing keys, at ``positions``, by their new slots, and link the chain.

        ``arriving`` has all keys, and the slots of those that are not missing.
        """
        table = self.table
        keys, found, above, chained, _ = arriving
        if len(slots):
            # No copy of a whole request's keys: memory for so many bytes is faulted in anew.
            new = keys if len(slots) == len(keys.array) else keys.take(positions)
            table.index.insert(new, slots)
        if chained and len(slots) == len(found):
            table.chains.begin(slots, above)
        elif chained:
            placed = found.copy()
            placed[positions] = slots
            table.chains.link(placed, np.concatenate(([above], placed[:-1])))

    def touch(self, keys: Keys) -> None:
        """Note that these keys were used, such as by a hit on another tier: evict them later."""
        found = self.table.index.find(keys)
        found = found[self.table.state.take(found) == CACHED]
        self.eviction.use(found[self.table.chains.last_mentions(found)])
        if len(self.eviction.feed.events) >= MANY_EVENTS:
            self.eviction.feed.drain()

    # -- requests, and what the policy learns ---------------------------------------------------

    def asked(
        self,
        keys: Keys | Callable[[], Keys],
        num_tokens: int,
        slots: SlotArray,
        evidence: Evidence | None = None,
    ) -> None:
        """Note that a request of ``num_tokens`` with these full blocks found the leading ``slots``.

        ``evidence`` is the hint that came with the request.
        """
        self.log.append(EventKind.LOOKUP, slots, keys, tokens=num_tokens)
        if evidence is not None:
            self.log.append(EventKind.HINT, keys=keys, detail=evidence)
        if len(self.eviction.feed.events) >= MANY_EVENTS:
            self.eviction.feed.drain()

    def hint(self, keys: Keys, evidence: Evidence) -> int:
        """Apply a hint to the leading cached blocks of a request with these keys.

        Returns how many blocks were not pinned for lack of room under the bound on pins.
        """
        slots = self.lookup(keys)
        return self.eviction.hint(slots, evidence) if len(slots) else 0

    def catch_up(self) -> None:
        """Deliver all pending events to the eviction policy; call it when there is time."""
        self.eviction.feed.drain()

    def raise_failure(self) -> None:
        """Raise the eviction policy's first exception since the last call, if any.

        Call it where a request begins. Drains the policy feed if its backlog is long.
        """
        feed = self.eviction.feed
        if len(feed.events) >= MANY_EVENTS:
            feed.drain()
        if feed.failure is not None:
            feed.raise_failure()

    # -- letting go -----------------------------------------------------------------------------

    def drop(self, slots: SlotArray) -> int:
        """Forget the blocks at the end of a chain that no other chain needs; return how many.

        Leased slots, also those being written, become free when their lease ends: a slow rank may
        touch them until then.
        """
        self.eviction.feed.drain()
        going = np.ascontiguousarray(self.table.chains.own_end(slots)[::-1])
        self.eviction.unpin(going)
        idle = self.table.is_idle(going)
        self._doom(going[~idle])
        if idle.any():
            self.eviction.drop(going[idle])
        return len(going)

    def disown(self, lease: Lease) -> None:
        """Remove the keys of an open lease, so that they can be stored again in other slots.

        The slots stay claimed until the lease ends, because a slow rank may still touch them.
        """
        if lease.ended is not None:
            raise StateError(f"{lease!r} cannot be disowned: it ended by {lease.ended.value}")
        self._doom(lease.slots)

    def reset(self) -> None:
        """Forget every block at once. Leased slots become free when their leases end."""
        self.eviction.reset()
        freed = self.table.doom_all()
        if self.eviction.quotas is not None:
            self.eviction.quotas.left(freed)

    def end(self, lease: Lease, ending: Ending, failed: Places = ALL_WELL) -> None:
        """End a lease; called by the lease itself.

        Runs no policy code: the policy gets the outcome from the log.
        """
        table, log, slots = self.table, self.log, lease.slots
        ends_writing = ending is Ending.COMMIT or ending is Ending.ABORT
        if lease.ended is not None or ends_writing is not (lease.purpose is Purpose.WRITE):
            raise _cannot_end(lease, ending)
        places = as_slots(failed) if len(failed) else ALL_WELL
        if len(places) and int(places.max()) >= len(slots):
            raise InputError(
                f"{lease!r} cannot {ending.value} with place {int(places.max())} failed: "
                f"its places are 0 to {len(slots) - 1}"
            )
        lease.ended = ending
        self.leases.remove(lease)
        readers = None
        if lease.purpose is not Purpose.WRITE:
            readers = table.readers.take(slots) - 1
            table.readers[slots] = readers
        unused = NO_SLOTS
        if ending is Ending.ABORT or ending is Ending.SPOIL:
            self._doom(slots)
        elif len(places):
            lost = slots[places]
            unused = slots[table.chains.follow(slots, lost)]
            self._doom(np.union1d(lost, unused) if ending is Ending.COMMIT else np.unique(lost))
        if readers is not None and np.count_nonzero(readers):
            slots = slots[table.readers.take(slots) == 0]  # _doom has unpinned lost blocks
        if table.num_doomed:
            doomed = table.state.take(slots) == DOOMED
            freed = np.sort(slots[doomed])
            table.num_doomed -= len(freed)
            table.add_free(freed)
            if self.eviction.quotas is not None:
                self.eviction.quotas.left(freed)
            slots = slots[~doomed]
        # The remaining slots are cached: nothing else claims them, and they are not doomed.
        table.num_idle += len(slots)
        if ending is Ending.COMMIT:
            table.state[slots] = CACHED
            self.generation += 1
            log.append(EventKind.STORE, slots)
        elif lease.purpose is Purpose.COPY:
            log.append(EventKind.RETURN, slots)
        elif len(unused):
            idle = np.isin(slots, unused)
            log.append(EventKind.RETURN, slots[idle][::-1])
            self.eviction.use(slots[~idle])
        elif len(slots):
            self.eviction.use(slots)

    def _doom(self, slots: SlotArray) -> None:
        """Make these claimed slots unmatchable; they become free when their claims end."""
        table = self.table
        if table.num_doomed:
            slots = slots[table.state.take(slots) != DOOMED]
        if len(slots):
            self.eviction.forget(slots)
            table.doom(slots)

    # -- counts ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that can be leased for writing without an eviction."""
        return self.table.free.count

    @property
    def num_leases(self) -> int:
        """Number of leases that have not ended."""
        return len(self.leases)

    @property
    def counts(self) -> PoolCounts:
        """How the slots are used now; cheap, because the counts are kept up to date."""
        table, pins = self.table, self.eviction.pins
        return PoolCounts(
            free=table.free.count,
            cached=table.num_idle,
            leased=self.num_ready - table.free.count - table.num_idle,
            total=self.num_slots,
            evicted=table.num_evicted,
            unready=self.num_slots - self.num_ready,
            pinned=pins.count,
            refused_pins=pins.num_refused,
        )

    def check_integrity(self) -> None:
        """Check the bookkeeping from scratch; raise IntegrityError with the first contradiction."""
        if any(lease.ended is not None for lease in self.leases):
            raise IntegrityError("pool: an ended lease is still open in the pool")
        policy, feed = self.eviction.policy, self.eviction.feed
        check_pool(
            self.table,
            None if feed.has_failed else policy,
            pinned=self.eviction.pins.all_pinned(),
            written=[each.slots for each in self.leases if each.purpose is Purpose.WRITE],
            read=[each.slots for each in self.leases if each.purpose is not Purpose.WRITE],
            counts=self.counts,
            num_ready=self.num_ready,
        )


def _cannot_end(lease: Lease, ending: Ending) -> StateError:
    allowed = "commit or abort" if lease.purpose is Purpose.WRITE else "release or spoil"
    why = f"ends by {allowed}" if lease.ended is None else f"ended by {lease.ended.value}"
    return StateError(f"{lease!r} cannot {ending.value}: it {why}")
