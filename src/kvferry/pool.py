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
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.chains import Chains
from kvferry.conversations import Conversations
from kvferry.duplicates import Duplicates
from kvferry.errors import InputError, IntegrityError, LeaseError
from kvferry.free_slots import FreeSlots
from kvferry.index import Index
from kvferry.keys import Keys, require_key
from kvferry.lease import Ending, Lease, Purpose
from kvferry.policy import (
    Arriving,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    HearsRequests,
    Lru,
    Residents,
)
from kvferry.pool_check import PoolCheck
from kvferry.slot_states import PoolCounts, SlotState
from kvferry.types import NO_SLOT, Key, SlotArray
from kvferry.victims import victims

_NEWS = 256  # commits remembered for those who ask what is new; a step has fewer
# As plain numbers: numpy takes an IntEnum the long way.
_FREE, _WRITING, _CACHED, _DOOMED, _UNREADY = (int(state) for state in SlotState)


class Pool:
    """The slots of one tier. Owns states, index and claims; leaves the bytes to the tier.

    Every call takes a whole request's keys. Not thread-safe: it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicyMaker = Lru,
        *,
        num_ready: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All slots, of which the first ``num_ready`` (default: all) can be used from the start.

        ``policy`` makes what says who goes first; ``clock`` is the time it sees, in seconds.
        """
        if num_slots <= 0:
            raise InputError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self.num_ready = 0
        """Slots from the first on that can be used; the others wait for :meth:`grow`."""
        self.generation = 0
        """Grows whenever blocks become matchable: an unchanged value means no new hits."""
        self.num_reserved = 0
        """Slots given out for writing so far."""
        self.listeners: list[Callable[[Keys], None]] = []
        """Called with the keys of blocks that can no longer be matched, whatever took them away."""
        self._news: deque[npt.NDArray[np.uint64]] = deque(maxlen=_NEWS)
        self._index = Index(num_slots)
        self._duplicates = Duplicates()
        # One more than there are slots: what NO_SLOT names is never cached.
        self._state = np.full(num_slots + 1, _UNREADY, dtype=np.int8)
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._chains = Chains(num_slots)
        self._conversations = Conversations(num_slots)
        residents = Residents(
            num_slots=num_slots,
            now=clock,
            keys_of=self._index.keys_of,
            positions_of=self._conversations.positions_of,
            conversations_of=self._conversations.conversations_of,
            parents_of=self._chains.parents_of,
            num_followers_of=self._chains.num_children,
            is_idle=self._is_idle,
        )
        self._policy = policy(residents)
        self._hears = self._policy if isinstance(self._policy, HearsRequests) else None
        self._free = FreeSlots(num_slots)
        self._num_idle = 0  # cached, and nobody reads them
        self._num_doomed = self._num_evicted = 0
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

    def news_since(self, generation: int) -> npt.NDArray[np.uint64] | None:
        """The first words of the keys committed after a generation; None if too long ago."""
        count = self.generation - generation
        if count > len(self._news):
            return None
        return np.concatenate([np.empty(0, np.uint64), *islice(reversed(self._news), count)])

    def find_cached(self, keys: Keys) -> SlotArray:
        """The slot of each key whose block can be read now, ``NO_SLOT`` for the others."""
        found = self._index.find(keys)
        found[self._state.take(found) != _CACHED] = NO_SLOT
        return found

    def leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys whose blocks can be read now."""
        found = self._index.find_leading(keys)
        readable = self._state.take(found) == _CACHED
        return found if readable.all() else found[: int(readable.argmin())]

    def match(self, keys: Keys) -> int:
        """How many leading keys can be read now."""
        return len(self.leading(keys))

    def coldest(self, count: int) -> Keys:
        """The keys of up to ``count`` blocks that would be evicted first, in that order."""
        slots = self._policy.peek(count)
        return self._index.keys_of(slots[self._readers.take(slots) == 0])

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
        return lease

    def reserve(
        self, keys: Keys, *, parent: Key | None = None, chained: bool = True
    ) -> Lease | None:
        """Claim slots to write the keys that are neither cached nor on their way in.

        Evicts as needed. What does not fit is not stored: the lease covers the leading missing
        keys that got a slot (see ``Lease.positions``), None if there are none. ``parent`` is the
        key before the first; ``chained=False`` says that the keys do not depend on each other.
        """
        if self._duplicates.any_in(keys):
            raise InputError(f"{len(keys)} keys to reserve are not distinct; a chain never repeats")
        found = self._index.find(keys)
        above = NO_SLOT
        if chained and parent is not None:
            require_key("a parent", parent)
            above = self._index.find_one(parent)
        if above != NO_SLOT and np.count_nonzero(found == above):
            raise InputError("a key to reserve is its own parent; a chain never repeats")
        missing = (found == NO_SLOT).nonzero()[0]
        all_new = above == NO_SLOT and len(missing) == len(found)
        own = missing[:0] if all_new else np.concatenate(([above], found))
        own = own[own != NO_SLOT]
        if len(missing) > self._free.count:
            self._make_room(len(missing), own, Arriving(keys, found, above, chained))
        if len(own):
            self._policy.use(own[self._state.take(own) == _CACHED])
        positions = missing[: self._free.count]
        slots = self._give_out(keys, positions)
        if len(slots) and self._policy.wants_chains:
            chains = self._chains if chained else None
            self._conversations.arrive(slots, positions, found, above, chains)
        if chained and len(missing) == len(found):
            self._chains.begin(slots, above)
        elif chained:
            found[positions] = slots
            self._chains.link(found, np.concatenate(([above], found[:-1])))
        if not len(slots):
            return None
        lease = Lease(Purpose.WRITE, slots, positions, self)
        self._leases.add(lease)
        return lease

    def touch(self, keys: Keys) -> None:
        """These keys were used (a hit elsewhere, say): keep them longer."""
        found = self._index.find(keys)
        found = found[self._state.take(found) == _CACHED]
        self._policy.use(found[self._chains.last_mentions(found)])

    def asked(self, keys: Keys, num_tokens: int) -> None:
        """A request of so many tokens, whose whole blocks these are, has come."""
        if self._hears is not None:
            self._hears.asked(keys, num_tokens, self.leading(keys))

    def answered(self, keys: Keys, num_tokens: int) -> None:
        """A request whose whole blocks these are was answered with so many tokens."""
        if self._hears is not None:
            self._hears.answered(keys, num_tokens)

    def hint(self, keys: Keys, evidence: Evidence) -> None:
        """This was said of a request with these keys, whose leading blocks are here."""
        slots = self.leading(keys)
        if len(slots) and isinstance(self._policy, HearsHints):
            self._policy.hint(slots, evidence)

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
        state = self._state[:-1]
        idle = (state == _CACHED) & (self._readers == 0)
        in_use = (state != _FREE) & (state != _UNREADY)
        self._tell_gone(np.flatnonzero(state == _CACHED))
        self._index.clear()
        self._policy.clear()
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
            slots = slots[readers == 0]
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
            self._policy.insert(slots)
        elif lease.purpose is Purpose.COPY:
            self._policy.put_back(slots[~self._policy.holds(slots)])
        elif len(unused):
            idle = np.isin(slots, unused)
            self._policy.put_back(slots[idle & ~self._policy.holds(slots)][::-1])
            self._policy.use(slots[~idle])
        elif len(slots):
            self._policy.use(slots)

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
            counts=self.counts,
            num_doomed=self._num_doomed,
        ).check()

    # -- the parts ------------------------------------------------------------------------------

    def _make_room(self, count: int, own: SlotArray, arriving: Arriving) -> None:
        """Evict until ``count`` slots are free or nothing more can go."""
        # A chain must not push out its own beginning to make room for its end.
        self._readers[own] += 1
        try:
            wanted = count - self._free.count
            going = victims(self._policy, self._chains, self._is_idle, wanted, arriving)
        finally:
            self._readers[own] -= 1
        if not len(going):
            return
        ordered = going.copy()
        ordered.sort(kind="stable")  # quick where there are runs
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise IntegrityError(f"{type(self._policy).__name__} let go of a slot twice")
        self._num_evicted += len(going)
        self._num_idle -= len(going)
        if self.listeners:
            self._tell_gone(going)
        self._index.remove(going)  # the policy has let go of them already
        self._chains.leave(going)
        self._push_free(ordered)

    def _is_idle(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return (self._readers.take(slots) == 0) & (self._state.take(slots) == _CACHED)

    def _give_out(self, keys: Keys, positions: SlotArray) -> SlotArray:
        """Slots for the keys at these positions, which are in the index from now on."""
        count = len(positions)
        slots = self._free.take(count)
        if count:
            self.num_reserved += count
            self._state[slots] = _WRITING
            # Not a copy of the whole request: so many bytes are mapped and faulted in anew.
            new = keys if count == len(keys.array) else keys.take(positions)
            self._index.insert(new, slots)
        return slots

    def _doom(self, slots: SlotArray) -> None:
        """Nothing matches these claimed slots any more; they are free once nobody claims them."""
        if self._num_doomed:
            slots = slots[self._state.take(slots) != _DOOMED]
        if len(slots):
            self._tell_gone(slots[self._state.take(slots) == _CACHED])
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

    def _push_free(self, ascending: SlotArray) -> None:
        self._state[ascending] = _FREE
        self._free.push(ascending)
