"""The slots of one tier: which are free, which hold what, which are claimed.

A slot's life::

    FREE --reserve--> WRITING --commit--> CACHED --evict--> FREE
                         |                  |  ^
                         +--abort--> FREE   +--+ pin / release (counted in readers)

    reset or forget while claimed: -> DOOMED, not in the index, FREE when the claim ends
    memory still being made ready:    UNREADY --grow--> FREE

Chained keys remember their parent's slot. A slot with children is never evicted, so what is left
of a conversation is always a prefix of it, and a match stops at a hole only if bytes were lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.books import Books, PoolCounts, SlotState
from kvferry.errors import InputError, KeyFormatError, LeaseError
from kvferry.family import Family
from kvferry.index import NO_SLOT, Index
from kvferry.keys import Keys
from kvferry.lease import Ending, Lease, Purpose
from kvferry.policy import EvictionOrder, LruOrder
from kvferry.repeats import Repeats
from kvferry.types import KEY_BYTES, Key, SlotArray

_NEWS = 256  # commits remembered for those who ask what is new; a step has fewer


class Pool:
    """The slots of one tier. Owns states, index and claims; leaves the bytes to the tier.

    Every call takes a whole request's keys. Not thread-safe: it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        num_slots: int,
        order: EvictionOrder | None = None,
        *,
        num_ready: int | None = None,
    ) -> None:
        """All slots, of which the first ``num_ready`` (default: all) can be used from the start."""
        if num_slots <= 0:
            raise InputError(f"a pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self.num_ready = 0
        """Slots from the first on that can be used; the others wait for :meth:`grow`."""
        self.generation = 0
        """Grows whenever blocks become matchable: an unchanged value means no new hits."""
        self._news: deque[npt.NDArray[np.uint64]] = deque(maxlen=_NEWS)
        self._order: EvictionOrder = order if order is not None else LruOrder(num_slots)
        self._index = Index(num_slots)
        self._repeats = Repeats()
        self._state = np.full(num_slots, SlotState.UNREADY, dtype=np.int8)
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._family = Family(num_slots)
        self._free = np.empty(num_slots, dtype=np.int64)
        self._num_free = 0
        self._leases: set[Lease] = set()
        self.num_reserved = 0
        """Slots given out for writing so far."""
        self.listeners: list[Callable[[Keys], None]] = []
        """Called with the keys of blocks that can no longer be matched, whatever took them away."""
        self._evicted = 0
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
        return self._readable(self._index.find(keys))

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
        found[~self._readable(found)] = NO_SLOT
        return found

    def leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys whose blocks can be read now."""
        found = self._index.find_leading(keys)
        readable = self._state.take(found) == SlotState.CACHED
        return found if readable.all() else found[: int(readable.argmin())]

    def match(self, keys: Keys) -> int:
        """How many leading keys can be read now."""
        return len(self.leading(keys))

    def coldest(self, count: int) -> Keys:
        """The keys of up to ``count`` blocks that would be evicted first, in that order."""
        slots = self._order.peek_oldest(count)
        return self._index.keys_of(slots[self._readers.take(slots) == 0])

    def keys_of(self, lease: Lease) -> Keys:
        """The keys of a lease's slots that can be matched."""
        slots = lease.slots
        return self._index.keys_of(slots[self._state.take(slots) == SlotState.CACHED])

    def key_before(self, lease: Lease) -> Key | None:
        """The key that a lease's first slot follows, if it is here."""
        parent = self._family.parent_of(int(lease.slots[0]))
        return self._index.key_of(parent) if parent != NO_SLOT else None

    @property
    def num_free(self) -> int:
        return self._num_free

    # -- claiming -------------------------------------------------------------------------------

    def pin(self, keys: Keys, purpose: Purpose = Purpose.READ) -> Lease | None:
        """Claim the leading cached keys for reading; None when the first is not cached."""
        slots = self.leading(keys)
        return self.claim(slots, purpose) if len(slots) else None

    def claim(self, slots: SlotArray, purpose: Purpose = Purpose.READ) -> Lease:
        """Claim slots that were just found, and can be read, for reading."""
        if not self._family.last_mentions(slots).all():
            raise InputError(f"{len(slots)} blocks to pin are not distinct; a chain never repeats")
        self._readers[slots] += 1
        return self._open(Lease.leading(purpose, slots, self))

    def reserve(
        self, keys: Keys, *, parent: Key | None = None, chained: bool = True
    ) -> Lease | None:
        """Claim slots to write the keys that are neither cached nor on their way in.

        Evicts as needed. What does not fit is not stored: the lease covers the leading missing
        keys that got a slot (see ``Lease.positions``), None if there are none. ``parent`` is the
        key before the first; ``chained=False`` says that the keys do not depend on each other.
        """
        if self._repeats.any_in(keys):
            raise InputError(f"{len(keys)} keys to reserve are not distinct; a chain never repeats")
        found = self._index.find(keys)
        missing = np.flatnonzero(found == NO_SLOT)
        above = self._slot_of(parent) if chained and parent is not None else NO_SLOT
        if above != NO_SLOT and (found == above).any():
            raise InputError("a key to reserve is its own parent; a chain never repeats")
        own = np.concatenate(([above], found))
        own = own[own != NO_SLOT]
        # A chain must not push out its own beginning to make room for its end.
        self._readers[own] += 1
        room = self._make_room(len(missing))
        self._readers[own] -= 1
        self._touch(own)
        positions = missing[:room]
        slots = self._pop_free(len(positions))
        self.num_reserved += len(slots)
        if len(slots):
            self._state[slots] = SlotState.WRITING
            # Not a copy of the whole request: so many bytes are mapped and faulted in anew.
            new = keys if len(slots) == len(keys) else keys.take(positions)
            self._index.insert(new, slots)
            found[positions] = slots
        if chained:
            self._family.link(found, np.concatenate(([above], found[:-1])))
        if not len(slots):
            return None
        return self._open(Lease(Purpose.WRITE, slots, positions, self))

    def touch(self, keys: Keys) -> None:
        """These keys were used (a hit elsewhere, say): keep them longer."""
        found = self._index.find(keys)
        found = found[found != NO_SLOT]
        self._touch(found[self._family.last_mentions(found)])

    def restore(self, keys: Keys, slots: SlotArray) -> None:
        """These free slots hold these unknown blocks, from an earlier life; the oldest first.

        They can be matched from now on, each for itself: who follows whom is learnt when a chain
        is stored again.
        """
        if not (self._state.take(slots) == SlotState.FREE).all() or self.known(keys).any():
            raise InputError(f"{len(slots)} blocks cannot be restored over others; do it first")
        free = self._free[: self._num_free]
        free = free[~np.isin(free, slots)]
        self._free[: len(free)] = free
        self._num_free = len(free)
        self._index.insert(keys, slots)
        self._state[slots] = SlotState.CACHED
        self._order.touch(slots)
        self.generation += 1
        self._news.append(self._index.first_words_of(slots))

    # -- letting go -----------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free up to ``count`` cached slots, the least valuable first; returns how many."""
        before = self._num_free
        self._make_room(before + count)
        return self._num_free - before

    def forget(self, keys: Keys) -> None:
        """These blocks' bytes are not to be trusted: never match them again."""
        found = self._index.find(keys)
        slots = np.unique(found[found != NO_SLOT])
        writing = self._state.take(slots) == SlotState.WRITING
        claimed = writing | (self._readers.take(slots) > 0)
        self._tell_gone(slots[~writing])
        self._unindex(slots)
        self._state[slots[claimed]] = SlotState.DOOMED
        self._push_free(slots[~claimed])

    def disown(self, lease: Lease) -> None:
        """Stop believing in a lease that is still open: its keys may be stored elsewhere now.

        The slots stay claimed until the lease ends, because a slow rank may still touch them.
        """
        if lease.ended is not None:
            raise LeaseError(f"{lease!r} cannot be disowned: it ended by {lease.ended.value}")
        self._disown(lease.slots)

    def reset(self) -> None:
        """Forget everything at once. Claimed slots come back when their leases end."""
        idle = (self._state == SlotState.CACHED) & (self._readers == 0)
        in_use = (self._state != SlotState.FREE) & (self._state != SlotState.UNREADY)
        claimed = in_use & ~idle
        self._tell_gone(np.flatnonzero(self._state == SlotState.CACHED))
        self._index.clear()
        self._order.clear()
        self._family.clear()
        self._state[claimed] = SlotState.DOOMED
        self._push_free(np.flatnonzero(idle))

    # -- looking --------------------------------------------------------------------------------

    @property
    def counts(self) -> PoolCounts:
        cached = int(((self._state == SlotState.CACHED) & (self._readers == 0)).sum())
        leased = self.num_ready - self._num_free - cached
        unready = self.num_slots - self.num_ready
        return PoolCounts(self._num_free, cached, leased, self.num_slots, self._evicted, unready)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check_integrity(self) -> None:
        """Prove the bookkeeping from scratch; raises IntegrityError with what is wrong."""
        Books(
            state=self._state,
            readers=self._readers,
            free=self._free[: self._num_free],
            num_ready=self.num_ready,
            index=self._index,
            family=self._family,
            order=self._order,
            leases=self._leases,
            counts=self.counts,
        ).check()

    # -- the parts ------------------------------------------------------------------------------

    def _open(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        return lease

    def end(self, lease: Lease, ending: Ending, failed: SlotArray) -> None:
        """Take a lease's slots back. Called by the lease itself, exactly once."""
        self._leases.remove(lease)
        slots = lease.slots
        if lease.purpose is not Purpose.WRITE:
            self._readers[slots] -= 1
        unused = slots[:0]
        if ending is Ending.ABORT or ending is Ending.SPOIL:
            self._disown(slots)
        elif len(failed):
            lost = slots[failed]
            unused = slots[self._family.follow(slots, lost)]
            self._disown(np.union1d(lost, unused) if ending is Ending.COMMIT else np.unique(lost))
        if lease.purpose is not Purpose.WRITE:
            slots = slots[self._readers.take(slots) == 0]
        doomed = self._state.take(slots) == SlotState.DOOMED
        if doomed.any():
            self._push_free(slots[doomed])
            slots = slots[~doomed]
        if ending is Ending.COMMIT:
            self._state[slots] = SlotState.CACHED
            self.generation += 1
            self._news.append(self._index.first_words_of(slots))
        # All cached from here on: what was claimed and is not doomed.
        if lease.purpose is Purpose.COPY:
            self._order.put_back(slots[~self._order.holds(slots)])
            return
        if len(unused):
            idle = np.isin(slots, unused)
            self._order.put_back(slots[idle & ~self._order.holds(slots)][::-1])
            slots = slots[~idle]
        self._order.touch(slots[::-1])

    def _disown(self, slots: SlotArray) -> None:
        """Nothing matches these slots any more; they are free once nobody claims them."""
        slots = slots[self._state.take(slots) != SlotState.DOOMED]
        self._tell_gone(slots[self._state.take(slots) == SlotState.CACHED])
        self._unindex(slots)
        self._state[slots] = SlotState.DOOMED

    def _touch(self, slots: SlotArray) -> None:
        # Reversed: the end of a conversation goes before its beginning.
        self._order.touch(slots[self._state.take(slots) == SlotState.CACHED][::-1])

    def _tell_gone(self, slots: SlotArray) -> None:
        if self.listeners and len(slots):
            keys = self._index.keys_of(slots)
            for listener in self.listeners:
                listener(keys)

    def _make_room(self, count: int) -> int:
        """Evict until ``count`` slots are free or nothing more can go; returns how many to use."""
        wanted = count - self._num_free
        if wanted > 0:
            going = self._take_coldest(wanted)
            self._evicted += len(going)
            self._tell_gone(going)
            self._index.remove(going)  # out of the order already
            self._family.unlink(going)
            self._push_free(going)
        return min(count, self._num_free)

    def _take_coldest(self, wanted: int) -> SlotArray:
        """Up to ``wanted`` slots that can go together, out of the order already."""
        looked = np.empty(0, dtype=np.int64)
        can_go = np.empty(0, dtype=bool)
        # A look that finds too few, because their children stay, is followed by one twice as wide:
        # a conversation of any length that was stored block by block is seen whole after a few.
        while int(can_go.sum()) < wanted:
            oldest = self._order.take_oldest(max(wanted, len(looked)))
            if not len(oldest):
                break
            # Slots being read fall out of the order here; their release puts them back.
            idle = oldest[self._readers.take(oldest) == 0]
            looked = np.concatenate((looked, idle))
            can_go = self._family.can_go(looked)
        going = looked[can_go]
        if len(going) == len(looked) == wanted:
            return going
        going, spare = np.split(self._family.children_first(going), [wanted])
        gone = np.flatnonzero(np.isin(looked, going))
        end = int(gone[-1]) + 1 if len(gone) else len(looked)
        stays = ~can_go
        # What we looked at beyond need keeps its place. A parent met before, whose children stay,
        # was used when they were: it goes behind them.
        self._order.put_back(np.concatenate((spare, looked[end:][stays[end:]])))
        self._order.touch(self._family.children_first(looked[:end][stays[:end]]))
        return going

    def _unindex(self, slots: SlotArray) -> None:
        """Nothing matches these slots any more; their state is the caller's to set."""
        if len(slots):
            self._index.remove(slots)
            self._order.discard(slots)
            self._family.unlink(slots)

    def _readable(self, found: SlotArray) -> npt.NDArray[np.bool_]:
        return (found != NO_SLOT) & (self._state.take(found, mode="wrap") == SlotState.CACHED)

    def _pop_free(self, count: int) -> SlotArray:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def _push_free(self, slots: SlotArray) -> None:
        self._state[slots] = SlotState.FREE
        # The lowest is given out first: what is stored together then lies in as few runs as the
        # slots allow, which the index looks up faster. A stable sort is quick where there are runs.
        end = self._num_free + len(slots)
        self._free[self._num_free : end] = np.sort(slots, kind="stable")[::-1]
        self._num_free = end

    def _slot_of(self, key: Key) -> int:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise KeyFormatError(f"a parent must be a key of {KEY_BYTES} bytes, got {what}")
        return self._index.find_one(key)
