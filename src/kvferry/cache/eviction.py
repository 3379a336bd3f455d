"""Eviction: the policy orders the blocks; chains, claims and pins decide which can be evicted.

::

    evict-first queue   blocks that a hint or the engine's author called less wanted
    the policy          all other blocks, in the policy's order
    soft pins           only where nothing else can be evicted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cache.events import EventKind
from kvferry.cache.pins import Pins
from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    Residents,
)
from kvferry.cache.policies.feed import PolicyFeed
from kvferry.cache.policies.quotas import Quotas
from kvferry.cache.slots import CACHED, WRITING, SlotTable
from kvferry.core.keys import Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOTS, SlotArray

CONTINUES_SECONDS = 300.0
"""Seconds to pin a conversation whose hint says that it continues, but not when."""
CONTINUES_PRIORITY = 50

_MOST_VAIN = 64
"""Slots of the evict-first queue examined beyond the number wanted, as some cannot be evicted."""


class RankedSlots:
    """The evict-first queue: slots by priority, first in, first out. Owns this order.

    An interrupt may leave a slot with a priority and in no queue, never the reverse.
    """

    def __init__(self) -> None:
        self.queues: dict[int, dict[int, None]] = {}
        """One queue of slots per priority; empty queues are removed."""
        self._priority: dict[int, int] = {}

    def add(self, slots: SlotArray, priority: int) -> None:
        """Move these slots to the end of this priority's queue."""
        self.discard(slots)
        if len(slots):
            numbers = slots.tolist()
            self._priority.update(dict.fromkeys(numbers, priority))
            self.queues.setdefault(priority, {}).update(dict.fromkeys(numbers))

    def discard(self, slots: SlotArray) -> None:
        if not self.queues:
            return
        for slot in slots.tolist():
            priority = self._priority.get(slot)
            if priority is not None:
                queue = self.queues.get(priority, {})
                queue.pop(slot, None)
                if not queue:
                    self.queues.pop(priority, None)
                del self._priority[slot]

    def first(self, priority: int, count: int) -> SlotArray:
        """Return up to ``count`` slots of one priority, in queue order."""
        return np.array([*islice(self.queues.get(priority, ()), max(0, count))], dtype=np.int64)

    def clear(self) -> None:
        self.queues.clear()
        self._priority.clear()


