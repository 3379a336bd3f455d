"""What look-ups are counted and explained as: once for each request, however often it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvferry.cache import reach
from kvferry.cache.policies.admission import SeenOften
from kvferry.cache.policies.contract import policy_named
from kvferry.cache.policies.load_or_compute import OverlapDecision
from kvferry.cache.pool import Pool
from kvferry.cache.tenants import Tenants
from kvferry.config import Config
from kvferry.core.keys import KeyChain, Keys
from kvferry.hints import Hints
from kvferry.scheduler.hits import PinnedHit
from kvferry.scheduler.journal import Explainer, Explanation, Journal
from kvferry.scheduler.lookup import Matcher, Missing
from kvferry.scheduler.stores import OnDevice
from kvferry.scheduler.tier import LowerTier, WriteMode
from kvferry.scheduler.tiering import LowerTiers
from kvferry.telemetry.memory_curve import TIMES, MemoryCurve, Points, TierSizes
from kvferry.telemetry.observer import Observer, Student
from kvferry.telemetry.recorder import ObservedRequest, Recorder
from kvferry.telemetry.stats import MatchCounts
from kvferry.types import HOST, NO_SLOT, NO_SLOTS, SlotArray

if TYPE_CHECKING:
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.request import Request


class Hearing:
    """Appends lookups and answers to the logs of pools whose policies hear of requests.

    Owns which requests have not ended.
    """

    def __init__(self, host: Pool | None, below: Sequence[Pool], matcher: Matcher) -> None:
        """``host`` is host memory, None where its policy wants to hear of no requests."""
        self._host = host
        self._below = below
        self._matcher = matcher
        self._open: dict[Request, int] = {}

    def asked(self, request: Request, explanation: Explanation) -> None:
        """A request was looked up for the first time, and this is what it was told."""
        tokens = self._open[request] = explanation.asked_tokens
        hit = explanation.device_tokens + explanation.host_tokens
        num_keys = min(len(request.chain), tokens // self._matcher.hash_tokens)
        for g, group in enumerate(self._matcher.groups):
            keys = partial(self._keys, g, request.chain, num_keys)
            if self._host is not None:
                found = self._found(self._host, keys, hit // group.block_tokens)
                self._host.asked(keys, tokens, found)
            for pool in self._below:
                # What it has of them is of use only where it is read.
                pool.asked(keys, tokens, NO_SLOTS)

    def _keys(self, group: int, chain: KeyChain, num_keys: int) -> Keys:
        keys = chain.keys()
        return self._matcher.all_keys(group, keys[:num_keys] if num_keys < len(keys) else keys)

    @staticmethod
    def _found(host: Pool, make_keys: Callable[[], Keys], num_hit: int) -> SlotArray:
        """Where the leading blocks are, as far as the hit goes.

        The device's blocks may not be in the host at all.
        """
        if not num_hit:
            return NO_SLOTS
        keys = make_keys()
        if not len(keys) or host.slot_of(keys[0]) == NO_SLOT:
            return NO_SLOTS
        return host.leading(keys[:num_hit])

    def ended(self, request: Request) -> None:
        """A request is over, if it was not already: what its chain has grown by is its answer."""
        tokens = self._open.pop(request, None)
        if tokens is None:
            return
        num_keys = len(request.chain)
        answer = max(0, num_keys * self._matcher.hash_tokens - tokens)
        for g in range(len(self._matcher.groups)):
            keys = partial(self._keys, g, request.chain, num_keys)
            for pool in (self._host, *self._below):
                if pool is not None:
                    pool.answered(keys, answer)


def listening(host: Pool, tiers: Sequence[LowerTier], matcher: Matcher) -> Hearing | None:
    """Appends requests to these pools' logs; None where no policy wants to be told."""
    pools = [tier.pool for tier in tiers if tier.pool is not None]
    below = [pool for pool in pools if pool.hears_requests]
    if not host.hears_requests and not below:
        return None
    return Hearing(host if host.hears_requests else None, below, matcher)


# ------------------------------------------------------------------------------------------------
# Hands every request to who learns from it: once it was answered, and again when it is over.

Noted = tuple[float, Keys, Explanation, Hints | None]
"""When a request was answered, its keys, what it was told, and what was said of it."""


