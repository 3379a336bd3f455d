"""A request: one object from its first question to what it leaves.

It is answered at once: counting and explaining that waits until somebody has time
(``Scheduler.plan``) or touches the request again (``owed.py``). One that ends with blocks not
stored yet leaves them: they are stored late, by itself or by the request that goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach
from kvferry.cache.pins import FOREVER
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.policies.load_or_compute import OverlapDecision
from kvferry.cache.pool import Pool
from kvferry.core.keys import KeyChain, Keys
from kvferry.hints import DEFAULT_PRIORITY, Hints, TokenPriority
from kvferry.scheduler.accounts import Owed, OwedMiss, tell
from kvferry.scheduler.hits import PinnedHit
from kvferry.scheduler.journal import Explanation, Reason
from kvferry.scheduler.lookup import Missing
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.promotion import (
    NEVER,
    OVER,
    Below,
    Held,
    Progress,
    State,
    go_on,
    leave,
    negative,
    order_load,
    over,
    take_back_loads,
)
from kvferry.scheduler.transfers import BlockTable, Flight, Ordered, require_tables
from kvferry.types import (
    HOST,
    NO_SLOT,
    NO_SLOTS,
    Match,
    MatchState,
    RequestId,
    SlotArray,
    TierName,
    TransferId,
)


class Request:
    """One request of an engine. Owns its pinned hit, its loads, and how far it is stored.

    Made by ``Scheduler.open``; ends by :meth:`end` or :meth:`leave`. The chain is the engine's and
    may grow; where its keys become others, what was found for the old ones no longer counts.
    """

    hints: Hints | None = None  # what was said of it, and whose it is: see HintedRequest
    tenant = 0
    __slots__ = (
        "_computed",
        "_hit",
        "_missed",
        "_owed",
        "_parts",
        "_promised",
        "below",
        "chain",
        "id",
        "is_counted",
        "is_explained",
        "loading",
        "progress",
        "state",
    )

    def __init__(self, request_id: RequestId, chain: KeyChain, parts: Parts) -> None:
        self.id = request_id
        self.chain = chain
        self.state = State.UNKNOWN
        self.progress = Progress(parts)
        self.loading: set[TransferId] = set()  # its loads under way
        self.is_counted = self.is_explained = False
        self._parts = parts
        self.below = Below() if parts.lower.tiers else None  # what it asked of the tiers
        self._hit: PinnedHit | None = None
        self._promised: Match | None = None  # what its load brings
        self._missed: tuple[int, int, int, Missing] | None = None  # when, what was asked and lacked
        self._owed: Owed | None = None  # an answer nobody has counted yet
        self._computed = 0  # tokens the engine had when it last asked

    # -- match ----------------------------------------------------------------------------------

    def match(self, *, computed_tokens: int = 0, max_tokens: int | None = None) -> Match:
        """How many tokens can be had without computing them; pins their slots.

        The engine itself has the first ``computed_tokens``. ``max_tokens`` caps the answer (a
        request must compute at least one token itself). Asking again while nothing changed is
        cheap. A pinned hit is let go by ``load``, ``end``, ``preempt``, or its deadline.
        """
        parts, chain = self._parts, self.chain
        if self.state in OVER:
            raise over(self.id, "matched")
        if computed_tokens < 0 or (max_tokens is not None and max_tokens < 0):
            raise negative(self.id, computed_tokens, max_tokens)
        self._computed = computed_tokens
        if self.loading or self.waits_below or self.state is State.LOADING:
            coming = parts.coming.foresee(self, computed_tokens, max_tokens)
            return coming or Match(MatchState.WAIT, computed_tokens, computed_tokens)
        if self._owed is not None:
            self.tell()
        if not computed_tokens and self.progress.is_outdated:
            self.progress.renew()  # it has no block, so none from before a reset
        num_keys = len(chain)
        covered = num_keys * parts.matcher.hash_tokens
        max_tokens = covered if max_tokens is None else min(max_tokens, covered)
        hit = self._hit
        if hit is not None:
            holds = hit.answers(chain.keys(), computed_tokens, max_tokens)
            if holds and parts.hits.still_holds(hit):
                return self._answer(hit)
            self._let_go()
        missed, generation = self._missed, parts.pool.generation
        if (
            missed is not None
            and missed[:3] == (generation, computed_tokens, max_tokens)  # nothing was stored since
            and parts.matcher.names(missed[3], chain)
        ):
            return self._nothing(computed_tokens)
        missing = parts.matcher.next_missing(chain, num_keys, computed_tokens, max_tokens)
        if missing is None:
            return self._look(chain.keys(), computed_tokens, max_tokens)
        self._missed = (generation, computed_tokens, max_tokens, missing)
        if missed is None or missed[1:] != self._missed[1:]:  # explained once a question
            self._owed = OwedMiss(missing, num_keys, computed_tokens, max_tokens)
            parts.owing[self] = None
            self.state = State.ANSWERED
        return self._nothing(computed_tokens)

    def _look(self, keys: Keys, computed_tokens: int, max_tokens: int) -> Match:
        parts = self._parts
        if not self.is_counted:
            parts.accounts.asked(self, keys, max_tokens - computed_tokens)
        look = parts.matcher.look(keys, computed_tokens, max_tokens, parts.spare_tokens)
        if self.below is not None and self.below.fetch(self, look, parts):
            self.state = State.WAITING
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        hit = self._hit = parts.hits.pin(look)
        parts.pinned[self] = None
        if hit.is_declined or hit.must_wait or self.below is not None:
            parts.accounts.found(self, hit)
        else:
            self._owed = hit
            parts.owing[self] = None
        return self._answer(hit)

    def _answer(self, hit: PinnedHit) -> Match:
        look = hit.look
        if hit.is_declined:
            return self._nothing(look.computed_tokens)
        if hit.must_wait:
            self.state = State.WAITING
            return Match(MatchState.WAIT, look.computed_tokens, look.computed_tokens)
        self.state = State.MATCHED
        self.progress.past = self.progress.since = look.host_tokens
        return Match(MatchState.HIT, look.host_tokens, look.computed_tokens)

    def _nothing(self, computed_tokens: int) -> Match:
        if self._owed is None:
            self.state = State.UNKNOWN
        self.progress.past = self.progress.since = computed_tokens
        return Match(MatchState.MISS, computed_tokens, computed_tokens)

    @property
    def waits_below(self) -> bool:
        """Whether it waits for a tier's answer, or for blocks that come up from one."""
        return self.below is not None and bool(self.below.waits)

    def tell(self) -> None:
        """Count and explain what it was answered."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        del self._parts.owing[self]
        tell(self, owed, self._parts)
        if self.state is State.RUNNING:
            go_on(self, self._computed, self._parts)
        elif self.state is State.ANSWERED:
            self.state = State.UNKNOWN

    # -- load -----------------------------------------------------------------------------------

    @property
    def needed_blocks(self) -> tuple[range, ...]:
        """By group, the places in its block table that loading its pinned hit fills."""
        hit = self._hit
        if hit is None or not hit.leases:
            return (range(0),) * len(self._parts.sizes)
        return hit.look.blocks

    def load(
        self, tables: Sequence[BlockTable], overlap: OverlapDecision | None = None
    ) -> tuple[Ordered, ...]:
        """Order the pinned hit into its device blocks; it goes with the next plan.

        ``tables[g]`` is the whole block table of group g, long enough for the hit. Returns what was
        ordered: hold its device blocks until ``settle`` releases them. Empty if the hit was lost
        meanwhile (a reset, its deadline, another chain): the tokens must be computed then. Where a
        window or a chunk leaves a hit unread, the table says ``NO_BLOCK`` until it is computed.
        """
        parts, hit = self._parts, self._hit
        require_tables(tables, len(parts.sizes))
        if hit is None and self.waits_below:
            return parts.coming.begin(self, tables[0])
        if hit is None or not hit.leases:
            return ()
        if not hit.is_of(self.chain, parts.matcher.hash_tokens):
            self.expire(hit.deadline)  # it was found for a chain that has become another
            return ()
        look, pieces = hit.look, hit.pieces(self.id, tables)
        if overlap is not None and self._owed is not None:
            self.tell()  # before it is told how it is loaded
        self._hit = None
        del parts.pinned[self]
        if self.below is not None:
            self.below.renew()
        ordered = [
            order_load(self, parts, piece, look.blocks[piece[0]], look.asked[piece[0]], overlap)
            for piece in pieces
        ]
        if not ordered:  # a hit that reads nothing has no landing to wait for
            self.state = State.LOADED
            return ()
        self._promised = Match(MatchState.HIT, look.host_tokens, look.computed_tokens)
        self.state = State.LOADING
        parts.accounts.loaded(self, look.host_tokens - look.computed_tokens, overlap)
        if parts.rests is not None:
            go_on(self, self._computed, self._parts)
        return tuple(ordered)

    @property
    def has_more_to_load(self) -> bool:
        """Whether more pieces of its load may be ordered, as they come up: ``Settled.ordered``."""
        return self._parts.coming.is_open(self)

    def landed(self, flight: Flight) -> tuple[Match, str] | None:
        """One of its loads has ended, or its time is up: what was promised, and why it failed.

        None while others are on their way. The first failure fails the request; what else it
        waits for lands on its own.
        """
        parts, transfer_id = self._parts, flight.transfer.id
        if transfer_id not in self.loading:
            return None
        if self._owed is not None:  # what is said of it first makes an entry of its own
            self.tell()
        parts.journal.ended(self.id, flight)
        self.loading.discard(transfer_id)
        if parts.coming.note_landed(self, flight):
            return None  # told when all of its pieces have ended
        if self.loading and not flight.reason:
            return None
        self.loading.clear()
        promised, self._promised = self._promised, None
        assert promised is not None
        if flight.reason:
            self.progress.past = promised.computed_tokens
        if self.state is State.LOADING:  # an engine may run it before it has heard of the landing
            self.state = State.UNKNOWN if flight.reason else State.LOADED
        return promised, flight.reason

    def came(self, flight: Flight) -> None:
        """Blocks it waits for have come up from a lower tier, or will not."""
        assert self.below is not None
        self._parts.journal.ended(self.id, flight)
        self.below.waits.discard(flight.transfer.id)
        if not self.below.waits and self.state is State.WAITING:
            self.state = State.UNKNOWN

    # -- run and store --------------------------------------------------------------------------

    def run(self) -> None:
        """The engine computes it from now on, in the blocks it has given it."""
        if self.state in OVER:
            raise over(self.id, "run")
        if self.state is not State.RUNNING:
            self.state = State.RUNNING
            if self._owed is None and self._parts.rests is not None:
                go_on(self, self._computed, self._parts)

    def store(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[Ordered, ...]:
        """Order what is new of its first ``num_tokens`` into the pool.

        Call it once the compute of these tokens is queued on the device, a last time just before
        it ends. Whole blocks only; what is stored already, on its way, or finds no room is left
        out. Returns what was ordered: hold its device blocks until ``settle`` releases them. With
        lazy stores it orders nothing; see ``Scheduler.offer``.
        """
        parts = self._parts
        if self.state in OVER:
            raise over(self.id, "stored")
        require_tables(tables, len(parts.sizes))
        if self._owed is not None:
            self.tell()
        if parts.stores.admission.counts:  # what others asked before counts before it
            parts.tell_owing()
        if self.state in (State.UNKNOWN, State.LOADED):
            self.run()
        progress, chain = self.progress, self.chain
        return progress.store(self, chain, tables, progress.storable(chain, num_tokens))

    def is_worth_storing(self, num_tokens: int) -> bool:
        """Whether enough of so many computed tokens is new for a store to be worth its cost.

        What is not stored while it runs is stored by :meth:`leave`.
        """
        return self.progress.is_worth_storing(num_tokens)

    @property
    def stored_tokens(self) -> int:
        """Leading tokens that :meth:`store` is done with; bounds may leave it more to do later."""
        return self.progress.tokens

    # -- its ends -------------------------------------------------------------------------------

    def preempt(self) -> None:
        """The engine took its device blocks away; it may be matched again later."""
        if self.state not in OVER:
            self._drop()
            self.progress.renew()
            self.state = State.UNKNOWN

    def end(self) -> None:
        """It is over (done or aborted). Its stores go on; its hit and loads do not count.

        What it has left and nobody has stored yet is not stored any more. Safe to call twice.
        """
        if self.state is State.ENDED:
            return
        if self._owed is not None:
            self.tell()
        self._parts.accounts.ended(self)
        if self.state is State.LEFT and self._parts.rests is not None:
            for rest in self._parts.rests.drop(self):
                self._parts.released.extend(rest.held)
        if self._hit is not None or self.loading or self.below is not None:
            self._drop()
        self.end_left()

    def leave(self, num_tokens: int) -> Held:
        """It is over, with this many tokens computed. What of them is not stored is stored late.

        Returns device blocks to hold until ``settle`` releases them. One that did not run has
        computed nothing of its own: it ends.
        """
        if self.state in OVER:
            return ()
        if self._owed is not None:
            self.tell()
        self._parts.accounts.ended(self)
        rests = self._parts.rests
        if self.state is not State.RUNNING or rests is None:
            self.end()
            return ()
        held = leave(self, num_tokens, self._parts, rests)
        if held is None or not rests.stores_late:
            self.end()
            return held or ()
        self._drop()
        self.state = State.LEFT
        return held

    def end_left(self) -> None:
        """Nothing of what it left is to be stored any more."""
        self.state = State.ENDED
        del self._parts.live[self]
        self._parts.accounts.gone(self)

    def forget(self) -> None:
        """Everything stored was forgotten: so was its hit, and what it has computed is of before.

        A load under way keeps what it was promised; of one in pieces, what was ordered.
        """
        self._let_go()
        if self.state in (State.MATCHED, State.WAITING) and not self.waits_below:
            self.state = State.UNKNOWN
        self.progress.is_outdated = True

    def expire(self, now: float) -> bool:
        """Let go of its hit if that was left alone for too long, as if never asked for."""
        if self._hit is None or self._hit.deadline > now:
            return False
        self._let_go()
        if self.state is not State.RUNNING:  # what it found was not worth loading, or not wanted
            self.state = State.UNKNOWN
        return True

    def _drop(self) -> None:
        """Let go of its hit, take back its loads, and wait for nothing."""
        parts = self._parts
        self._let_go()
        if self.loading:
            take_back_loads(self, parts)
            self._promised = None
        parts.coming.drop(self)
        if self.below is not None:
            self.below.drop(self, parts)

    def _let_go(self) -> None:
        self.tell()
        hit = self._hit
        if hit is not None:
            self._hit = None
            del self._parts.pinned[self]
            hit.release()

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.state.value})"


# ------------------------------------------------------------------------------------------------
# Where a request's blocks are: what the host and each tier whose places are ours has of them.


@dataclass(frozen=True, eq=False)
class OnTier:
    """What one pool has of a chain: the numbers of those blocks, rising, and their slots.

    A tier has any of them, mostly the end: ends are spilled first. Those that are not ``cached``
    are on their way in.
    """

    name: TierName
    pool: Pool
    blocks: SlotArray
    slots: SlotArray
    cached: npt.NDArray[np.bool_]

    @classmethod
    def find(cls, name: TierName, pool: Pool, keys: Keys) -> OnTier:
        found = pool.find(keys)
        blocks = (found != NO_SLOT).nonzero()[0]
        slots = found if len(blocks) == len(found) else found[blocks]
        if not pool.all_distinct(slots):
            # Whatever an engine calls a chain: to be held twice would be to be let go twice.
            blocks = slots = NO_SLOTS
        return cls(name, pool, blocks, slots, pool.are_cached(slots))

    def readable(self, stop: int) -> OnTier:
        """Those that can be read, of the chain's first ``stop`` blocks."""
        taken = self.cached & (self.blocks < stop)
        if taken.all():
            return self
        return OnTier(self.name, self.pool, self.blocks[taken], self.slots[taken], taken[taken])

    def at(self, block: int) -> int:
        """How many of them come before this block of the chain."""
        return int(np.searchsorted(self.blocks, block))

    @property
    def num_shared(self) -> int:
        """Up to which block of the chain this pool knows others to go on from it."""
        shared = self.pool.num_shared(self.slots)
        return int(self.blocks[shared - 1]) + 1 if shared else 0


