"""What can be asked of a pool's blocks without claiming any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cache.chains import Chains, Conversations
from kvferry.cache.events import MANY_EVENTS, EventKind, EventLog, PolicyFeed
from kvferry.cache.evict_first import GoesFirst
from kvferry.cache.index import Index
from kvferry.cache.leases import SlotState
from kvferry.cache.pins import Holds
from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    Residents,
)
from kvferry.cache.policies.fair import Fair
from kvferry.cache.slots import FreeRuns, FreeSlots, num_spare
from kvferry.core.keys import Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, NO_SLOTS, Key, SlotArray

_NEWS = 256  # commits remembered for those who ask what is new; a step has fewer
# As plain numbers: numpy takes an IntEnum the long way.
_CACHED, _UNREADY = int(SlotState.CACHED), int(SlotState.UNREADY)


class PoolFind:
    """Which keys have slots, and in which state those are. Owns the index and the states.

    Asking changes nothing; whoever derives from this does.
    """

    def __init__(self, num_slots: int) -> None:
        self.generation = 0
        """Grows whenever blocks become matchable: an unchanged value means no new hits."""
        self._news: deque[npt.NDArray[np.uint64]] = deque(maxlen=_NEWS)
        self._index = Index(num_slots)
        # One more than there are slots: what NO_SLOT names is never cached.
        self._state = np.full(num_slots + 1, _UNREADY, dtype=np.int8)

    def cached(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether its block can be read now."""
        return self._state.take(self._index.find(keys)) == _CACHED

    def known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether its block is cached or on its way in."""
        return self._index.find(keys) != NO_SLOT

    def state_of(self, key: Key) -> SlotState:
        """What is true of one key's slot; FREE if it has none."""
        slot = self._index.find_one(key)
        return SlotState(self._state.item(slot)) if slot != NO_SLOT else SlotState.FREE

    def is_cached(self, key: Key) -> bool:
        """Whether one key's block can be read now."""
        slot = self._index.find_one(key)
        return slot != NO_SLOT and self._state.item(slot) == _CACHED

    def slot_of(self, key: Key) -> int:
        """Where one key's block is or will be; ``NO_SLOT`` if nowhere."""
        return self._index.find_one(key)

    def news_since(self, generation: int) -> npt.NDArray[np.uint64] | None:
        """The first words of the keys committed after a generation; None if too long ago."""
        count = self.generation - generation
        if count > len(self._news):
            return None
        return np.concatenate([np.empty(0, np.uint64), *islice(reversed(self._news), count)])

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key whose block is cached or on its way in, ``NO_SLOT`` for others."""
        return self._index.find(keys)

    def are_cached(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether its block can be read now."""
        return self._state.take(slots) == _CACHED

    def find_cached(self, keys: Keys) -> SlotArray:
        """The slot of each key whose block can be read now, ``NO_SLOT`` for the others."""
        found = self._index.find(keys)
        found[self._state.take(found) != _CACHED] = NO_SLOT
        return found

    def leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys whose blocks can be read now."""
        found = self._index.find_leading(keys)
        if not len(found):
            return found
        readable = self._state.take(found) == _CACHED
        first = int(readable.argmin())  # of those that cannot be read, if there are any
        return found if readable[first] else found[:first]

    def match(self, keys: Keys) -> int:
        """How many leading keys can be read now."""
        return len(self.leading(keys))


# ------------------------------------------------------------------------------------------------
# Which blocks make room: the policy says who should go first, chains and claims who can.


def victims(
    policy: EvictionPolicy,
    chains: Chains,
    is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]],
    wanted: int,
    arriving: Arriving,
) -> SlotArray:
    """Up to ``wanted`` slots that can go together, which the policy has let go of.

    Only what ``is_idle`` goes, whatever the policy names. A policy that names the same slots again
    and again is asked no more once it has named as many as there are.
    """
    looked = np.empty(0, dtype=np.int64)
    can_go = np.empty(0, dtype=bool)
    num_going = num_taken = 0
    # A look that finds too few, because their children stay, is followed by one twice as wide:
    # a conversation of any length that was stored block by block is seen whole after a few.
    while num_going < wanted and num_taken <= chains.num_slots:
        taken = policy.take(max(wanted, len(looked)), arriving)
        if not len(taken):
            break
        num_taken += len(taken)
        # Slots being read leave the policy's hands here; their release puts them back.
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
    # What we looked at beyond need keeps its place. A parent met before, whose children stay, is
    # kept behind them.
    policy.put_back(np.concatenate((spare, looked[end:][stays[end:]])))
    policy.keep(chains.children_first(looked[:end][stays[:end]]))
    return going


# ------------------------------------------------------------------------------------------------
# How a pool makes room: who may go, who goes first, and how slots become free.

_FREE, _WRITING, _POOL_ROOM_CACHED, _DOOMED = (
    int(s) for s in (SlotState.FREE, SlotState.WRITING, SlotState.CACHED, SlotState.DOOMED)
)

_AHEAD_SHARE = 8
"""A tenant whose slots but one in so many are taken has to make room for itself soon."""


class PoolRoom(PoolFind):
    """The free slots and those that can be had. Owns chains, policy, and how many read a slot.

    ::

        goes first    blocks that somebody said matter less
        the policy    all others, in its order
        held softly   only where nothing else can go
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicyMaker,
        pin_share: float,
        clock: Callable[[], float],
        side_by_side: bool,
    ) -> None:
        super().__init__(num_slots)
        self.num_slots = num_slots
        self.log = EventLog(clock)
        """What happens here, for the policy and for all others that want to know."""
        self.feeds_below = False
        """Whether what goes from here is copied to a tier below."""
        self._clock = clock
        self._feed = PolicyFeed(self.log, clock)
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._chains = Chains(num_slots)
        self._conversations = Conversations(num_slots)
        residents = Residents(
            num_slots=num_slots,
            now=self._feed.now,
            keys_of=self._index.keys_of,
            positions_of=self._conversations.positions_of,
            conversations_of=self._conversations.conversations_of,
            parents_of=self._chains.parents_of,
            num_followers_of=self._chains.num_children,
            is_idle=self._is_idle,
            can_go=self._can_go,
            feeds_below=self._does_feed_below,
        )
        self._residents = residents
        self._make_policy = policy
        self._feed.feed(policy(residents))
        self._fair: Fair | None = None
        self._ceilings: list[int] = []
        self.before = 0
        """Whose blocks of an earlier life are, where slots belong to tenants."""
        self._holds = Holds(num_slots, int(num_slots * pin_share))
        self._first = GoesFirst(num_slots)
        self._free: FreeRuns | FreeSlots
        self._num_spare = 0
        if side_by_side:
            self._free = FreeRuns(num_slots)
            self._num_spare = num_spare(num_slots)
        else:
            self._free = FreeSlots(num_slots)
        self._num_idle = 0  # cached, and nobody reads them
        self._num_doomed = self._num_evicted = 0

    @property
    def _policy(self) -> EvictionPolicy:
        """The eviction policy, which has been told of everything by now."""
        self._feed.drain()
        return self._feed.policy

    def catch_up(self) -> None:
        """There is time: tell the eviction policy what happened since."""
        self._feed.drain()

    def raise_failure(self) -> None:
        """Raise the first exception of the eviction policy since the last call, if any."""
        if self._feed.failure is not None:
            self._feed.raise_failure()

    def _does_feed_below(self) -> bool:
        return self.feeds_below

    def coldest(self, count: int) -> Keys:
        """The keys of up to ``count`` blocks that would be evicted first, in that order.

        Those come first that tenants near their ceilings would give up for their own.
        """
        slots = self._policy.peek(count + self._holds.count)
        if self._fair is not None and (near := self._near_ceiling(self._fair)):
            own = np.concatenate([self._fair.peek_of(*each) for each in near])
            slots = np.concatenate((own, slots[~np.isin(slots, own)]))
        return self._index.keys_of(slots[self._readers.take(slots) == 0][:count])

    @property
    def num_near_ceiling(self) -> int:
        """How many blocks tenants near their ceilings should be able to give up any time."""
        return 0 if self._fair is None else sum(n for _, n in self._near_ceiling(self._fair))

    def _near_ceiling(self, fair: Fair) -> list[tuple[int, int]]:
        """The tenants that may soon have to make room for themselves, and how much of it."""
        owned = fair.owned.tolist()
        found = []
        for tenant, ceiling in enumerate(self._ceilings):
            ahead = max(1, ceiling // _AHEAD_SHARE)
            if owned[tenant] and ceiling < self.num_slots and owned[tenant] > ceiling - ahead:
                found.append((tenant, ahead))
        return found

    def all_distinct(self, slots: SlotArray) -> bool:
        """Whether none of these slots is named twice."""
        return self._chains.all_distinct(slots)

    def runs_of(self, keys: Keys) -> tuple[SlotArray, tuple[Key | None, ...]]:
        """Where runs of blocks that follow each other begin among these, which are here.

        And the key of the block before each of the runs, if that is here.
        """
        slots = self._index.find(keys)
        parents = self._chains.parents_of(slots)
        starts = np.flatnonzero(np.append(True, parents[1:] != slots[:-1]))
        firsts = parents[starts].tolist()
        before = [self._index.key_of(slot) if slot != NO_SLOT else None for slot in firsts]
        return starts, tuple(before)

    def line(self, key: Key, most: int) -> Keys:
        """The blocks before this one that it follows, and itself, so many of them at most."""
        slots: list[int] = []
        slot = self._index.find_one(key)
        while slot != NO_SLOT and len(slots) < most:
            slots.append(slot)
            slot = self._chains.parent_of(slot)
        return self._index.keys_of(np.array(slots[::-1], dtype=np.int64))

    def _make_room(self, count: int, own: SlotArray, arriving: Arriving) -> None:
        """Evict until ``count`` slots are free or nothing more can go."""
        self._unclaim(self._holds.expire(self._clock()))
        # A chain must not push out its own beginning to make room for its end.
        if len(own):
            self._readers[own] += 1
        its_own = NO_SLOTS
        try:
            if self._first:
                going = self._first.take(count - self._free.count, self._chains, self._is_idle)
                self._policy.discard(going)
                self._evict(going)
            self._evict_by_policy(count, arriving)
            if count > self._free.count and self._holds.count:  # rather these than no store
                gave_way = self._holds.give_way(count - self._free.count)
                is_own = np.isin(gave_way, own)
                its_own = gave_way[is_own]
                self._unclaim(gave_way[~is_own])
                self._evict_by_policy(count, arriving)
        finally:
            if len(own):
                self._readers[own] -= 1
            # Not before: while we claim them too, they would not count as idle.
            self._unclaim(its_own)

    def _evict_by_policy(self, count: int, arriving: Arriving) -> None:
        wanted = count - self._free.count
        if wanted > 0 and self._fair is not None:
            self._evict_fairly(self._fair, count, arriving)
        elif wanted > 0:
            self._evict(self._victims_of(self._policy, wanted, arriving))

    def _evict_fairly(self, fair: Fair, count: int, arriving: Arriving) -> None:
        """The same where slots are tenants': from each as many as it has to give up."""
        self._feed.drain()

        def evict(policy: EvictionPolicy, wanted: int) -> SlotArray:
            # At once: who is asked again must not meet what has gone as a follower that stays. And
            # with a newcomer of its own, or a policy takes it for one that still lacks a little.
            going = self._victims_of(policy, wanted, Arriving(*arriving))
            self._evict(going)
            return going

        # Once a tenant's blocks have gone, those of another that they followed can go as well.
        while count > self._free.count and len(fair.room(count - self._free.count, evict)):
            pass

    def _victims_of(self, policy: EvictionPolicy, wanted: int, arriving: Arriving) -> SlotArray:
        return victims(policy, self._chains, self._is_idle, wanted, arriving)

    def _evict(self, going: SlotArray) -> None:
        """These idle slots, which the policy has let go of, are free; followers come first."""
        if not len(going):
            return
        ordered = going.copy()
        ordered.sort(kind="stable")  # quick where there are runs
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise IntegrityError(f"{type(self._feed.policy).__name__} let go of a slot twice")
        self._num_evicted += len(going)
        if self._fair is not None:
            self._fair.went(going)
        self._leave(going, ordered, NO_SLOTS)

    def _leave(self, going: SlotArray, ordered: SlotArray, untold: SlotArray) -> None:
        self._num_idle -= len(going)
        self.log.append(EventKind.EVICT, untold, self._index.keys_of(going))
        if self._first:
            self._first.forget(going)
        self._index.remove(going)
        self._chains.leave(going)
        self._push_free(ordered)

    def _unclaim(self, slots: SlotArray) -> None:
        """These are held no more."""
        if len(slots):
            if self._fair is not None:
                self._fair.count_held(slots, -1)
            readers = self._readers.take(slots) - 1
            self._readers[slots] = readers
            idle = self._chains.children_first(slots[readers == 0])
            self._num_idle += len(idle)
            self.log.append(EventKind.RETURN, idle)

    def _use(self, slots: SlotArray) -> None:
        if self._first:
            self._first.forget(slots)
        self.log.append(EventKind.USE, slots)

    def _is_idle(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return (self._readers.take(slots) == 0) & (self._state.take(slots) == _POOL_ROOM_CACHED)

    def _can_go(self, slot: int) -> bool:
        is_idle = self._state.item(slot) == _POOL_ROOM_CACHED and not self._readers.item(slot)
        return is_idle and not self._chains.has_children(slot)

    def _doom(self, slots: SlotArray) -> None:
        """Nothing matches these claimed slots any more; they are free once nobody claims them."""
        if self._num_doomed:
            slots = slots[self._state.take(slots) != _DOOMED]
        if len(slots):
            if self._holds.count:
                held = slots[self._holds.held(slots)]
                self._holds.drop(held)
                self._readers[held] -= 1
                if self._fair is not None:
                    self._fair.count_held(held, -1)
            cached = slots[self._state.take(slots) == _POOL_ROOM_CACHED]
            self.log.append(EventKind.EVICT, slots, self._index.keys_of(cached))
            if self._first:
                self._first.forget(slots)
            self._index.remove(slots)
            self._chains.unlink(slots)
            self._state[slots] = _DOOMED
            self._num_doomed += len(slots)

    def divide(
        self,
        shares: Sequence[float | None],
        ceilings: Sequence[float],
        before: int,
        at_most: Sequence[float] | None = None,
    ) -> None:
        """From now on slots belong to tenants, by number, each with its part of all slots.

        What is here already is of the one that is called ``before``. Who has no share has an even
        part of what others' leave over, ``at_most`` so much of all slots.
        """
        order = self._policy.peek(self.num_slots)
        cached = self._state[:-1] == _POOL_ROOM_CACHED
        cached[order] = False
        self._fair = Fair(self._make_policy, self._residents, shares, at_most)
        self._ceilings = [int(self.num_slots * ceiling) for ceiling in ceilings]
        self.before = before
        self._fair.own(
            np.flatnonzero(np.isin(self._state[:-1], (_WRITING, _POOL_ROOM_CACHED))), before
        )
        self._fair.count_held(self._holds.all_held(), 1)
        self._feed.feed(self._fair)
        self._policy.insert(np.flatnonzero(cached))
        self._policy.insert(np.ascontiguousarray(order[::-1]))  # the last named goes first

    @property
    def is_divided(self) -> bool:
        """Whether slots belong to tenants."""
        return self._fair is not None

    def slots_of_tenant(self, number: int) -> int:
        """How many slots a tenant has."""
        return int(self._fair.owned[number]) if self._fair is not None else 0

    def evicted_of_tenant(self, number: int) -> int:
        """How many blocks of a tenant made room so far."""
        return int(self._fair.evicted[number]) if self._fair is not None else 0

    def pass_on_tenant(self, number: int, heir: int) -> None:
        """A number goes to another name: what was counted for it counts for its heir."""
        if self._fair is not None:
            self._fair.evicted[heir] += self._fair.evicted[number]
            self._fair.evicted[number] = 0

    def tenants_of(self, keys: Keys) -> npt.NDArray[np.int16] | None:
        """Whose each of these blocks is, which are here; None where nothing is anybody's."""
        return self._fair.owner_of(self._index.find(keys)) if self._fair is not None else None

    def _within_ceiling(
        self, missing: SlotArray, own: SlotArray, arriving: Arriving, tenant: int
    ) -> SlotArray:
        """As many of what is missing as a tenant may have, once it has given up of its own."""
        assert self._fair is not None
        self._feed.drain()
        fair, ceiling = self._fair, self._ceilings[tenant]
        over = int(fair.owned[tenant]) + len(missing) - ceiling
        if over <= 0 or ceiling >= self.num_slots:
            return missing

        def is_its_own(slots: SlotArray) -> npt.NDArray[np.bool_]:
            return self._is_idle(slots) & (fair.owner_of(slots) == tenant)

        self._readers[own] += 1
        try:
            if self._first:
                going = self._first.take(over, self._chains, is_its_own)
                self._policy.discard(going)
                self._evict(going)
                over -= len(going)
            if over > 0:
                self._evict(self._victims_of(fair.of(tenant), over, arriving))
        finally:
            self._readers[own] -= 1
        return missing[: max(0, ceiling - int(fair.owned[tenant]))]

    def _push_free(self, ascending: SlotArray) -> None:
        if self._fair is not None:
            self._fair.left(ascending)
        self._state[ascending] = _FREE
        self._free.push(ascending)


# ------------------------------------------------------------------------------------------------
# What somebody asked for a pool's blocks: that they stay, that they go first, that they go.

CONTINUES_SECONDS = 300.0
"""So long a conversation that goes on, nobody said when, is kept where no policy knows better."""
CONTINUES_PRIORITY = 50


class PoolWishes(PoolRoom):
    """Wishes about blocks, within their bound. Slots in a call are one chain's, in its order."""

    def hold(self, slots: SlotArray, seconds: float, priority: int | None = None) -> int:
        """Let cached slots, a chain from its first on, stay so long; how many of them do.

        Softly, by ``priority``, where one is given. As many as the bound allows, the first first.
        """
        now = self._clock()
        self._unclaim(self._holds.expire(now))
        asked = slots
        if self._fair is not None:
            slots = self._within_part(slots, self._fair)
        came, gave_way = self._holds.add(slots, now + seconds, now, priority)
        self._unclaim(gave_way)
        readers = self._readers.take(came)
        self._num_idle -= len(came) - int(np.count_nonzero(readers))
        self._readers[came] = readers + 1
        if self._fair is not None:
            self._fair.count_held(came, 1)
        if self._first:  # what is to stay is not to go first, and must not be met there for ever
            self._first.forget(came)
        return int(np.count_nonzero(self._holds.held(asked)))

    def _within_part(self, slots: SlotArray, fair: Fair) -> SlotArray:
        """Those of a chain, from the first on, for which their tenants' parts of the bound do.

        Or one tenant's wishes would leave no room for any of another's.
        """
        fresh = np.flatnonzero(~self._holds.held(slots))
        owners = fair.owner_of(slots[fresh])
        end = len(slots)
        for tenant in np.unique(owners).tolist():
            most = max(1, int(self._holds.most * fair.part_of(tenant)))
            room = max(0, most - int(fair.held[tenant]))
            its = fresh[owners == tenant]
            if len(its) > room:
                end = min(end, int(its[room]))
        self._holds.num_refused += int(np.count_nonzero(fresh >= end))
        return slots[:end]

    def let_go(self, slots: SlotArray) -> int:
        """Hold these slots of a chain no longer; how many that were. What others, that are held,
        follow stays with those.
        """
        every = self._holds.all_held()
        others = every[~np.isin(every, slots)]
        followed = np.isin(slots, self._chains.parents_of(others)).nonzero()[0]
        slots = slots[int(followed[-1]) + 1 :] if len(followed) else slots
        held = slots[self._holds.held(slots)]
        self._holds.drop(held)
        self._unclaim(held)
        return len(held)

    @property
    def hears_requests(self) -> bool:
        """Whether the policy wants to be told of requests."""
        return self._feed.hearer is not None

    def asked(
        self,
        keys: Keys | Callable[[], Keys],
        num_tokens: int,
        slots: SlotArray,
        at: float | None = None,
    ) -> None:
        """A request of so many tokens, with these whole blocks, found the leading ``slots``.

        ``at`` is when, if not now.
        """
        self.log.append(EventKind.LOOKUP, slots, keys, tokens=num_tokens, at=at)
        if len(self._feed) >= MANY_EVENTS:
            self._feed.drain()

    def answered(
        self, keys: Keys | Callable[[], Keys], num_tokens: int, at: float | None = None
    ) -> None:
        """A request whose whole blocks these are was answered with so many tokens."""
        self.log.append(EventKind.ANSWER, NO_SLOTS, keys, tokens=num_tokens, at=at)

    def hint(self, keys: Keys, evidence: Evidence) -> int:
        """This was said of a request with these keys, whose leading blocks are here.

        Returns how many of those were to be held for that, and are not.
        """
        slots = self.leading(keys)
        return self.hint_slots(slots, evidence) if len(slots) else 0

    def hint_slots(self, slots: SlotArray, evidence: Evidence, *, first: int = 0) -> int:
        """The same of those of its blocks that were just found in these slots.

        A policy that hears it is told; others are helped. Where it is over, others go on from the
        slots before the ``first``, whether this pool knows of it or not.
        """
        if self._feed.hint_hearer is not None:
            self.log.append(EventKind.HINT, slots, detail=evidence)
        elif evidence.ended:
            self.go_first(slots, 0, first=first)
        elif evidence.continues:
            within = evidence.within if evidence.within is not None else CONTINUES_SECONDS
            self._first.forget(slots)
            return len(slots) - self.hold(slots, within, CONTINUES_PRIORITY)
        return 0

    def go_first(self, slots: SlotArray, priority: int, *, first: int = 0) -> None:
        """Of a chain's slots from the ``first``, those that no other chain goes on from go before
        all that matters more. What was wished for them before counts no more, but for pins and
        keeps: those stay, and are not to be met among those that go.
        """
        own = self._chains.own_end(slots)
        own = own[max(0, first - (len(slots) - len(own))) :]
        if self._holds.count:
            own = own[~self._holds.firmly(own)]
            soft = own[self._holds.held(own)]
            self._holds.drop(soft)
            self._unclaim(soft)
        self._first.add(np.ascontiguousarray(own[::-1]), priority)

    def num_shared(self, slots: SlotArray) -> int:
        """How many slots of a chain, from the first on, others go on from."""
        return len(slots) - len(self._chains.own_end(slots))

    def drop(self, slots: SlotArray) -> int:
        """Forget the blocks at the end of a chain that nobody else follows; how many.

        Claimed ones are free when their claim ends, also those that are still being written: a
        slow rank may touch their slots until then.
        """
        self._feed.drain()
        going = np.ascontiguousarray(self._chains.own_end(slots)[::-1])
        self.let_go(going)
        idle = self._is_idle(going)
        self._doom(going[~idle])
        if idle.any():
            self._leave(going[idle], np.sort(going[idle]), going[idle])
        return len(going)

    @property
    def holds(self) -> Holds:
        """What is held. To look at."""
        return self._holds
