"""What somebody asked for a pool's blocks: that they stay, that they go first, that they go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry.holds import Holds
from kvferry.keys import Keys
from kvferry.policy import Evidence, Fair
from kvferry.pool_room import PoolRoom
from kvferry.told_later import News
from kvferry.types import NO_SLOTS, SlotArray

GOES_ON_SECONDS = 300.0
"""So long a conversation that goes on, nobody said when, is kept where no policy knows better."""
GOES_ON_PRIORITY = 50


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
        return self._hears is not None

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray, at: float | None = None) -> None:
        """A request of so many tokens, with these whole blocks, found the leading ``slots``.

        It was ``at`` this time, where that is told later.
        """
        if self._hears is not None:
            self._tell_request(partial(self._hears.asked, keys, num_tokens), slots, at)

    def answered(self, keys: Keys, num_tokens: int, at: float | None = None) -> None:
        """A request whose whole blocks these are was answered with so many tokens."""
        hears = self._hears
        if hears is not None:
            self._tell_request(lambda _: hears.answered(keys, num_tokens), NO_SLOTS, at)

    def _tell_request(
        self, tell: Callable[[SlotArray], None], slots: SlotArray, at: float | None
    ) -> None:
        """Now, or in the order of what else is owed to the policy."""
        news = News(self._clock() if at is None else at, tell, slots)
        if self._tells_later:
            self.told_later.owe(news)
        else:
            self._tell_policy(news)

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
        if self._hears_hints is not None:
            self._catch_up()
            self._hears_hints.hint(slots, evidence)
        elif evidence.over:
            self.go_first(slots, 0, first=first)
        elif evidence.goes_on:
            within = evidence.within if evidence.within is not None else GOES_ON_SECONDS
            self._first.forget(slots)
            return len(slots) - self.hold(slots, within, GOES_ON_PRIORITY)
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
        going = np.ascontiguousarray(self._chains.own_end(slots)[::-1])
        self.let_go(going)
        idle = self._is_idle(going)
        self._doom(going[~idle])
        self._policy.discard(going[idle])
        if idle.any():
            self._leave(going[idle], np.sort(going[idle]))
        return len(going)

    @property
    def holds(self) -> Holds:
        """What is held. To look at."""
        return self._holds