@dataclass(frozen=True, eq=False)
class ChainPlaces:
    """The blocks of one group of a request, tier by tier from the host down."""

    group: reach.Group
    keys: Keys
    places: tuple[OnTier, ...]
    reached: int
    """So many of its blocks, from the first on, some tier has or may have. To hold what comes
    after a block that is nowhere would take room from what somebody can load."""

    @property
    def is_chained(self) -> bool:
        return isinstance(self.group, reach.FullAttention)

    @cached_property
    def num_shared(self) -> int:
        """So many blocks, from the first on, others go on from, as far as any tier knows.

        Where blocks are spilled to a tier, that does not know what follows what there.
        """
        return max(place.num_shared for place in self.places)

    def hold(self, seconds: float) -> tuple[int, list[str]]:
        """Let its blocks stay so long, each on the highest tier that may hold it.

        Returns how many do on some tier, and which were refused where, in words.
        """
        held = np.zeros(len(self.keys), dtype=bool)
        refused = []
        for place in self.places:
            here = place.readable(self.reached)
            if held[here.blocks].all():
                continue  # a tier below need not keep it, too
            count = here.pool.hold(here.slots, seconds)
            held[here.blocks[here.pool.holds.held(here.slots)]] = True
            if count < len(here.slots):
                refused.append(bound_words(here.name, here.pool, len(here.slots) - count))
        return int(np.count_nonzero(held)), refused

    def on_their_way(self) -> list[str]:
        """That blocks which are still copied heard nothing of what was said, if there are any."""
        if all(place.cached.all() for place in self.places):
            return []
        here, coming = np.zeros((2, len(self.keys)), dtype=bool)
        for place in self.places:
            here[place.blocks[place.cached]] = True
            coming[place.blocks[~place.cached]] = True
        count = int(np.count_nonzero(coming & ~here))
        words = (
            f"{count} blocks are still being copied, and this does not hold for them; say it again "
            "once they have come"
        )
        return [words] if count else []