class Observing:
    """Owns the observer, and which requests of those it was told of are under way."""

    def __init__(
        self,
        students: Sequence[Student],
        curve: MemoryCurve | None,
        *,
        wants_ends: bool,
        hash_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """``wants_ends``: whether anybody wants to know how long answers are."""
        self.wants_ends = wants_ends
        self._observer: Observer[Noted | ObservedRequest] = Observer(students, self._read)
        self._see = self._observer.see
        self._curve = curve
        self._hash_tokens = hash_tokens
        self._clock = clock
        self._open: dict[Request, ObservedRequest] = {}

    @property
    def curve(self) -> Points:
        """What other sizes of each tier would hit, as far as is known."""
        return self._curve.points if self._curve is not None else {}

    def answered(self, request: Request, explanation: Explanation) -> None:
        """A request was looked up for the first time, and this is what it was told."""
        noted = (self._clock(), request.chain.keys(), explanation, request.hints)
        if self.wants_ends:  # how long its answer is will be written into what is handed over
            seen = self._open[request] = self._read(noted)
            self._see(seen)
        else:
            self._see(noted)

    def _read(self, noted: Noted | ObservedRequest) -> ObservedRequest:
        """On the observer's thread, mostly: the engine's has no time for it."""
        if isinstance(noted, ObservedRequest):
            return noted
        at, keys, told, hints = noted
        tokens, found = told.asked_tokens, told.device_tokens + told.host_tokens
        return ObservedRequest(at, keys, tokens // self._hash_tokens, tokens, found, hints)

    def ended(self, request: Request) -> None:
        """A request is over: what its chain has grown by is its answer.

        A chain that has not grown says nothing of it: the library's are those of prompts alone.
        """
        seen = self._open.pop(request, None)
        if seen is not None:
            grown = len(request.chain) * self._hash_tokens - seen.tokens
            seen.end(grown if grown > 0 else None)

    def close(self) -> None:
        self._observer.close()


def observing(
    config: Config,
    pool: Pool,
    tiers: Sequence[LowerTier],
    matcher: Matcher,
    clock: Callable[[], float],
) -> Observing | None:
    """As the settings say; None where nobody wants to learn. ConfigError if a file cannot be."""
    students: list[Student] = []
    hash_tokens = matcher.hash_tokens
    curve = None
    if config.memory_curve == "on":
        rank_tiers = _tiers(pool, tiers, matcher.groups, hash_tokens, config.tier_policy)
        curve = MemoryCurve(rank_tiers, policy_named(config.policy), block_tokens=hash_tokens)
        students.append(curve)
    if config.record is not None:
        recorder = Recorder(
            Path(config.record),
            block_tokens=hash_tokens,
            most_bytes=config.record_size,
            now=clock(),
        )
        students.append(recorder)
    if not students:
        return None
    return Observing(
        students,
        curve,
        wants_ends=config.record is not None,
        hash_tokens=hash_tokens,
        clock=clock,
    )


def _tiers(
    pool: Pool,
    tiers: Sequence[LowerTier],
    groups: Sequence[reach.Group],
    hash_tokens: int,
    tier_policy: str,
) -> list[TierSizes]:
    """How many blocks of a chain each tier and those above it hold, by how large it is."""
    slots_each = sum(hash_tokens / group.block_tokens for group in groups)
    above = pool.num_slots / slots_each
    sizes = [above * times for times in TIMES]
    rank_tiers = [TierSizes(HOST, tuple(sizes), feeds_below=bool(tiers))]
    for tier in tiers:
        if tier.pool is None:
            continue  # it knows itself how much it holds
        own = tier.pool.num_slots / slots_each
        # What is written through lies below as well; what is spilled hardly ever does.
        sizes = [
            max(above, own * times) if tier.write is WriteMode.THROUGH else above + own * times
            for times in TIMES
        ]
        rank_tiers.append(TierSizes(tier.name, tuple(sizes), policy_named(tier_policy)))
        above = sizes[TIMES.index(1.0)]
    return rank_tiers


# ------------------------------------------------------------------------------------------------
# What look-ups are counted and explained as: once for each request, however often it asks.


class Accounts:
    """Owns what was counted of look-ups; the journal remembers what was said of each."""

    def __init__(
        self,
        matcher: Matcher,
        explainer: Explainer,
        journal: Journal,
        admission: SeenOften,
        lower: LowerTiers,
        tenants: Tenants | None = None,
        hearing: Hearing | None = None,
        on_device: OnDevice | None = None,
    ) -> None:
        self.counts = MatchCounts()
        self._matcher = matcher
        self._explainer = explainer
        self._journal = journal
        self._admission = admission
        self._lower = lower
        self._counts_below = lower.counts_asked
        self._tenants = tenants
        self._hearing = hearing
        self._on_device = on_device
        self.observing: Observing | None = None
        """Who learns from requests, if anybody does."""

    def close(self) -> None:
        self._explainer.close()
        if self.observing is not None:
            self.observing.close()

    def watch(self, config: Config, pool: Pool, clock: Callable[[], float]) -> None:
        """Let others learn from every request, as the settings say."""
        self.observing = observing(config, pool, self._lower.tiers, self._matcher, clock)

    @property
    def memory_curve(self) -> Points:
        """What other sizes of each tier would hit, as far as is known."""
        return self.observing.curve if self.observing is not None else {}

    def asked(self, request: Request, keys: Keys | None, num_tokens: int) -> None:
        """A request asked for so many tokens more than it has, the first time that it asks.

        ``keys`` may be left out where it does not matter how often a block is asked for.
        """
        request.is_counted = True
        self.counts.queries += 1
        self.counts.asked_tokens += max(0, num_tokens)
        if self._tenants is not None:
            counts = self._tenants.counts(request.tenant)
            counts.queries += 1
            counts.asked_tokens += max(0, num_tokens)
        if keys is not None and (self._admission.counts or self._counts_below):
            for g in range(len(self._matcher.groups)):
                slot_keys = self._matcher.all_keys(g, keys)
                self._admission.see(slot_keys)
                self._lower.asked(slot_keys)

    def loaded(self, request: Request, num_tokens: int, overlap: OverlapDecision | None) -> None:
        """So many tokens are brought to the device for a request."""
        self.counts.hit_tokens += num_tokens
        if overlap is not None:
            self.counts.overlaps[overlap.verdict.value] += 1
            self._journal.overlapped(request.id, overlap.words)
        if self._tenants is not None:
            self._tenants.counts(request.tenant).hit_tokens += num_tokens

    def found(self, request: Request, hit: PinnedHit) -> None:
        """A request was looked up, and this is all of it that is here."""
        decision = hit.decision
        if decision is not None:
            self.counts.verdicts[decision.verdict.value] += 1
        below = request.below
        asked = (below.num_asked, below.declined) if below is not None else (0, None)
        self._explained(request, self._explainer.explain(request.id, hit, *asked))

    def missed(
        self, request: Request, missing: Missing, *, computed_tokens: int, max_tokens: int
    ) -> None:
        """A request found nothing, for want of this block; the reason is that of now."""
        self._explained(
            request,
            self._explainer.explain_miss(
                request.id, missing, computed_tokens=computed_tokens, max_tokens=max_tokens
            ),
        )

    def ended(self, request: Request) -> None:
        """A request is over, whatever of it is still to be stored."""
        if self._hearing is not None:
            self._hearing.ended(request)

    def gone(self, request: Request) -> None:
        """Nothing of a request is to be stored any more."""
        if self.observing is not None and self.observing.wants_ends:
            self.observing.ended(request)
        if self._on_device is not None:
            self._on_device.ended(request)

    def told(self, request: Request, explanation: Explanation) -> None:
        """A request was answered without a look, for this reason."""
        self._explained(request, explanation)

    def _explained(self, request: Request, explanation: Explanation) -> None:
        is_new = not request.is_explained
        if is_new:
            request.is_explained = True
            self.counts.missed[explanation.reason.value] += 1
            if self.observing is not None:
                self.observing.answered(request, explanation)
            if self._hearing is not None:
                self._hearing.asked(request, explanation)
        self._journal.explained(explanation, is_new=is_new)


# ------------------------------------------------------------------------------------------------
# Answers that nobody has counted yet: they are given at once, and told of when there is time.
#
# A miss is answered with one look for one key; a hit with a look for all of them, and its bytes may
# be on their way before anybody has written down why there are no more.


class OwedMiss(NamedTuple):
    """What was lacking, and what had been asked for."""

    missing: Missing
    num_keys: int
    computed_tokens: int
    max_tokens: int


Owed = OwedMiss | PinnedHit


def tell(request: Request, owed: Owed, parts: Parts) -> None:
    """Count and explain what a request was answered."""
    if isinstance(owed, PinnedHit):
        parts.accounts.found(request, owed)
        return
    missing, num_keys, computed_tokens, max_tokens = owed
    if not request.is_counted:
        keys = request.chain.keys()[:num_keys] if parts.stores.admission.counts else None
        parts.accounts.asked(request, keys, max_tokens - computed_tokens)
    parts.accounts.missed(request, missing, computed_tokens=computed_tokens, max_tokens=max_tokens)
