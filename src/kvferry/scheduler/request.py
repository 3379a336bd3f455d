"""A request: one object from its first match to its last deferred store.

A request may end before all of its blocks are stored. The others are deferred: stored later, or
together with those of the request that continues its conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import mul

from kvferry.cache.events import EventKind, EventLog
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease
from kvferry.cache.tenants import Tenants
from kvferry.core.keys import KeyChain, Keys
from kvferry.errors import InputError
from kvferry.hints import Hinted, Hints
from kvferry.scheduler.journal import Bookkeeper, Loaded, Reason, RequestAnswer
from kvferry.scheduler.lookup import Hits, Matcher, Missing, PinnedHit
from kvferry.scheduler.placement import evidence_of, tell_pools
from kvferry.scheduler.promotion import Promoter, Promotion
from kvferry.scheduler.stores import Deferred, DeferredStores, Progress, Stores
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import (
    BlockTable,
    InFlight,
    Ordered,
    Transfers,
    held_blocks,
    wrong_tables,
)
from kvferry.types import (
    NO_SLOTS,
    DeviceBlocks,
    Match,
    MatchState,
    RequestId,
    SlotArray,
    TransferId,
)

Held = tuple[DeviceBlocks, ...] | tuple[Ordered, ...]
"""Device blocks that the engine must hold until ``settle`` releases them."""


class State(Enum):
    """Where a request stands.

    ::

                        ┌────────── preempt ───────────┐
                        ▼                              │
        open ──> UNKNOWN ──match──> MATCHED ──load──> LOADING ──settle──> LOADED
                   │  ▲                │                  │                 │
                   │  └── miss, expired┘◀──── failed ─────┘                 │ run, store
                   └───────────────────── run, store ───────────────────> RUNNING
                   match: blocks are being promoted or loaded: WAITING      │
                   (a pipelined load begins: WAITING ──load──> LOADING)     │
                                                          leave: LEFT ◀─────┤
                              deferred blocks stored or taken over: └──▶ ENDED ◀── end
    """

    UNKNOWN = "unknown"  # no hit is pinned, no block is being copied for it
    WAITING = "waiting"  # its blocks are being promoted, or loaded by another request
    MATCHED = "matched"  # a hit is pinned
    LOADING = "loading"  # the hit is being loaded; its last blocks may still be promoted
    LOADED = "loaded"  # the hit is on the device, the engine has not run the request yet
    RUNNING = "running"  # the engine computes the request
    LEFT = "left"  # the request has ended, with deferred stores
    ENDED = "ended"  # the request has ended, with nothing to store


OVER = (State.LEFT, State.ENDED)
_IDLE = (State.UNKNOWN, State.LOADED)


@dataclass(eq=False)
class Requests:
    """The requests of one scheduler. Owns the live ones, those with pinned hits, and ``released``.

    The other attributes are what requests match, load and store with. ``sizes`` are the tokens of a
    block, by group. A hit ends ``spare_tokens`` before the end of the blocks that were found.
    ``released`` are device blocks that no transfer touches any more, to be reported to the engine.
    """

    pool: Pool
    log: EventLog
    matcher: Matcher
    hits: Hits
    stores: Stores
    transfers: Transfers
    lower: LowerTiers
    book: Bookkeeper
    promoter: Promoter
    sizes: tuple[int, ...]
    clock: Callable[[], float]
    spare_tokens: int = 0
    tenants: Tenants | None = None
    deferred: DeferredStores | None = None
    live: dict[Request, None] = field(default_factory=dict)
    pinned: dict[Request, None] = field(default_factory=dict)
    released: list[DeviceBlocks] = field(default_factory=list)
    least_tokens: int = field(init=False)
    lower_pools: tuple[Pool, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.least_tokens = min(self.sizes)
        self.lower_pools = tuple(self.lower.pools.values())


class Request:
    """One request of an engine. Owns its pinned hit, its loads, and how far it is stored.

    Made by ``Scheduler.open``; ends by :meth:`end` or :meth:`leave`. The engine owns the chain,
    which may grow; if its keys change, a hit for the old keys is void. ``hints`` bound what is
    loaded and stored; the other hints are applied to the pools when the request has ended.
    """

    def __init__(
        self,
        request_id: RequestId,
        chain: KeyChain,
        requests: Requests,
        hints: Hints | None = None,
        unheeded: str = "",
    ) -> None:
        self.id = request_id
        self.chain = chain
        self.hints = hints
        self.state = State.UNKNOWN
        self.loading: set[TransferId] = set()  # the request's loads in flight
        self.was_asked = self.is_answered = False
        self.num_storing = 0
        """Store orders of the request that have not completed."""
        self.tenant = 0
        self._requests = requests
        self.promotion = Promotion() if requests.lower.tiers else None
        self._hit: PinnedHit | None = None
        self._promised: Match | None = None  # the hit being loaded
        self._missed: tuple[int, int, Missing] | None = None  # the last miss that was explained
        self._computed = 0  # computed_tokens of the last match
        self.progress = Progress([0] * len(requests.sizes))
        requests.live[self] = None
        if hints is None:
            return
        self._unheeded = [unheeded] if unheeded else []
        self._ended_at = 0.0
        if requests.tenants is not None:
            self.tenant = requests.tenants.number(hints.tenant)
        most = hints.max_store_tokens
        if most is not None:
            self.progress.most_tokens = most - most % requests.least_tokens

    # -- match ----------------------------------------------------------------------------------

    def match(self, *, computed_tokens: int = 0, max_tokens: int | None = None) -> Match:
        """Look up the request: return the tokens that need not be computed, and pin their slots.

        The engine already has the first ``computed_tokens``. ``max_tokens`` caps the answer (a
        request must compute at least one token itself). Matching again is cheap if nothing changed.
        The hit stays pinned until ``load``, ``end``, ``preempt``, or its deadline.
        """
        if self.state in OVER:
            raise self._over("matched")
        if computed_tokens < 0 or (max_tokens is not None and max_tokens < 0):
            raise InputError(
                f"request {self.id!r}: computed_tokens and max_tokens must not be negative, got "
                f"{computed_tokens} and {max_tokens}"
            )
        self._computed, self.was_asked = computed_tokens, True
        hints = self.hints
        if hints is None:
            return self._match(computed_tokens, max_tokens)
        most = hints.max_load_tokens
        if most is not None and most <= computed_tokens and not self.loading:
            return self._decline(computed_tokens, max_tokens)
        if most is not None:
            max_tokens = most if max_tokens is None else min(most, max_tokens)
        return self._match(computed_tokens, max_tokens)

    def _match(self, computed_tokens: int, max_tokens: int | None) -> Match:
        requests, chain = self._requests, self.chain
        promotion = self.promotion
        waits = promotion is not None and promotion.waits
        if waits or self.loading or self.state is State.LOADING:
            if self.state is State.WAITING:
                promised = requests.promoter.foresee(self, computed_tokens, max_tokens)
                if promised is not None:
                    return promised
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        if not computed_tokens and self.progress.is_outdated:
            self.progress.renew()  # the engine has no block of it from before a reset
        num_keys = len(chain)
        covered = num_keys * requests.matcher.hash_tokens
        max_tokens = covered if max_tokens is None else min(max_tokens, covered)
        hit = self._hit
        if hit is not None:
            holds = hit.answers(chain.keys(), computed_tokens, max_tokens)
            if holds and requests.hits.still_holds(hit):
                return self._answer(hit)
            self._let_go()
        missing = requests.matcher.next_missing(chain, num_keys, computed_tokens, max_tokens)
        if missing is None:
            return self._look(chain.keys(), computed_tokens, max_tokens)
        match, missed = self._nothing(computed_tokens), (computed_tokens, max_tokens, missing)
        if self._missed != missed:  # the same miss is explained only once
            self._missed = missed
            self._answered_nothing(computed_tokens, max_tokens, missing)
        return match

    def _look(self, keys: Keys, computed_tokens: int, max_tokens: int) -> Match:
        requests = self._requests
        found = requests.matcher.lookup(keys, computed_tokens, max_tokens, requests.spare_tokens)
        if self.promotion is not None and requests.promoter.fetch(self, found):
            self.state = State.WAITING
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        hit = self._hit = requests.hits.pin(found)
        requests.pinned[self] = None
        self.note_found(hit)
        return self._answer(hit)

    def note_found(self, hit: PinnedHit) -> None:
        """Append a hit to the event log, with the host slots that were found."""
        found, promotion = hit.found, self.promotion
        answer = RequestAnswer(
            self,
            len(found.keys.array),
            found.max_tokens,
            found.computed_tokens,
            found.host_tokens,
            found.all_tokens,
            found.missing,
            None,
            hit.decision,
            hit.is_declined,
            None if promotion is None else promotion.declined,
            0 if promotion is None else promotion.num_asked,
        )
        self._answered(answer, found.slots)

    def _answered_nothing(
        self,
        computed: int,
        max_tokens: int,
        missing: Missing | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Append a miss to the event log, caused by ``missing`` or for ``reason``."""
        counts = (len(self.chain), max_tokens, computed, computed, computed)
        self._answered(RequestAnswer(self, *counts, missing, reason))

    def _answered(self, answer: RequestAnswer, slots: Sequence[SlotArray | None] = ()) -> None:
        """Append what it was answered; ``slots`` are those that its hit reads, by group."""
        requests = self._requests
        if self.is_answered:
            requests.log.append(EventKind.RESULT, request=self.id, detail=answer)
            return
        self.is_answered = True
        matcher, log, sizes = requests.matcher, requests.log, requests.sizes
        tokens = answer.max_tokens
        num_keys = min(answer.num_keys, tokens // matcher.hash_tokens)
        evidence = evidence_of(self.hints) if self.hints is not None else None
        for g in range(len(sizes)):
            keys = partial(matcher.names[g].leading, self.chain, num_keys)
            found = slots[g] if slots else None
            log.append(
                EventKind.LOOKUP,
                NO_SLOTS if found is None else found,
                keys,
                tokens=tokens,
                request=self.id,
                detail=None if g else answer,
            )
            for pool in requests.lower_pools:  # a block there is used when read, not when found
                pool.log.append(EventKind.LOOKUP, NO_SLOTS, keys, tokens=tokens)
            if evidence is not None:  # policies learn of the hint before they evict for the request
                for pool in (requests.pool, *requests.lower_pools):
                    pool.log.append(EventKind.HINT, keys=keys, detail=evidence)

    def _answer(self, hit: PinnedHit) -> Match:
        found = hit.found
        if hit.is_declined:
            return self._nothing(found.computed_tokens)
        if hit.must_wait:
            self.state = State.WAITING
            return Match(MatchState.WAIT, found.computed_tokens, found.computed_tokens)
        self.state = State.MATCHED
        self.progress.past = self.progress.since = found.host_tokens
        return Match(MatchState.HIT, found.host_tokens, found.computed_tokens)

    def _nothing(self, computed_tokens: int) -> Match:
        self.state = State.UNKNOWN
        self.progress.begin_at(computed_tokens)
        return Match(MatchState.MISS, computed_tokens, computed_tokens)

    def _decline(self, computed_tokens: int, max_tokens: int | None) -> Match:
        self._let_go()
        covered = len(self.chain) * self._requests.matcher.hash_tokens
        asked = covered if max_tokens is None else min(max_tokens, covered)
        if not self.is_answered:
            self._answered_nothing(computed_tokens, asked, reason=Reason.HINT)
        state = State.UNKNOWN if self.state is State.MATCHED else self.state
        match, self.state = self._nothing(computed_tokens), state
        return match

    @property
    def waits_below(self) -> bool:
        """Whether the request waits for a lower tier's answer or for promotions."""
        return self.promotion is not None and bool(self.promotion.waits)

    # -- load -----------------------------------------------------------------------------------

    @property
    def needed_blocks(self) -> tuple[range, ...]:
        """By group, the positions in the block table that loading the pinned hit fills."""
        hit = self._hit
        if hit is None or not hit.leases:
            return (range(0),) * len(self._requests.sizes)
        return hit.found.blocks

    @property
    def pinned_leases(self) -> list[Lease]:
        """The leases of the pinned hit."""
        leases = self._hit.leases if self._hit is not None else ()
        return [lease for lease in leases if lease is not None]

    def load(self, tables: Sequence[BlockTable], *, in_parts: bool = False) -> tuple[Ordered, ...]:
        """Order the load of the pinned hit into device blocks; the next plan carries it.

        ``tables[g]`` is the whole block table of group g, long enough for the hit. It may have
        ``NO_BLOCK`` where a window or a chunk does not read the hit. Returns the orders: hold their
        device blocks until ``settle`` releases them. Returns an empty tuple if the hit was lost (by
        a reset, its deadline, or a changed chain): the engine must compute the tokens.
        """
        requests, hit = self._requests, self._hit
        if len(tables) != len(requests.sizes):
            raise wrong_tables(tables, len(requests.sizes))
        if hit is None and self.promotion is not None and self.promotion.foreseen is not None:
            return self._load_promised(tables[0])
        if hit is None or not hit.leases:
            return ()
        if self.chain is not hit.found.keys and not hit.is_of(
            self.chain, requests.matcher.hash_tokens
        ):
            self.expire(hit.deadline)  # the hit was found for keys that have changed since
            return ()
        found = hit.found
        pieces = [
            (g, lease, hit.places(self.id, g, tables[g]))
            for g, lease in enumerate(hit.leases)
            if lease is not None
        ]
        self._hit = None
        del requests.pinned[self]
        if self.promotion is not None:
            self.promotion.renew()
        ordered = []
        for g, lease, blocks in pieces:
            transfer_id = requests.transfers.load(self, g, lease, blocks, in_parts=in_parts)
            requests.hits.began(lease.slots)
            self.loading.add(transfer_id)
            ordered.append(Ordered(g, blocks, transfer_id, found.blocks[g], found.asked[g], self))
        if not ordered:  # a hit that reads no block has no transfer to wait for
            self.state = State.LOADED
            return ()
        self._promised = Match(MatchState.HIT, found.host_tokens, found.computed_tokens)
        self.state = State.LOADING
        self.note_loaded(found.host_tokens - found.computed_tokens, in_parts=in_parts)
        return tuple(ordered)

    def _load_promised(self, table: BlockTable) -> tuple[Ordered, ...]:
        """Begin the pipelined load of the hit that ``match`` offered.

        Returns the orders of the first piece; further ones come in ``Settled.ordered``. Returns an
        empty tuple, and the request is not loading, if the hit was lost meanwhile.
        """
        begun = self._requests.promoter.begin(self, table)
        if begun is None:
            return ()
        hit, ordered = begun
        self.state = State.LOADING
        self.progress.begin_at(hit.found.host_tokens)
        self.note_found(hit)
        self.note_loaded(hit.found.host_tokens - hit.found.computed_tokens)
        return ordered

    def note_loaded(self, num_tokens: int, *, in_parts: bool = False) -> None:
        """Log a load of ``num_tokens``; take over deferred stores of the conversation, if any."""
        requests = self._requests
        detail = Loaded(self.tenant, in_parts)
        requests.log.append(EventKind.LOAD, tokens=num_tokens, request=self.id, detail=detail)
        if requests.deferred is not None:
            self.go_on(self._computed)

    @property
    def has_more_to_load(self) -> bool:
        """Whether ``Settled.ordered`` may still bring pieces of the request's pipelined load."""
        return self.promotion is not None and self._requests.promoter.is_open(self)

    def landed(self, flight: InFlight, done: Completion) -> None:
        """Note that one load completed or is overdue; the last one, or a failure, ends the hit.

        After a failure the other loads complete on their own.
        """
        requests, transfer_id = self._requests, flight.transfer.id
        if transfer_id not in self.loading:
            return
        requests.log.append(EventKind.RESULT, request=self.id, detail=flight)
        self.loading.discard(transfer_id)
        if self.promotion is not None and requests.promoter.note_landed(self, flight):
            return  # the promoter reports the end of all pieces, by end_load
        if not self.loading or flight.reason:
            self.loading.clear()
            promised, self._promised = self._promised, None
            assert promised is not None
            self.end_load(promised, flight.reason, done)

    def end_load(self, promised: Match, reason: str, done: Completion) -> None:
        """End the load of the hit ``promised``; ``reason`` says why it failed, if it did."""
        if reason:
            first = self.progress.past = promised.computed_tokens
            done.failed.append(FailedLoad(self, first, promised.to_load, reason))
        else:
            done.loaded.append(self)
        if self.state is State.LOADING:  # the engine may have run the request before this settle
            self.state = State.UNKNOWN if reason else State.LOADED

    def came(self) -> None:
        """Stop waiting if no question or promotion is pending any more."""
        if not self.waits_below and self.state is State.WAITING:
            self.state = State.UNKNOWN

    # -- run and store --------------------------------------------------------------------------

    def run(self) -> None:
        """Note that the engine computes the request from now on, in its present device blocks."""
        if self.state in OVER:
            raise self._over("run")
        if self.state is not State.RUNNING:
            self.state = State.RUNNING
            if self._computed and self._requests.deferred is not None:
                self.go_on(self._computed)

    def go_on(self, computed_tokens: int) -> None:
        """Take over the deferred stores of the request that this one continues, if there is one.

        A request whose hints do not let it store that much leaves them to the other.
        """
        requests, progress = self._requests, self.progress
        num_keys = computed_tokens // requests.matcher.hash_tokens
        if requests.deferred is None or not num_keys or progress.tokens:
            return
        if computed_tokens <= progress.most_tokens:
            rest = requests.deferred.take_continued(self.chain, num_keys)
            if rest is not None:
                progress.go_on(rest.request.progress)
                rest.request.end_left()

    def store(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[Ordered, ...]:
        """Order stores of the new blocks among the first ``num_tokens``.

        Call it when the compute of these tokens is queued on the device, a last time just before
        the request ends. Skips partial blocks, and blocks that are stored, being stored, or find no
        slot. Returns the orders: hold their device blocks until ``settle`` releases them.
        """
        requests, state = self._requests, self.state
        if state in OVER:
            raise self._over("stored")
        if len(tables) != len(requests.sizes):
            raise wrong_tables(tables, len(requests.sizes))
        if requests.stores.admission.counts:  # admission must count all earlier lookups first
            requests.book.drain()
        if state in _IDLE:
            if requests.deferred is None:
                self.state = State.RUNNING
            else:
                self.run()
        return self._store(tables, num_tokens)

    def storable(self, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` have keys and may be stored."""
        requests = self._requests
        covered = len(self.chain) * requests.matcher.hash_tokens
        return min(num_tokens, covered, self.progress.most_tokens)

    def unstored_from(self, num_tokens: int) -> int | None:
        """Return the first of ``num_tokens`` storable tokens to store; None if none is new."""
        least = self._requests.least_tokens
        if not self._stores_on(num_tokens) or num_tokens < self.progress.tokens + least:
            return None
        return self.progress.tokens

    def _store(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[Ordered, ...]:
        """Order stores of the new blocks among the first ``num_tokens``, as far as storable."""
        requests, progress, keys = self._requests, self.progress, self.chain.keys()
        covered = len(keys.array) * requests.matcher.hash_tokens
        num_tokens = min(num_tokens, covered, progress.most_tokens)
        if not self._stores_on(num_tokens):
            return ()
        ordered = requests.stores.computed(self, progress.stored, keys, tables, num_tokens)
        progress.tokens = progress.since = min(map(mul, progress.stored, requests.sizes))
        return ordered

    def _stores_on(self, num_tokens: int) -> bool:
        """Return whether computed blocks may be stored; count blocks that need no store as done."""
        requests, progress = self._requests, self.progress
        if progress.is_outdated:
            return False
        if progress.past and not progress.tokens:
            past = min(progress.past, num_tokens)
            requests.stores.skip_known(progress.stored, self.chain.keys(), num_tokens, past)
            progress.tokens = progress.since = min(map(mul, progress.stored, requests.sizes))
        return True

    def is_worth_storing(self, num_tokens: int) -> bool:
        """Return whether enough of ``num_tokens`` computed tokens are new to be worth a store call.

        Blocks not stored while the request runs are stored by :meth:`leave`.
        """
        requests, deferred = self._requests, self._requests.deferred
        step = requests.least_tokens if deferred is None else deferred.step
        return num_tokens >= self.progress.next_from + step

    @property
    def stored_tokens(self) -> int:
        """Leading tokens that :meth:`store` is done with; bounds may postpone the others."""
        return self.progress.tokens

    # -- end ------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Note that the engine took the device blocks away; the request may be matched again."""
        if self.state not in OVER:
            self._drop()
            self.progress.renew()
            self.state = State.UNKNOWN

    def end(self) -> None:
        """End the request, done or aborted. Ordered stores continue; its hit and loads are dropped.

        Its deferred blocks are not stored any more. Safe to call twice.
        """
        state, requests = self.state, self._requests
        if state is State.ENDED:
            return
        if state is State.LEFT and requests.deferred is not None:
            for rest in requests.deferred.drop(self):
                requests.released.extend(rest.held)
        if self._hit is not None or self.loading or self.promotion is not None:
            self._drop()
        self.end_left()
        if self.hints is not None and state is not State.LEFT:
            self._tell_hints()

    def leave(self, num_tokens: int) -> Held:
        """End the request with ``num_tokens`` computed; defer the stores of its unstored blocks.

        Returns device blocks to hold until ``settle`` releases them. A request that did not run
        has computed nothing, so it ends without deferred stores.
        """
        if self.state in OVER:
            return ()
        deferred = self._requests.deferred
        if self.state is not State.RUNNING or deferred is None:
            self.end()
            return ()
        held = self._defer(num_tokens, deferred)
        if held is None or not deferred.stores_late:
            self.end()
            return held or ()
        if self._hit is not None or self.loading or self.promotion is not None:
            self._drop()
        self.state = State.LEFT
        if self.hints is not None:
            self._tell_hints()
        return held

    def _defer(self, num_tokens: int, deferred: DeferredStores) -> Held | None:
        """Defer stores of unstored blocks among ``num_tokens``; None if there are none.

        Few tokens wait for the next turn without holding device blocks; more are held. If
        blocks are freed while a request runs, nothing is deferred: the rest is stored at once.
        """
        requests, progress, chain = self._requests, self.progress, self.chain
        storable = self.storable(num_tokens)
        num_new = storable - max(progress.tokens, progress.past)
        is_short = requests.least_tokens <= num_new < deferred.store_step
        waits = deferred.stores_late and is_short and not deferred.engine.evicts
        if waits and not progress.is_outdated:
            key = chain[storable // requests.matcher.hash_tokens - 1]
            twin = deferred.add(self, storable, key)
            if twin is not None:
                twin.request.end_left()
            return ()
        from_token = self.unstored_from(storable)
        if from_token is None:
            return None
        tables = deferred.engine.tables(self, storable, from_token)
        if not deferred.stores_late:
            return self._store(tables, storable)
        held = held_blocks(tables, requests.sizes, from_token)
        key = chain[storable // requests.matcher.hash_tokens - 1]
        deferred.add(self, storable, key, tables, held)
        return held

    def store_left(self, rest: Deferred, deferred: DeferredStores) -> tuple[Ordered, ...]:
        """Order the deferred stores of the request, as far as the bounds allow."""
        tables = rest.tables
        if tables is None:
            from_token = self.unstored_from(rest.num_tokens)
            if from_token is None:
                return ()
            tables = deferred.engine.remains(self, rest.num_tokens, from_token)
        return self._store(tables, rest.num_tokens)

    def end_left(self) -> None:
        """End the request for good: no deferred store remains."""
        requests = self._requests
        self.state = State.ENDED
        del requests.live[self]

    def forget(self) -> None:
        """Drop the hit after a reset, and store no block that was computed before the reset.

        A load in flight keeps its blocks; a pipelined load keeps the pieces already ordered.
        """
        self._let_go()
        if self.state in (State.MATCHED, State.WAITING) and not self.waits_below:
            self.state = State.UNKNOWN
        self.progress.is_outdated = True

    def expire(self, now: float) -> bool:
        """Release the pinned hit if its deadline has passed; return whether it had."""
        if self._hit is None or self._hit.deadline > now:
            return False
        self._let_go()
        if self.state is not State.RUNNING:  # a running request had a declined or unwanted hit
            self.state = State.UNKNOWN
        return True

    def _drop(self) -> None:
        requests = self._requests
        self._let_go()
        if self.loading:
            for transfer in requests.transfers.cancel_loads(self):  # not sent to any rank yet
                requests.hits.ended(transfer.src_slots)
                requests.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
            self.loading.clear()
            self._promised = None
        if self.promotion is not None:
            requests.promoter.drop(self)
            requests.promoter.stop_waiting(self)
            self.promotion.renew()

    def _let_go(self) -> None:
        hit = self._hit
        if hit is not None:
            self._hit = None
            del self._requests.pinned[self]
            hit.release()

    def _over(self, verb: str) -> InputError:
        return InputError(f"request {self.id!r} has ended and cannot be {verb}; open a new one")

    # -- hints ----------------------------------------------------------------------------------

    def _tell_hints(self) -> None:
        """Apply the hints of the ended request now, or when its last store completes."""
        self._ended_at = self._requests.clock()
        if not self.num_storing:
            assert self.hints is not None
            self._tell_pools(self.hints)

    def stored(self) -> None:
        """Note that a store completed; after the last one, apply an ended request's hints."""
        self.num_storing -= 1
        if self.hints is not None and not self.num_storing and self.state in OVER:
            self._tell_pools(self.hints.after(self._requests.clock() - self._ended_at))

    def _tell_pools(self, hints: Hints) -> None:
        requests, words = self._requests, list[str]()
        if hints.shapes_what_stays and not self._is_nowhere:
            keys = self.chain.keys()
            words = tell_pools(hints, keys, requests.pool, requests.lower, requests.matcher)
        assert self.hints is not None
        detail = Hinted(self.hints, [*self._unheeded, *words])
        requests.log.append(EventKind.RESULT, request=self.id, detail=detail)

    @property
    def _is_nowhere(self) -> bool:
        """Whether the request's first block is not cached, so none is; False if that is unknown.

        Most turns end before any of their blocks is stored, and naming all the blocks takes long.
        """
        requests, num_keys = self._requests, len(self.chain)
        if len(requests.sizes) > 1:
            return False
        covered = num_keys * requests.matcher.hash_tokens
        return requests.matcher.next_missing(self.chain, num_keys, 0, covered) is not None

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.state.value})"


@dataclass(frozen=True)
class FailedLoad:
    """A failed load: the request must compute ``num_tokens`` from ``first_token`` on.

    Compute into other device blocks: a slow rank may write to these ones until they are released.
    """

    request: Request
    first_token: int
    num_tokens: int
    reason: str


@dataclass
class Completion:
    """Collects the requests that one ``settle`` loaded or failed, and its loads' bytes and time."""

    loaded: list[Request] = field(default_factory=list)
    failed: list[FailedLoad] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0