def places_of(keys: Keys, parts: Parts) -> Iterator[ChainPlaces]:
    """Where the blocks of a request are, group by group."""
    pools = [(HOST, parts.pool)]
    pools += [(lv.name, lv.pool) for lv in parts.lower.tiers if lv.pool is not None]
    for g, group in enumerate(parts.matcher.groups):
        chain = parts.matcher.all_keys(g, keys)
        places = tuple(OnTier.find(name, pool, chain) for name, pool in pools)
        is_chained = isinstance(group, reach.FullAttention)
        reached = _reached(chain, places, parts) if is_chained else len(chain)
        yield ChainPlaces(group, chain, places, reached)


def _reached(chain: Keys, places: tuple[OnTier, ...], parts: Parts) -> int:
    """The first block of a chain that is nowhere, as far as is known."""
    there = np.zeros(len(chain) + 1, dtype=bool)  # one more, which nobody has
    for place in places:
        there[place.blocks] = True
    if parts.lower.can_be_asked:
        there[:-1] |= parts.lower.cached(chain) | parts.lower.unknown(chain, chained=True)
    return int(there.argmin())


def bound_words(tier: str, pool: Pool, num_blocks: int) -> str:
    """Why so many blocks are not held."""
    words = (
        f"{num_blocks} blocks are not kept on {tier}: pins and keeps hold {pool.holds.count} of "
        f"at most {pool.holds.most} blocks there (pin_share)"
    )
    return f"{words}, each tenant's at most its part of those" if pool.is_divided else words


