"""Why requests got no more than they did, and what is counted and remembered of them.

::

    request ──append──> event log ──drain──> Bookkeeper: counters, journal, ghost filter, recorder
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kvferry.cache.events import EventKind, EventLog, PoolEvent
from kvferry.cache.policies.admission import SeenOften
from kvferry.cache.policies.load_or_compute import Decision
from kvferry.cache.pool import Pool
from kvferry.cache.tenants import TenantCounts, Tenants
from kvferry.core.identity import scope
from kvferry.core.keys import Key, Keys, masked_key
from kvferry.hints import Hinted, Hints
from kvferry.scheduler.lookup import Matcher, Missing
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import InFlight
from kvferry.scheduler.writeback import Writeback
from kvferry.telemetry.recorder import RecordedRequest, Recorder
from kvferry.telemetry.stats import MatchCounts, SchedulerStats
from kvferry.types import DEVICE, HOST, RequestId, Transfer


class Reason(Enum):
    """Why the first token that could not be had from here could not."""

    NOTHING_MISSED = "nothing_missed"  # all that was asked for could be had
    EVICTED = "evicted"  # it was here; the room was needed, or a copy of it failed
    NEVER_STORED = "never_stored"  # it was not computed yet, or found no room
    BELOW_THRESHOLD = "below_threshold"  # not asked for often enough to be stored
    IN_FLIGHT = "in_flight"  # its bytes are still on their way in
    OTHER_NAMESPACE = "other_namespace"  # stored before a reset or a change of weights
    NOT_PROMOTED = "not_promoted"  # on a lower tier, and not brought up in time
    TIER_UNAVAILABLE = "tier_unavailable"  # on a lower tier that cannot be used now
    LOAD_SLOWER = "load_slower"  # it is here or below, but computing it was judged faster
    HINT = "hint"  # a hint said that nothing is to be loaded for this request


class Explanation(NamedTuple):
    """What one request could be given when it was looked up, and why no more.

    ``device_tokens`` the engine had, ``host_tokens`` more could be loaded, of ``asked_tokens`` in
    all; ``lower_tokens`` of those asked for lay only below the host. ``tier_hit_tokens`` says of
    those that it could be given which tier had them: what came up from a lower tier for it, or was
    prefetched, counts there and not as the host's. ``first_missing`` is the first token not to be
    had, in ``group``. Tiers that know keys themselves were asked for ``asked_blocks`` of it;
    ``tiers_away`` names those that could not be used, and why.
    """

    request_id: RequestId
    asked_tokens: int
    device_tokens: int
    host_tokens: int
    lower_tokens: int
    reason: Reason
    first_missing: int | None = None
    group: int | None = None
    decision: Decision | None = None
    asked_blocks: int = 0
    tiers_away: tuple[str, ...] = ()
    tier_hit_tokens: Mapping[str, int] = MappingProxyType({})

    def as_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        plain: dict[str, object] = {**self._asdict(), "reason": self.reason.value}
        plain["tier_hit_tokens"] = dict(self.tier_hit_tokens)
        if self.decision is not None:
            verdict = self.decision.verdict.value
            plain["decision"] = {**self.decision._asdict(), "verdict": verdict}
        return plain


# -- records of requests in the event log -------------------------------------------------------


class Loaded(NamedTuple):
    """Tokens are loaded for a request of this tenant; ``in_parts`` if it may run meanwhile."""

    tenant: int
    in_parts: bool


class RequestAnswer(NamedTuple):
    """What a request was answered: facts of that moment, from which its miss is explained later.

    Token counts are from the request's start. ``missing`` stopped the hit; ``declined`` is why what
    lower tiers had was not brought up.
    """

    request: Any
    num_keys: int
    max_tokens: int
    computed_tokens: int
    host_tokens: int
    all_tokens: int
    missing: Missing | None
    reason: Reason | None = None
    decision: Decision | None = None
    is_declined: bool = False
    declined: Decision | None = None
    asked_blocks: int = 0


# -- what is remembered --------------------------------------------------------------------------

MOST_REQUESTS = 1024
MOST_COPIES = 32
"""Of one request; a long one stores a little in many steps, and its last copies tell enough."""


class Copy(NamedTuple):
    """One transfer that ended for a request (a store may have carried others' blocks too).

    Bytes are summed over ranks, seconds are the slowest rank's. ``paths`` are those the ranks took.
    """

    transfer_id: int
    src: str
    dst: str
    group: int
    num_blocks: int
    num_bytes: int
    seconds: float
    paths: tuple[str, ...]
    reason: str = ""

    @classmethod
    def of(cls, flight: InFlight, transfer: Transfer) -> Copy:
        num_bytes, seconds, paths = 0, 0.0, {""}
        for receipt in flight.receipts:  # one for each rank
            num_bytes += receipt.num_bytes
            seconds = max(seconds, receipt.seconds)
            paths.add(receipt.path)
        return cls(
            transfer.id,
            transfer.src,
            transfer.dst,
            transfer.group,
            max(len(transfer.src_slots), len(transfer.dst_slots)),
            num_bytes,
            seconds,
            tuple(sorted(paths - {""})),
            flight.reason or flight.note,
        )


@dataclass(slots=True)
class Entry:
    """What is remembered of one of the latest requests."""

    explanation: Explanation | None = None
    hints: Hints | None = None
    refused: tuple[str, ...] = ()
    """Which hints could not be followed, and why."""
    overlaps: bool = False
    """Whether its load overlaps with the forward pass."""
    copies: list[Copy] = field(default_factory=list)
    brought: dict[str, int] = field(default_factory=dict)
    """Tokens of its hit that came up from lower tiers, until the hit is loaded."""


class GhostFilter:
    """Remembers, roughly, which keys were cached once: tells "evicted" from "never stored".

    A table with one place per bucket that holds part of the last key put there. A newer key may
    replace an older one: the answer explains, and decides nothing.
    """

    def __init__(self, num_keys: int) -> None:
        size = 1 << max(10, (4 * num_keys - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._seen = np.zeros(size, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        self._seen[(keys.array[:, 0] & self._mask).astype(np.int64)] = keys.array[:, 1]

    def has(self, key: Key) -> bool:
        """Whether this one key is remembered."""
        place = int.from_bytes(key[:8], "little") & int(self._mask)
        return bool(self._seen.item(place) == int.from_bytes(key[8:16], "little"))


class Bookkeeper:
    """Counts, explains and remembers what the log says of requests. Owns all of that.

    Public methods of the scheduler drain it before they read from it; the engine's idle steps
    otherwise. An exception is kept in ``failure`` until the scheduler raises it.
    """

    def __init__(
        self,
        log: EventLog,
        matcher: Matcher,
        pool: Pool,
        admission: SeenOften,
        lower: LowerTiers,
        writeback: Writeback,
        tenants: Tenants | None = None,
    ) -> None:
        self.counts = MatchCounts()
        self.entries: OrderedDict[RequestId, Entry] = OrderedDict()
        """What is remembered; the request that asked longest ago comes first."""
        self.failure: Exception | None = None
        self._matcher = matcher
        self._admission = admission
        self._lower = lower
        self._writeback = writeback
        self._counts_keys = admission.counts or writeback.counts_requests
        self._tenants = tenants
        self._ghosts = GhostFilter(pool.num_slots)
        self._brought: dict[int, str] = {}
        """By part of their key, the tier of blocks that came up and no request has found yet."""
        self._recorder: Recorder | None = None
        self._read: dict[EventKind, Callable[[PoolEvent], None]] = {
            EventKind.LOOKUP: self._looked_up,
            EventKind.RESULT: self._noted,
            EventKind.LOAD: self._loaded,
            EventKind.EVICT: self._evicted,
            EventKind.PROMOTE: self._promoted,
        }
        self._reader = log.reader(tuple(self._read))
        self.events = self._reader.events
        """Records that wait to be read."""

    def drain(self) -> None:
        """Read all that was appended since the last call."""
        events, read = self.events, self._read
        while events:
            event = events.popleft()
            try:
                read[event.kind](event)
            except Exception as error:
                self.failure = self.failure or error

    def record(self, path: Path, most_bytes: int, now: float) -> None:
        """Write requests to this file from now on. ConfigError where it cannot be opened."""
        tokens = self._matcher.hash_tokens
        self._recorder = Recorder(path, block_tokens=tokens, most_bytes=most_bytes, now=now)

    def raise_failure(self) -> None:
        """Raise the first exception since the last call."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _touch(self, request_id: RequestId, *, is_first_answer: bool = False) -> Entry:
        """The entry of a request, as the latest; a new one if there is none.

        At its first answer another request's of its name goes; copies for it may have ended before.
        """
        entry = self.entries.get(request_id)
        if entry is not None and not (is_first_answer and entry.explanation is not None):
            self.entries.move_to_end(request_id)
            return entry
        self.entries.pop(request_id, None)
        entry = self.entries[request_id] = Entry()
        if len(self.entries) > MOST_REQUESTS:
            self.entries.popitem(last=False)
        return entry

    def close(self) -> None:
        self.drain()
        self._reader.close()
        if self._recorder is not None:
            self._recorder.close()

    # -- reading --------------------------------------------------------------------------------

    def _count(self, request: Any, num_tokens: int, num_keys: int) -> None:
        counts: list[MatchCounts | TenantCounts] = [self.counts]
        if self._tenants is not None:
            counts.append(self._tenants.counts(request.tenant))
        for each in counts:
            each.queries += 1
            each.asked_tokens += max(0, num_tokens)
        if self._counts_keys:
            for g in range(len(self._matcher.groups)):
                slot_keys = self._matcher.names[g].leading(request.chain, num_keys)
                self._admission.see(slot_keys)
                self._writeback.requested(slot_keys)

    def _looked_up(self, event: PoolEvent) -> None:
        answer = event.detail
        if not isinstance(answer, RequestAnswer):  # of another group of the same request
            return
        request = answer.request
        self._count(request, answer.max_tokens - answer.computed_tokens, answer.num_keys)
        entry = self._touch(request.id, is_first_answer=True)
        explanation = entry.explanation = self._explain(answer, entry)
        self.counts.missed[explanation.reason.value] += 1
        self.counts.tier_hit_tokens[DEVICE] += explanation.device_tokens
        if self._recorder is not None:
            tokens = answer.max_tokens
            keys = request.chain.keys()[: tokens // self._matcher.hash_tokens]
            self._recorder.see(RecordedRequest(event.at, keys, tokens, request.hints))

    def _noted(self, event: PoolEvent) -> None:
        detail = event.detail
        if isinstance(detail, RequestAnswer):
            entry = self._touch(event.request)
            entry.explanation = self._explain(detail, entry)
        elif isinstance(detail, InFlight):
            if isinstance(detail.transfer, Transfer):  # a question copies nothing
                known = self.entries.get(event.request)
                copies = (known or self._touch(event.request)).copies
                copies.append(Copy.of(detail, detail.transfer))
                if len(copies) > MOST_COPIES:
                    del copies[0]
        elif isinstance(detail, Hinted):
            entry = self._touch(event.request)
            entry.hints, entry.refused = detail.hints, tuple(detail.refused)
            self.counts.unheeded_hints += bool(detail.refused)

    def _loaded(self, event: PoolEvent) -> None:
        load = event.detail
        assert isinstance(load, Loaded)
        self.counts.hit_tokens += event.tokens
        entry = self.entries.get(event.request)
        if entry is None or not entry.brought:
            self.counts.tier_hit_tokens[HOST] += event.tokens
        else:
            for tier, num_tokens in _split(event.tokens, entry.brought).items():
                self.counts.tier_hit_tokens[tier] += num_tokens
            entry.brought.clear()
        if self._tenants is not None:
            self._tenants.counts(load.tenant).hit_tokens += event.tokens
        if load.in_parts:
            self._touch(event.request).overlaps = True

    def _evicted(self, event: PoolEvent) -> None:
        keys = event.all_keys()
        self._ghosts.add(keys)
        if self._brought:
            for word in keys.array[:, 1].tolist():
                self._brought.pop(word, None)

    def _promoted(self, event: PoolEvent) -> None:
        words = event.all_keys().array[:, 1].tolist()
        self._brought.update(dict.fromkeys(words, str(event.detail)))

    def _take_brought(self, answer: RequestAnswer) -> Iterator[tuple[str, int]]:
        """Tokens of an answer by the lower tier that they came up from, unless another had them."""
        matcher, stop, start = self._matcher, answer.host_tokens, answer.computed_tokens
        found: list[str | None] = []
        for g in range(len(matcher.groups) if stop > start else 0):
            blocks = matcher.needed(g, stop, start)
            keys = matcher.names[g].of(answer.request.chain.keys(), blocks)
            found += [self._brought.pop(word, None) for word in keys.array[:, 1].tolist()]
        for tier, count in Counter(filter(None, found)).items():
            yield tier, (stop - start) * count // len(found)

    # -- explaining -----------------------------------------------------------------------------

    def _explain(self, answer: RequestAnswer, entry: Entry) -> Explanation:
        if self._brought:
            for tier, num_tokens in self._take_brought(answer):
                entry.brought[tier] = entry.brought.get(tier, 0) + num_tokens
        missing, decision, reason = answer.missing, answer.decision, answer.reason
        group, token = (None, None) if missing is None else (missing.group, missing.token)
        if decision is not None:
            self.counts.verdicts[decision.verdict.value] += 1
        if reason is not None:
            token = answer.computed_tokens
        elif decision is not None and answer.is_declined:
            reason, group, token = Reason.LOAD_SLOWER, None, answer.computed_tokens
        elif answer.declined is not None and missing is not None:
            reason, decision = Reason.LOAD_SLOWER, answer.declined
        elif missing is None:
            reason = Reason.NOTHING_MISSED
        elif answer.all_tokens > answer.host_tokens:
            reason = Reason.NOT_PROMOTED
        else:
            reason = self._why_missing(missing)
        from_host = answer.host_tokens - answer.computed_tokens
        by_tier: dict[str, int] = {HOST: from_host}
        if entry.brought:
            by_tier = _split(from_host, entry.brought)
        return Explanation(  # by position: that takes half the time
            answer.request.id,
            answer.max_tokens,
            answer.computed_tokens,
            from_host,
            answer.all_tokens - answer.host_tokens,
            reason,
            token,
            group,
            decision,
            answer.asked_blocks,
            self._lower.away if self._lower.tiers else (),
            {DEVICE: answer.computed_tokens, **by_tier},
        )

    def _why_missing(self, missing: Missing) -> Reason:
        group, key = missing.group, missing.key
        if missing.is_coming:
            return Reason.IN_FLIGHT
        if self._lower.tiers and self._lower.has_out_of_reach(key):
            return Reason.TIER_UNAVAILABLE
        if self._ghosts.has(key):
            return Reason.EVICTED
        if self._admission.counts and not self._admission.admits(Keys.from_bytes((key,)))[0]:
            return Reason.BELOW_THRESHOLD
        before = self._matcher.epoch_before
        if before is not None:
            bare = masked_key(key, scope(self._matcher.epoch, group))
            if self._ghosts.has(masked_key(bare, scope(before, group))):
                return Reason.OTHER_NAMESPACE
        return Reason.NEVER_STORED


def _split(num_tokens: int, brought: Mapping[str, int]) -> dict[str, int]:
    """So many tokens by the tier they came from; the host had those that were not brought up."""
    by_tier: dict[str, int] = {HOST: 0}
    left = num_tokens
    for tier, count in brought.items():
        by_tier[tier] = min(left, count)
        left -= by_tier[tier]
    by_tier[HOST] = left
    return by_tier


@dataclass(frozen=True)
class Onlooker:
    """Counts and journal of a scheduler, as any thread may read them.

    It changes nothing: what the scheduler has not drained from its log yet is not in it.
    """

    stats: Callable[[], SchedulerStats]
    journal: Callable[[RequestId], Entry | None]
    recent: Callable[[], tuple[RequestId, ...]]
