"""How a pool makes room: who may go, who goes first, and how slots become free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.chains import Chains
from kvferry.conversations import Conversations
from kvferry.errors import IntegrityError
from kvferry.free_runs import FreeRuns, num_spare
from kvferry.free_slots import FreeSlots
from kvferry.free_together import FreeTogether, num_spare_together
from kvferry.goes_first import GoesFirst
from kvferry.holds import Holds
from kvferry.keys import Keys
from kvferry.policy import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Fair,
    HearsHints,
    HearsRequests,
    Residents,
)
from kvferry.pool_find import PoolFind
from kvferry.slot_states import SlotState
from kvferry.told_later import News, ToldLater
from kvferry.types import NO_SLOT, NO_SLOTS, Key, SlotArray
from kvferry.victims import victims

_FREE, _WRITING, _CACHED, _DOOMED = (
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
        keep_share: float,
        clock: Callable[[], float],
        side_by_side: bool,
        together: bool,
    ) -> None:
        super().__init__(num_slots)
        self.num_slots = num_slots
        self.listeners: list[Callable[[Keys], None]] = []
        """Called with the keys of blocks that can no longer be matched, whatever took them away."""
        self.feeds_below = False
        """Whether what goes from here is copied to a level below."""
        self.before_policy: Callable[[], None] | None = None
        """Called before the policy is asked or told of anything: who owes it news tells it now."""
        self.told_later = ToldLater(self._tell_policy)
        """What the policy is told of when there is time, where somebody asks for that."""
        self._clock = clock
        self._then: float | None = None  # while it is told of what was before
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._chains = Chains(num_slots)
        self._conversations = Conversations(num_slots)
        residents = Residents(
            num_slots=num_slots,
            now=self.now,
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
        self._chosen_policy = policy(residents)
        self._fair: Fair | None = None
        self._ceilings: list[int] = []
        self.before = 0
        """Whose blocks of an earlier life are, where slots belong to tenants."""
        self._hears: HearsRequests | None = None
        self._hears_hints: HearsHints | None = None
        self._listen()
        self._holds = Holds(num_slots, int(num_slots * keep_share))
        self._first = GoesFirst(num_slots)
        self._free: FreeRuns | FreeTogether | FreeSlots
        self._num_spare = self._num_spare_alone = 0
        if side_by_side:
            self._free = FreeRuns(num_slots)
            self._num_spare = num_spare(num_slots)
        elif together:
            self._free = FreeTogether()
            self._num_spare_alone = num_spare_together(num_slots)
        else:
            self._free = FreeSlots(num_slots)
        self._num_idle = 0  # cached, and nobody reads them
        self._num_doomed = self._num_evicted = 0

    @property
    def _policy(self) -> EvictionPolicy:
        """Who says what goes first, and has heard of every request by now."""
        self._catch_up()
        return self._chosen_policy

    def _catch_up(self) -> None:
        """To be called before slots change: a policy hears of a request as things were then."""
        if self.told_later.is_owing:
            self.told_later.catch_up()
        self._hear()

    def _hear(self) -> None:
        """The same where claims end, of which no policy was ever told."""
        if self.before_policy is not None:
            self.before_policy()

    def _tell_policy(self, news: News) -> None:
        """What happened to slots a while ago, as of then."""
        self._then = news.at
        try:
            news.tell(news.slots)
        finally:
            self._then = None

    def now(self) -> float:
        """The time, in seconds from some moment on."""
        return self._clock() if self._then is None else self._then

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

    def _spare(self) -> int:
        """So many slots are made free beyond need; few, or none where what goes is copied below."""
        return self._num_spare if self.feeds_below else self._num_spare + self._num_spare_alone

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
        self._catch_up()

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
            raise IntegrityError(f"{type(self._chosen_policy).__name__} let go of a slot twice")
        self._num_evicted += len(going)
        if self._fair is not None:
            self._fair.went(going)
        self._leave(going, ordered)

    def _leave(self, going: SlotArray, ordered: SlotArray) -> None:
        self._num_idle -= len(going)
        if self.listeners:
            self._tell_gone(going)
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
            self._policy.put_back(idle[~self._policy.holds(idle)])

    def _use(self, slots: SlotArray) -> None:
        if self._first:
            self._first.forget(slots)
        if self._tells_later:
            self.told_later.owe(News(self._clock(), self._chosen_policy.use, slots))
        else:
            self._policy.use(slots)

    @property
    def _tells_later(self) -> bool:
        """Whether the policy may hear of what happens to slots once there is time.

        Not where slots are tenants', who are counted as they come and go.
        """
        return self.told_later.is_on and self._fair is None

    def _is_idle(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return (self._readers.take(slots) == 0) & (self._state.take(slots) == _CACHED)

    def _can_go(self, slot: int) -> bool:
        is_idle = self._state.item(slot) == _CACHED and not self._readers.item(slot)
        return is_idle and not self._chains.has_children(slot)

    def _doom(self, slots: SlotArray) -> None:
        """Nothing matches these claimed slots any more; they are free once nobody claims them."""
        self._catch_up()
        if self._num_doomed:
            slots = slots[self._state.take(slots) != _DOOMED]
        if len(slots):
            if self._holds.count:
                held = slots[self._holds.held(slots)]
                self._holds.drop(held)
                self._readers[held] -= 1
                if self._fair is not None:
                    self._fair.count_held(held, -1)
            self._tell_gone(slots[self._state.take(slots) == _CACHED])
            if self._first:
                self._first.forget(slots)
            self._index.remove(slots)
            self._policy.discard(slots)
            self._chains.unlink(slots)
            self._state[slots] = _DOOMED
            self._num_doomed += len(slots)

    def _tell_gone(self, slots: SlotArray) -> None:
        if self.listeners and len(slots):
            keys = self._index.keys_of(slots)
            for listener in self.listeners:
                listener(keys)

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
        cached = self._state[:-1] == _CACHED
        cached[order] = False
        self._fair = Fair(self._make_policy, self._residents, shares, at_most)
        self._ceilings = [int(self.num_slots * ceiling) for ceiling in ceilings]
        self.before = before
        self._fair.own(np.flatnonzero(np.isin(self._state[:-1], (_WRITING, _CACHED))), before)
        self._fair.count_held(self._holds.all_held(), 1)
        self._chosen_policy = self._fair
        self._listen()
        self._policy.insert(np.flatnonzero(cached))
        self._policy.insert(np.ascontiguousarray(order[::-1]))  # the last named goes first

    def _listen(self) -> None:
        policy: object = self._chosen_policy
        self._hears = policy if isinstance(policy, HearsRequests) else None
        self._hears_hints = policy if isinstance(policy, HearsHints) else None

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
        self._catch_up()
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