# ------------------------------------------------------------------------------------------------
# A request that somebody said something about: it heeds that, and passes it on to the pools.


class CappedProgress(Progress):
    """The same, of which only the first ``most_tokens`` are ever stored."""

    __slots__ = ("_since", "most_tokens")

    def __init__(self, parts: Parts, most_tokens: int) -> None:
        self.most_tokens = most_tokens - most_tokens % parts.least_tokens
        super().__init__(parts)

    def storable(self, chain: KeyChain, num_tokens: int) -> int:
        return min(super().storable(chain, num_tokens), self.most_tokens)

    @property
    def since(self) -> int:
        """Never worth another call, once all that may be is stored."""
        return NEVER if self.tokens >= self.most_tokens else self._since

    @since.setter
    def since(self, num_tokens: int) -> None:
        self._since = num_tokens


class HintedRequest(Request):
    """Heeds bounds on what is loaded and stored; tells the pools, once it is over, the rest.

    What is stored late is told of when it lands (:meth:`stored`).
    """

    __slots__ = ("_ended_at", "_unheeded", "hints", "num_storing", "own_from", "tenant")

    hints: Hints

    def __init__(
        self,
        request_id: RequestId,
        chain: KeyChain,
        parts: Parts,
        hints: Hints,
        unheeded: str = "",
    ) -> None:
        super().__init__(request_id, chain, parts)
        self.hints = hints
        self._unheeded = [unheeded] if unheeded else []
        self.tenant = 0 if parts.tenants is None else parts.tenants.number(hints.tenant)
        self.own_from: int | None = None
        """From which token on nobody had its blocks when it came; None until it was answered."""
        self.num_storing = 0
        """Orders to store of it that have not landed."""
        self._ended_at = 0.0
        if hints.max_store_tokens is not None:
            self.progress = CappedProgress(parts, hints.max_store_tokens)
            if parts.stores.on_device is not None:
                parts.stores.on_device.opened(self)

    def match(self, *, computed_tokens: int = 0, max_tokens: int | None = None) -> Match:
        match = self._match(computed_tokens, max_tokens)
        if self.own_from is None and match.state is not MatchState.WAIT:
            self.own_from = match.num_tokens
        return match

    def _match(self, computed_tokens: int, max_tokens: int | None) -> Match:
        most = self.hints.max_load_tokens
        if most is None or self.state in OVER or computed_tokens < 0:
            return super().match(computed_tokens=computed_tokens, max_tokens=max_tokens)
        if most <= computed_tokens and not self.loading:
            return self._decline(computed_tokens, max_tokens)
        most = most if max_tokens is None else min(most, max_tokens)
        return super().match(computed_tokens=computed_tokens, max_tokens=most)

    def _decline(self, computed_tokens: int, max_tokens: int | None) -> Match:
        """It was said that nothing more is to be loaded for it."""
        if self._owed is not None:
            self.tell()
        self._let_go()
        covered = len(self.chain) * self._parts.matcher.hash_tokens
        asked = covered if max_tokens is None else min(max_tokens, covered)
        if not self.is_counted:
            self._parts.accounts.asked(self, self.chain.keys(), asked - computed_tokens)
            told = Explanation(self.id, asked, computed_tokens, 0, 0, Reason.HINT, computed_tokens)
            self._parts.accounts.told(self, told)
        self.progress.past = self.progress.since = computed_tokens
        return Match(MatchState.MISS, computed_tokens, computed_tokens)

    def end(self) -> None:
        was_over = self.state in OVER
        super().end()
        if not was_over:
            self._told()

    def leave(self, num_tokens: int) -> Held:
        was_over = self.state in OVER
        held = super().leave(num_tokens)
        if not was_over:
            self._told()
        return held

    def _told(self) -> None:
        """It is over: what was said holds from now on, or as soon as its last store has landed."""
        self._ended_at = self._parts.clock()
        if not self.num_storing:
            self._tell_pools(self.hints)

    def stored(self) -> None:
        """More of it was stored: what was said of one that is over holds for that as well."""
        if self.state in OVER:
            self._tell_pools(self.hints.after(self._parts.clock() - self._ended_at))

    def _tell_pools(self, hints: Hints) -> None:
        words = []
        if hints.shapes_what_stays and not self._is_nowhere:
            words = tell_pools(hints, self.chain.keys(), self._parts)
        self._parts.journal.wished(self.id, self.hints, [*self._unheeded, *words])

    @property
    def _is_nowhere(self) -> bool:
        """Whether its first block is not here, so that nothing of it is; False if that is unknown.

        Most turns end where nothing of them is stored yet, and to name all their blocks takes long.
        """
        parts, num_keys = self._parts, len(self.chain)
        if len(parts.sizes) > 1:
            return False
        covered = num_keys * parts.matcher.hash_tokens
        return parts.matcher.next_missing(self.chain, num_keys, 0, covered) is not None