class Eviction:
    """Makes room in a slot table. Owns the policy and its feed, pins, evict-first queue and quotas.

    The slots of one call belong to one chain, in chain order.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: EvictionPolicyMaker,
        pin_share: float,
        clock: Callable[[], float],
    ) -> None:
        self.feeds_below = False
        """Whether evicted blocks are copied to a lower tier."""
        self.pins = Pins(table.num_slots, int(table.num_slots * pin_share))
        self.before = 0
        """Number of the tenant that owns blocks from before :meth:`divide` and from restarts."""
        self.feed = PolicyFeed(table.log, clock)
        self._table = table
        self._clock = clock
        self._first = RankedSlots()
        self.quotas: Quotas | None = None
        """Which tenant owns each slot; None while slots belong to no tenant."""
        self._make_policy = policy
        self._residents = Residents(
            num_slots=table.num_slots,
            now=self.feed.now,
            keys_of=table.index.keys_of,
            parents_of=table.chains.parents_of,
            num_followers_of=table.chains.children.take,
            is_idle=table.is_idle,
            can_go=table.can_go,
            feeds_below=partial(getattr, self, "feeds_below"),
        )
        self.feed.feed(policy(self._residents))

    @property
    def policy(self) -> EvictionPolicy:
        """The policy, after it has received all events logged so far."""
        self.feed.drain()
        return self.feed.policy

    # -- making room ----------------------------------------------------------------------------

    def make_room(self, count: int, own: SlotArray, arriving: Arriving) -> None:
        """Evict until ``count`` slots are free or no more blocks can be evicted.

        The ``own`` slots stay: a store must not evict the beginning of its own chain.
        """
        table = self._table
        if self.feed.has_failed:
            self._give_back()
        if self.pins.count:
            self._unclaim(self.pins.expire(self._clock()))
        if len(own):
            table.readers[own] += 1
        own_pins = NO_SLOTS
        try:
            if self._first.queues:
                self._evict_first(count - table.free.count)
            self._evict_by_policy(count, arriving)
            if count > table.free.count and self.pins.count:  # end soft pins before failing a store
                gave_way = self.pins.give_way(count - table.free.count)
                is_own = np.isin(gave_way, own)
                own_pins = gave_way[is_own]
                self._unclaim(gave_way[~is_own])
                self._evict_by_policy(count, arriving)
        except Exception:
            self.feed.has_failed = True
            raise
        finally:
            if len(own):
                table.readers[own] -= 1
            if len(own_pins):  # only now: under the claim above they would not count as idle
                self._unclaim(own_pins)

    def _give_back(self) -> None:
        """Give the policy the idle slots that it lost when it raised an exception."""
        self.feed.drain()
        idle = np.flatnonzero(self._table.is_idle(np.arange(self._table.num_slots)))
        self.feed.policy.put_back(idle[~self.feed.policy.holds(idle)])
        self.feed.has_failed = False

    def _evict_first(self, count: int) -> None:
        """Evict up to ``count`` blocks of the evict-first queue, the lowest priority first."""
        first, chains = self._first, self._table.chains
        found = [NO_SLOTS]
        for priority in sorted(first.queues):
            going = None
            while count > 0 and (going is None or len(going)):
                looked = first.first(priority, count + _MOST_VAIN)
                can_go = self._table.is_idle(looked)
                can_go[can_go] = chains.can_go(looked[can_go])
                first.add(looked[~can_go], priority)  # to the end of the queue
                going = chains.children_first(looked[can_go])[:count]
                first.discard(going)
                found.append(going)
                count -= len(going)
        going = np.concatenate(found)
        self.policy.discard(going)
        self._evict(going)

    def _evict_by_policy(self, count: int, arriving: Arriving) -> None:
        wanted = count - self._table.free.count
        if wanted > 0 and self.quotas is not None:
            self._evict_fairly(self.quotas, count, arriving)
        elif wanted > 0:
            self.feed.drain()
            self._evict(self._victims(self.feed.policy, wanted, arriving))

    def _evict_fairly(self, quotas: Quotas, count: int, arriving: Arriving) -> None:
        """Evict from each tenant the number of blocks that its quota makes it give up."""
        self.feed.drain()

        def evict(policy: EvictionPolicy, wanted: int) -> SlotArray:
            # Evict before the next call: evicted blocks must not count as followers that stay.
            # A fresh ``Arriving`` each time: a policy takes the same object for a repeated call.
            going = self._victims(policy, wanted, Arriving(*arriving))
            self._evict(going)
            return going

        # Evicting one tenant's blocks can make another tenant's blocks before them evictable.
        free = self._table.free
        while count > free.count and len(quotas.room(count - free.count, evict)):
            pass

    def _victims(self, policy: EvictionPolicy, wanted: int, arriving: Arriving) -> SlotArray:
        """Return up to ``wanted`` slots that can be evicted together, taken from the policy.

        Only idle slots are returned, whatever the policy names. A policy that keeps naming the same
        slots is asked no more once it has named more slots than the pool has.
        """
        chains, is_idle = self._table.chains, self._table.is_idle
        looked = np.empty(0, dtype=np.int64)
        can_go = np.empty(0, dtype=bool)
        num_going = num_taken = 0
        # If too few can go, because their children stay, the next take is as wide as all before.
        # A few takes then cover a conversation of any length that was stored block by block.
        while num_going < wanted and num_taken <= chains.num_slots:
            taken = policy.take(max(wanted, len(looked)), arriving)
            if not len(taken):
                break
            num_taken += len(taken)
            # Leased slots leave the policy here; the end of their lease puts them back.
            idle = taken[is_idle(taken)]
            looked = np.concatenate((looked, idle)) if len(looked) else idle
            can_go = chains.can_go(looked)
            num_going = int(np.count_nonzero(can_go))
        if num_going == len(looked) == wanted or not len(looked):
            return looked
        going = chains.children_first(looked[can_go])
        going, spare = going[:wanted], going[wanted:]
        gone = np.flatnonzero(np.isin(looked, going) if len(spare) else can_go)
        end = int(gone[-1]) + 1 if len(gone) else len(looked)
        stays = ~can_go
        # Slots taken beyond need keep their place in the order. A parent taken before its children,
        # which stay, is kept behind them.
        policy.put_back(np.concatenate((spare, looked[end:][stays[end:]])))
        policy.keep(chains.children_first(looked[:end][stays[:end]]))
        return going

    def _evict(self, going: SlotArray) -> None:
        """Free these idle slots, taken from the policy; each stands after its followers."""
        if not len(going):
            return
        if not self._table.chains.all_distinct(going):
            raise IntegrityError(f"{type(self.feed.policy).__name__} let go of a slot twice")
        self._table.num_evicted += len(going)
        if self.quotas is not None:
            self.quotas.went(going)
            self.quotas.left(going)
        if self._first.queues:
            self._first.discard(going)
        self._table.evict(going, NO_SLOTS)

    def coldest(self, count: int) -> Keys:
        """Return the keys of up to ``count`` blocks that would be evicted next, in that order."""
        slots = self.policy.peek(count + self.pins.count)
        return self._table.index.keys_of(slots[self._table.is_idle(slots)][:count])

    # -- what happens to slots ------------------------------------------------------------------

    def use(self, slots: SlotArray) -> None:
        """Note that these blocks served a request, or that blocks after them are stored."""
        if self._first.queues:
            self._first.discard(slots)
        self._table.log.append(EventKind.USE, slots)

    def forget(self, slots: SlotArray) -> None:
        """Drop the pins and evict-first marks of these claimed slots."""
        if self.pins.count:
            pinned = slots[self.pins.pinned(slots)]
            self.pins.drop(pinned)
            self._table.readers[pinned] -= 1
            if self.quotas is not None:
                self.quotas.count_pinned(pinned, -1)
        self._first.discard(slots)

    def drop(self, going: SlotArray) -> None:
        """Free these idle slots, each after its followers; counts no eviction."""
        self._first.discard(going)
        if self.quotas is not None:
            self.quotas.left(going)
        self._table.evict(going, going)

    def reset(self) -> None:
        """Forget all pins, the evict-first queue and the policy's slots."""
        pinned = self.pins.all_pinned()
        self.pins.drop(pinned)
        self._unclaim(pinned)
        self.policy.clear()
        self._first.clear()

    def _unclaim(self, slots: SlotArray) -> None:
        """End the claims that pins had on these slots."""
        if len(slots):
            table = self._table
            if self.quotas is not None:
                self.quotas.count_pinned(slots, -1)
            readers = table.readers.take(slots) - 1
            table.readers[slots] = readers
            idle = table.chains.children_first(slots[readers == 0])
            table.num_idle += len(idle)
            table.log.append(EventKind.RETURN, idle)

    # -- pins and hints -------------------------------------------------------------------------

    def pin(self, slots: SlotArray, seconds: float, priority: int | None = None) -> int:
        """Pin a chain's cached slots for ``seconds``; return how many of them are pinned.

        A ``priority`` makes the pins soft. If the bound is too small, the chain's first are pinned.
        """
        now, table = self._clock(), self._table
        self._unclaim(self.pins.expire(now))
        asked = slots
        if self.quotas is not None:
            slots = self._within_part(slots, self.quotas)
        came, gave_way = self.pins.add(slots, now + seconds, priority)
        self._unclaim(gave_way)
        table.claim(came)
        if self.quotas is not None:
            self.quotas.count_pinned(came, 1)
        self._first.discard(came)
        return int(np.count_nonzero(self.pins.pinned(asked)))

    def _within_part(self, slots: SlotArray, quotas: Quotas) -> SlotArray:
        """Return the leading slots of a chain that fit their tenants' parts of the bound on pins.

        Without this, one tenant's pins could leave no room for any other tenant's.
        """
        fresh = np.flatnonzero(~self.pins.pinned(slots))
        owners = quotas.owner_of(slots[fresh])
        end = len(slots)
        for tenant in np.unique(owners).tolist():
            most = quotas.most_pinned(tenant, self.pins.most)
            room = max(0, most - int(quotas.pinned[tenant]))
            its = fresh[owners == tenant]
            if len(its) > room:
                end = min(end, int(its[room]))
        self.pins.num_refused += int(np.count_nonzero(fresh >= end))
        return slots[:end]

    def unpin(self, slots: SlotArray) -> int:
        """Unpin these slots of a chain; return how many were pinned.

        Blocks before another pinned block of their chain stay pinned.
        """
        every = self.pins.all_pinned()
        others = every[~np.isin(every, slots)]
        followed = np.isin(slots, self._table.chains.parents_of(others)).nonzero()[0]
        slots = slots[int(followed[-1]) + 1 :] if len(followed) else slots
        pinned = slots[self.pins.pinned(slots)]
        self.pins.drop(pinned)
        self._unclaim(pinned)
        return len(pinned)

    def hint(self, slots: SlotArray, evidence: Evidence, *, first: int = 0) -> int:
        """Apply a hint to a request's blocks in these slots; return how many could not be pinned.

        A policy with :class:`HearsHints` gets the hint. For others, an ended conversation's blocks
        from ``first`` on join the evict-first queue, and one that continues is pinned.
        """
        if self.feed.hint_hearer is not None:
            keys = self._table.index.keys_of(slots)
            self._table.log.append(EventKind.HINT, keys=keys, detail=evidence)
        elif evidence.ended:
            self.evict_first(slots, 0, first=first)
        elif evidence.continues:
            within = evidence.within if evidence.within is not None else CONTINUES_SECONDS
            self._first.discard(slots)
            return len(slots) - self.pin(slots, within, CONTINUES_PRIORITY)
        return 0

    def evict_first(self, slots: SlotArray, priority: int, *, first: int = 0) -> None:
        """Queue a chain's slots from ``first`` on as evict-first, unless other chains need them.

        They are evicted before blocks of a higher priority. Their soft pins end; firmly pinned
        slots stay out of the queue.
        """
        own = self._table.chains.own_end(slots)
        own = own[max(0, first - (len(slots) - len(own))) :]
        if self.pins.count:
            own = own[~self.pins.firmly(own)]
            soft = own[self.pins.pinned(own)]
            self.pins.drop(soft)
            self._unclaim(soft)
        self._first.add(np.ascontiguousarray(own[::-1]), priority)

    # -- quotas ---------------------------------------------------------------------------------

    def divide(self, shares: Sequence[float | None], before: int) -> None:
        """Make every slot belong to a tenant; ``shares[i]`` is the quota of tenant ``i``.

        Blocks that are cached already belong to the tenant ``before``. Tenants whose share is None
        divide evenly what the shares leave over.
        """
        table = self._table
        order = self.policy.peek(table.num_slots)
        state = table.state[:-1]
        cached = state == CACHED
        cached[order] = False
        quotas = Quotas(self._make_policy, self._residents, shares)
        self.quotas = quotas
        self.before = before
        quotas.own(np.flatnonzero(np.isin(state, (WRITING, CACHED))), before)
        quotas.count_pinned(self.pins.all_pinned(), 1)
        self.feed.feed(quotas)
        quotas.insert(np.flatnonzero(cached))
        quotas.insert(np.ascontiguousarray(order[::-1]))  # the slot inserted last is evicted first

    def tenants_of(self, keys: Keys) -> npt.NDArray[np.int16] | None:
        """Return the owner of each of these cached blocks; None where slots belong to no tenant."""
        quotas = self.quotas
        return quotas.owner_of(self._table.index.find(keys)) if quotas is not None else None
