"""A request: one object from its first question to what it leaves.

::

                    ┌────────── preempt ───────────┐
                    ▼                              │
    open ──> UNKNOWN ──match──> MATCHED ──load──> LOADING ──settled──> LOADED
               │  ▲                │                  │                  │
               │  └── miss, expired┘◀──── failed ─────┘                  │ run, store
               │ match, answered at once                                 ▼
               └──────> ANSWERED ────────────── run, store ──────────> RUNNING
               match: what it wants is on its way: WAITING               │
                                                       leave: LEFT ◀─────┤
                                       stored late, or gone on with: └──▶ ENDED ◀── end

A request that finds nothing is answered with one look for one key; counting and explaining it waits
until somebody has time (``Scheduler.plan``) or touches the request again. One that ends with blocks
not stored yet leaves them: they are stored late, by itself or by the request that goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvferry import reach
from kvferry.answers import DeviceBlocks, Match, MatchState
from kvferry.errors import InputError
from kvferry.keys import KeyChain, Keys
from kvferry.scheduler.flight import Flight
from kvferry.scheduler.hit import Hit
from kvferry.scheduler.matching import Look, Missing
from kvferry.scheduler.orders import BlockTable, Ordered, checked_blocks, held_blocks
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.rests import Rest, Rests
from kvferry.scheduler.why import Explanation
from kvferry.types import RequestId, TransferId, as_slots


class State(Enum):
    """Where a request stands; see the drawing at the top of this file."""

    UNKNOWN = "unknown"  # nothing is pinned for it, nothing is on its way
    ANSWERED = "answered"  # it was told that nothing is here; not counted yet
    WAITING = "waiting"  # blocks it wants are coming up, or another request loads them
    MATCHED = "matched"  # a hit is pinned for it
    LOADING = "loading"  # its hit is on its way to the device
    LOADED = "loaded"  # its hit is on the device, nothing is computed on it yet
    RUNNING = "running"  # the engine computes it, in the blocks it has now
    LEFT = "left"  # it has ended; some of it is to be stored late
    ENDED = "ended"


_OVER = (State.LEFT, State.ENDED)


class Request:
    """One request of an engine. Owns its pinned hit, its loads, how far it is stored, its rest.

    Made by ``Scheduler.open``; ends by :meth:`end` or :meth:`leave`. The chain is the engine's and
    may grow; where its keys become others, what was found for the old ones no longer counts.
    """

    __slots__ = (
        "_computed",
        "_has_asked",
        "_hit",
        "_is_counted",
        "_is_explained",
        "_is_promoted",
        "_missed",
        "_num_asked",
        "_owed",
        "_parts",
        "_past",
        "_promised",
        "_waits",
        "chain",
        "id",
        "is_outdated",
        "loading",
        "state",
        "store_due",
        "stored",
    )

    def __init__(self, request_id: RequestId, chain: KeyChain, parts: Parts) -> None:
        self.id = request_id
        self.chain = chain
        self.state = State.UNKNOWN
        self.stored = [0] * len(parts.matcher.groups)
        """Blocks of each group that need no more storing."""
        self.store_due = 0
        """With fewer tokens computed, storing is not worth a call yet."""
        self.is_outdated = False
        """Whether its device blocks are from before a reset: nothing of them is stored."""
        self.loading: set[TransferId] = set()
        """The transfers it waits for to be loaded."""
        self._parts = parts
        self._hit: Hit | None = None
        self._promised: Match | None = None  # what its load brings
        self._waits: set[TransferId] = set()  # what comes up from a lower level
        self._has_asked = False  # once per look: what was not known by then is not there
        self._num_asked = 0  # blocks that levels were asked for
        self._is_promoted = False  # once per look: what did not come up by then is computed
        self._missed: tuple[int, int, int, Missing] | None = None  # when, what was asked and lacked
        self._owed: tuple[Missing, int, int, int] | None = None  # a miss nobody has counted yet
        self._is_counted = False
        self._is_explained = False
        self._computed = 0  # tokens the engine had when it last asked
        self._past = 0  # tokens it had, on the device or with us, when it came

    # -- match ----------------------------------------------------------------------------------

    def match(self, *, computed_tokens: int = 0, max_tokens: int | None = None) -> Match:
        """How many tokens can be had without computing them; pins their slots.

        The engine itself has the first ``computed_tokens``. ``max_tokens`` caps the answer (a
        request must compute at least one token itself). Asking again while nothing changed is
        cheap. A pinned hit is let go by ``load``, ``end``, ``preempt``, or its deadline.
        """
        parts, chain = self._parts, self.chain
        if self.state in _OVER:
            raise self._is_over("matched")
        if computed_tokens < 0 or (max_tokens is not None and max_tokens < 0):
            raise InputError(
                f"request {self.id!r}: computed_tokens and max_tokens must not be negative, got "
                f"{computed_tokens} and {max_tokens}"
            )
        if self.loading or self._waits:
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        if self._owed is not None:
            self.tell()
        if not computed_tokens and self.is_outdated:  # it has no block, so none from before a reset
            self._renew()
        covered = len(chain) * parts.matcher.hash_tokens
        max_tokens = covered if max_tokens is None else min(max_tokens, covered)
        self._computed = computed_tokens
        hit = self._hit
        if hit is not None:
            if hit.answers(chain.keys(), computed_tokens, max_tokens) and parts.hits.still_holds(
                hit
            ):
                return self._answer(hit)
            self._let_go()
        missed, generation = self._missed, parts.pool.generation
        if (
            missed is not None
            and missed[:3] == (generation, computed_tokens, max_tokens)  # nothing was stored since
            and parts.matcher.names(missed[3], chain)
        ):
            return self._nothing(computed_tokens)
        missing = parts.matcher.next_missing(chain, computed_tokens, max_tokens)
        if missing is not None:
            self._missed = (generation, computed_tokens, max_tokens, missing)
            if missed is None or missed[1:] != self._missed[1:]:  # explained once a question
                self._owed = (missing, len(chain), computed_tokens, max_tokens)
                parts.owing[self] = None
                self.state = State.ANSWERED
            return self._nothing(computed_tokens)
        return self._look(chain.keys(), computed_tokens, max_tokens)

    def _look(self, keys: Keys, computed_tokens: int, max_tokens: int) -> Match:
        parts = self._parts
        self._count(keys, max_tokens - computed_tokens)
        look = parts.matcher.look(keys, computed_tokens, max_tokens, parts.spare_tokens)
        if self._ask(look) or self._promote(look):
            self.state = State.WAITING
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        hit = self._hit = parts.hits.pin(look)
        parts.pinned[self] = None
        self._explain(parts.explainer.explain(self.id, look, hit.decision, self._num_asked))
        return self._answer(hit)

    def _answer(self, hit: Hit) -> Match:
        look = hit.look
        if hit.is_declined:
            return self._nothing(look.computed_tokens)
        if hit.joined is not None or not self._parts.hits.may_load(hit):
            self.state = State.WAITING
            return Match(MatchState.WAIT, look.computed_tokens, look.computed_tokens)
        self.state = State.MATCHED
        self._note_past(look.host_tokens)
        return Match(MatchState.HIT, look.host_tokens, look.computed_tokens)

    def _nothing(self, computed_tokens: int) -> Match:
        if self._owed is None:
            self.state = State.UNKNOWN
        self._note_past(computed_tokens)
        return Match(MatchState.MISS, computed_tokens, computed_tokens)

    def _note_past(self, num_tokens: int) -> None:
        self._past = num_tokens
        rests = self._parts.rests
        if rests is not None:
            self.store_due = num_tokens + rests.step + self._parts.spare_tokens

    def _ask(self, look: Look) -> bool:
        """Ask what lies below where that is not known; True if the request should wait for it."""
        parts = self._parts
        if self._has_asked or not parts.lower or not parts.lower.can_be_asked:
            return False
        keys = parts.matcher.to_ask(look)
        questions = parts.lower.ask(keys) if len(keys) else set()
        parts.waits.add(self, questions)
        self._waits |= questions
        self._has_asked = bool(questions)
        self._num_asked = len(keys) if questions else 0
        return self._has_asked

    def _promote(self, look: Look) -> bool:
        """Start bringing up what lies below the host; True if the request should wait for it."""
        if look.all_tokens <= look.host_tokens or self._is_promoted:
            return False
        parts = self._parts
        look = parts.matcher.within(look, parts.lower.room)
        for g, keys, parent in parts.matcher.to_promote(look):
            chained = isinstance(parts.matcher.groups[g], reach.FullAttention)
            self._waits |= parts.lower.promote(keys, parent=parent, chained=chained)
        parts.waits.add(self, self._waits)
        self._is_promoted = bool(self._waits)
        if self._is_promoted:
            parts.counts.promoted_tokens += look.all_tokens - look.host_tokens
        return self._is_promoted

    @property
    def waits_below(self) -> bool:
        """Whether it waits for a level's answer, or for blocks that come up from one."""
        return bool(self._waits)

    # -- counting, at once or later ---------------------------------------------------------------

    def tell(self) -> None:
        """Count and explain a miss that was answered at once; the reason is that of now."""
        if self._owed is None:
            return
        (missing, num_keys, computed_tokens, max_tokens), self._owed = self._owed, None
        del self._parts.owing[self]
        if self._parts.stores.admission.counts:
            self._count(self.chain.keys()[:num_keys], max_tokens - computed_tokens)
        else:
            self._count(None, max_tokens - computed_tokens)
        self._explain(
            self._parts.explainer.explain_miss(
                self.id, missing, computed_tokens=computed_tokens, max_tokens=max_tokens
            )
        )
        if self.state is State.RUNNING:
            self._go_on()
        else:
            self.state = State.UNKNOWN

    def _count(self, keys: Keys | None, num_tokens: int) -> None:
        """Once for each request, however often it asks."""
        if self._is_counted:
            return
        self._is_counted = True
        parts = self._parts
        parts.counts.queries += 1
        parts.counts.asked_tokens += max(0, num_tokens)
        if keys is not None and parts.stores.admission.counts:
            for g in range(len(parts.matcher.groups)):
                parts.stores.admission.see(parts.matcher.all_keys(g, keys))

    def _explain(self, explanation: Explanation) -> None:
        counts = self._parts.counts
        if explanation.decision is not None:
            counts.verdicts[explanation.decision.verdict.value] += 1
        if not self._is_explained:  # once for each request, however often it asks again
            counts.missed[explanation.reason.value] += 1
        self._parts.journal.explained(explanation, is_new=not self._is_explained)
        self._is_explained = True

    @property
    def needed_blocks(self) -> tuple[range, ...]:
        """By group, the places in its block table that loading its pinned hit fills."""
        parts, hit = self._parts, self._hit
        if hit is None or not hit.leases:
            return tuple(range(0) for _ in parts.matcher.groups)
        look = hit.look
        return tuple(
            parts.matcher.needed(g, look.host_tokens, look.computed_tokens)
            for g in range(len(parts.matcher.groups))
        )

    # -- load -----------------------------------------------------------------------------------

    def load(self, tables: Sequence[BlockTable]) -> tuple[Ordered, ...]:
        """Order the pinned hit into its device blocks; it goes with the next plan.

        ``tables[g]`` is the whole block table of group g, long enough for the hit. Returns what was
        ordered: hold its device blocks until ``settle`` releases them. Empty if the hit was lost
        meanwhile (a reset, its deadline): the tokens must be computed then. Where a window or a
        chunk leaves a hit unread, the table says ``NO_BLOCK`` until it is computed.
        """
        parts = self._parts
        self._require_tables(tables)
        hit = self._hit
        if hit is None or not hit.leases:
            return ()
        look = hit.look
        pieces = []
        for g, lease in enumerate(hit.leases):
            if lease is not None:
                blocks = parts.matcher.needed(g, look.host_tokens, look.computed_tokens)
                if len(tables[g]) < blocks.stop:
                    raise InputError(
                        f"request {self.id!r}: group {g}'s block table has {len(tables[g])} "
                        f"blocks, the hit of {look.host_tokens} tokens needs {blocks.stop}"
                    )
                pieces.append((g, lease, blocks, as_slots(checked_blocks(g, tables[g], blocks))))
        self._hit = None
        del parts.pinned[self]
        self._has_asked = self._is_promoted = False
        ordered = []
        for g, lease, blocks, device_blocks in pieces:
            transfer = parts.outbox.load(self, g, lease, device_blocks)
            self.loading.add(transfer.id)
            keys = parts.matcher.slot_keys(g, look.keys, blocks)
            ordered.append(Ordered(g, device_blocks, transfer.id, blocks, keys, self))
        if not ordered:  # a hit that reads nothing has no landing to wait for
            self.state = State.LOADED
            return ()
        parts.hits.began([lease for _, lease, _, _ in pieces])
        self._promised = Match(MatchState.HIT, look.host_tokens, look.computed_tokens)
        self.state = State.LOADING
        parts.counts.hit_tokens += look.host_tokens - look.computed_tokens
        self._go_on()
        return tuple(ordered)

    def landed(self, flight: Flight) -> tuple[Match, str] | None:
        """One of its loads has ended, or its time is up: what was promised, and why it failed.

        None while others are on their way. The first failure fails the request; what else it
        waits for lands on its own.
        """
        transfer_id = flight.transfer.id
        if transfer_id not in self.loading:
            return None
        self._parts.journal.ended(self.id, flight)
        self.loading.discard(transfer_id)
        if self.loading and not flight.reason:
            return None
        self.loading.clear()
        promised = self._promised
        assert promised is not None
        self._promised = None
        if flight.reason:
            self._past = promised.computed_tokens
        if self.state is State.LOADING:  # an engine may run it before it has heard of the landing
            self.state = State.UNKNOWN if flight.reason else State.LOADED
        return promised, flight.reason

    def came(self, flight: Flight) -> None:
        """Blocks it waits for have come up from a lower level, or will not."""
        self._parts.journal.ended(self.id, flight)
        self._waits.discard(flight.transfer.id)
        if not self._waits and self.state is State.WAITING:
            self.state = State.UNKNOWN

    # -- run and store --------------------------------------------------------------------------

    def run(self) -> None:
        """The engine computes it from now on, in the blocks it has given it."""
        if self.state in _OVER:
            raise self._is_over("run")
        if self.state is not State.RUNNING:
            self.state = State.RUNNING
            if self._owed is None:
                self._go_on()

    def store(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[Ordered, ...]:
        """Order what is new of its first ``num_tokens`` into the pool.

        Call it once the compute of these tokens is queued on the device, a last time just before
        it ends. Whole blocks only; what is stored already, on its way, or finds no room is left
        out. Returns what was ordered: hold its device blocks until ``settle`` releases them. With
        lazy stores it orders nothing; see ``Scheduler.offer``.
        """
        if self.state in _OVER:
            raise self._is_over("stored")
        self._require_tables(tables)
        if self._owed is not None:
            self.tell()
        if self._parts.stores.admission.counts:  # what others asked before counts before it
            self._parts.tell_owing()
        if self.state in (State.UNKNOWN, State.LOADED):
            self.run()
        return self._store(tables, num_tokens)

    def _store(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[Ordered, ...]:
        if self.is_outdated or self._parts.stores.is_lazy:
            return ()
        num_tokens = self._storable(num_tokens)
        self._skip_past(num_tokens)
        ordered = self._parts.stores.computed(
            self, self.stored, self.chain.keys(), tables, num_tokens
        )
        self._note_stored()
        return ordered

    @property
    def is_owing(self) -> bool:
        """Whether it was answered at once and nobody has counted that yet."""
        return self._owed is not None

    @property
    def stored_tokens(self) -> int:
        """Leading tokens that :meth:`store` is done with; while there are more, call it again.

        Bounds may have made it leave the rest for later.
        """
        return min(
            [
                count * group.block_tokens
                for count, group in zip(self.stored, self._parts.matcher.groups, strict=True)
            ]
        )

    def unstored_from(self, num_tokens: int) -> int | None:
        """From which token on something of the first ``num_tokens`` is to be stored, if it is."""
        if self.is_outdated or self._parts.stores.is_lazy:
            return None
        num_tokens = self._storable(num_tokens)
        self._skip_past(num_tokens)
        stored_tokens = self.stored_tokens
        self._note_stored()
        return stored_tokens if num_tokens >= stored_tokens + self._parts.least_tokens else None

    def _storable(self, num_tokens: int) -> int:
        """As many of these tokens as have keys and will not be taken back."""
        parts = self._parts
        return min(num_tokens, len(self.chain) * parts.matcher.hash_tokens) - parts.spare_tokens

    def _skip_past(self, num_tokens: int) -> None:
        """What was loaded, or never left, needs no look at its blocks."""
        if self._past and not any(self.stored):
            past = min(self._past, num_tokens)
            self._parts.stores.skip_known(self.stored, self.chain.keys(), past)

    def _note_stored(self) -> None:
        rests = self._parts.rests
        if rests is not None:
            self.store_due = self.stored_tokens + rests.step + self._parts.spare_tokens

    def _go_on(self) -> None:
        """Where it goes on with what another left, it stores both, when it stores."""
        parts, rests = self._parts, self._parts.rests
        num_keys = self._computed // parts.matcher.hash_tokens
        if rests is None or not num_keys or any(self.stored):
            return
        rest = rests.take_continued(self.chain, num_keys)
        if rest is not None:
            other: Request = rest.request
            self.stored = list(other.stored)
            self.is_outdated |= other.is_outdated
            self._past = other._past
            had_tokens = self.stored_tokens or self._past
            self.store_due = had_tokens + rests.step + parts.spare_tokens
            other._end()

    # -- its ends -------------------------------------------------------------------------------

    def preempt(self) -> None:
        """The engine took its device blocks away; it may be matched again later."""
        if self.state in _OVER:
            return
        self._drop()
        self._renew()
        self.state = State.UNKNOWN
        self.store_due = 0

    def end(self) -> None:
        """It is over (done or aborted). Its stores go on; its hit and loads do not count.

        What it has left and nobody has stored yet is not stored any more. Safe to call twice.
        """
        rests = self._parts.rests
        if self.state is State.LEFT and rests is not None:
            for rest in rests.drop(self):
                self._parts.released.extend(rest.held)
        if self.state is not State.ENDED:
            self._end()

    def _end(self) -> None:
        self._drop()
        self.state = State.ENDED
        del self._parts.live[self]

    def leave(self, num_tokens: int) -> tuple[DeviceBlocks | Ordered, ...]:
        """It is over, with this many tokens computed. What of them is not stored is stored late.

        Returns device blocks to hold until ``settle`` releases them. One that did not run has
        computed nothing of its own: it ends.
        """
        parts, rests = self._parts, self._parts.rests
        if self.state in _OVER:
            return ()
        if self._owed is not None:
            self.tell()
        if self.state is not State.RUNNING or rests is None:
            self.end()
            return ()
        if not rests.stores_late:
            from_token = self.unstored_from(num_tokens)
            ordered: tuple[Ordered, ...] = ()
            if from_token is not None:
                tables = rests.engine.tables(self, self._storable(num_tokens), from_token)
                ordered = self.store(tables, num_tokens)
            self.end()
            return ordered
        storable = self._storable(num_tokens)
        had_tokens = max(self.stored_tokens, self._past)
        least = parts.least_tokens
        waits = rests.can_wait and least <= storable - had_tokens < rests.store_step
        waits = waits and not self.is_outdated and not parts.stores.is_lazy
        if not waits and self.unstored_from(num_tokens) is None:
            self.end()
            return ()
        return self._leave(rests, storable, waits=waits)

    def _leave(self, rests: Rests, num_tokens: int, *, waits: bool) -> tuple[DeviceBlocks, ...]:
        self._drop()
        self.state = State.LEFT
        key = self.chain[num_tokens // self._parts.matcher.hash_tokens - 1]
        if waits:
            twin = rests.wait(self, num_tokens, key)
            if twin is not None:
                twin.request._end()
            return ()
        stored_tokens = self.stored_tokens
        tables = rests.engine.tables(self, num_tokens, stored_tokens)
        sizes = [group.block_tokens for group in self._parts.matcher.groups]
        held = held_blocks(tables, sizes, stored_tokens)
        rests.hold(self, num_tokens, key, tables, held)
        return held

    def store_rest(self, rest: Rest) -> tuple[Ordered, ...]:
        """Order what it left, as far as the bounds allow; :meth:`end_rest` when that is all."""
        tables = rest.tables
        num_tokens = rest.num_tokens + self._parts.spare_tokens
        if tables is None:
            from_token = self.unstored_from(num_tokens)
            if from_token is None:
                return ()
            assert self._parts.rests is not None
            tables = self._parts.rests.engine.remains(self, rest.num_tokens, from_token)
        return self._store(tables, num_tokens)

    def end_rest(self, rest: Rest) -> None:
        """Nothing of what it left is stored any more; its device blocks are the engine's again."""
        self._parts.released.extend(rest.held)
        self._end()

    def forget(self) -> None:
        """Everything stored was forgotten: so was its hit, and what it has computed is of before.

        A load under way keeps what it was promised.
        """
        if self._owed is not None:
            self.tell()
        self._let_go()
        if self.state in (State.MATCHED, State.WAITING) and not self._waits:
            self.state = State.UNKNOWN
        self.is_outdated = True

    def expire(self) -> None:
        """Its hit was left alone for too long: it is let go, as if never asked for."""
        self._let_go()
        if self.state is not State.RUNNING:  # what it found was not worth loading, or not wanted
            self.state = State.UNKNOWN

    @property
    def hit_deadline(self) -> float:
        """When its pinned hit is let go."""
        assert self._hit is not None
        return self._hit.deadline

    def _drop(self) -> None:
        """Let go of its hit, take back its loads, and wait for nothing."""
        if self._owed is not None:
            self.tell()
        parts = self._parts
        self._let_go()
        if self.loading:
            for order in parts.outbox.cancel_loads(self):
                parts.hits.ended(order.lease)
                transfer = order.transfer
                parts.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
            self.loading.clear()
            self._promised = None
        if self._waits:
            parts.waits.remove(self, self._waits)
            self._waits = set()
        self._has_asked = self._is_promoted = False

    def _let_go(self) -> None:
        hit = self._hit
        if hit is not None:
            self._hit = None
            del self._parts.pinned[self]
            hit.release()

    def _renew(self) -> None:
        """It starts from nothing: what a reset said about its blocks no longer counts."""
        if self.is_outdated:
            self.is_outdated = False
            self.stored = [0] * len(self.stored)

    def _is_over(self, verb: str) -> InputError:
        return InputError(
            f"request {self.id!r} has ended and cannot be {verb}; open a new one for it"
        )

    def _require_tables(self, tables: Sequence[BlockTable]) -> None:
        if len(tables) != len(self.stored):
            raise InputError(
                f"got {len(tables)} block tables for {len(self.stored)} groups; give one per group"
            )

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.state.value})"