def tell_pools(hints: Hints, keys: Keys, parts: Parts) -> list[str]:
    """Pass on what was said of a request's blocks, tier by tier; what was refused, in words."""
    refused: list[str] = []
    for where in places_of(keys, parts):
        softly = [words for place in where.places for words in _tell_place(hints, where, place)]
        if hints.pin_seconds is None:
            refused += softly
        else:  # which asks for more than they do
            refused += where.hold(hints.pin_seconds)[1]
        refused += where.on_their_way()
    return refused


def _tell_place(hints: Hints, where: ChainPlaces, place: OnTier) -> list[str]:
    """Pass on all but a keep to one tier; which blocks are not held for that, in words."""
    here = place.readable(len(where.keys) if hints.ended else where.reached)
    lacking = 0
    if len(here.slots) and (hints.ended or hints.continues):
        evidence = Evidence(hints.ended, hints.continues, hints.within)
        if where.is_chained:
            first = here.at(where.num_shared) if hints.ended else 0
            lacking = here.pool.hint_slots(here.slots, evidence, first=first)
        else:
            lacking = here.pool.hint(where.keys, evidence)
    if hints.priorities and where.is_chained:
        lacking = max(lacking, _rank(hints.priorities, where, place))
    return [bound_words(place.name, place.pool, lacking)] if lacking else []


def _rank(priorities: Sequence[TokenPriority], where: ChainPlaces, place: OnTier) -> int:
    """Blocks matter so much, range by range; how many are not held that matter more than most.

    Of what was said of a block twice, the last counts.
    """
    pool, block_tokens = place.pool, where.group.block_tokens
    is_high = np.zeros(len(where.keys), dtype=bool)
    for told in priorities:
        start, stop = told.token_start // block_tokens, len(where.keys)
        if told.token_end is not None:
            stop = min(stop, -(-told.token_end // block_tokens))
        if told.priority < DEFAULT_PRIORITY:
            here = place.readable(stop)
            first = here.at(max(start, where.num_shared))
            pool.go_first(here.slots, told.priority, first=first)
            is_high[start:stop] = False
        elif told.priority > DEFAULT_PRIORITY:
            # With what comes before it: nobody could reach it without.
            here = place.readable(min(stop, where.reached))
            seconds = FOREVER if told.duration_ms is None else told.duration_ms / 1000
            if here.at(start) < len(here.slots):
                pool.hold(here.slots, seconds, told.priority)
                is_high[here.blocks] = True
    high = place.slots[is_high[place.blocks]]
    return int(np.count_nonzero(~pool.holds.held(high)))
