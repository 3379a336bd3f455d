"""Miss reasons of requests, the counters of lookups, and a journal of the latest requests.

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
    """Miss reason: why the first block that a request missed could not be loaded."""

    NOTHING_MISSED = "nothing_missed"  # a full hit
    EVICTED = "evicted"  # the block was evicted, or a copy of it failed
    NEVER_STORED = "never_stored"  # the block was not computed yet, or no slot was free for it
    BELOW_THRESHOLD = "below_threshold"  # not requested often enough to be stored
    IN_FLIGHT = "in_flight"  # the block is still being stored or promoted
    OTHER_NAMESPACE = "other_namespace"  # stored before a reset or a change of weights
    NOT_PROMOTED = "not_promoted"  # on a lower tier, and not promoted in time
    TIER_UNAVAILABLE = "tier_unavailable"  # on a lower tier that cannot be used now
    LOAD_SLOWER = "load_slower"  # found on some tier, but computing was estimated to be faster
    HINT = "hint"  # a hint forbids loads for this request


class Explanation(NamedTuple):
    """The hit of one request at its last lookup, and its miss reason.

    Of ``asked_tokens``, the engine had ``device_tokens``; ``host_tokens`` more could be loaded;
    ``lower_tokens`` more were only on lower tiers. ``tier_hit_tokens`` are the hit's tokens by
    tier: blocks promoted or prefetched for this request count for the lower tier, not the host.
    ``first_missing`` is the first token that missed, in ``group``. ``asked_blocks`` is how many
    blocks keyed tiers were asked for. ``tiers_away`` are the unavailable tiers, each with its
    reason.
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
        """Return plain data, ready for JSON."""
        plain: dict[str, object] = {**self._asdict(), "reason": self.reason.value}
        plain["tier_hit_tokens"] = dict(self.tier_hit_tokens)
        if self.decision is not None:
            verdict = self.decision.verdict.value
            plain["decision"] = {**self.decision._asdict(), "verdict": verdict}
        return plain


# -- records of requests in the event log -------------------------------------------------------


class Loaded(NamedTuple):
    """A load was ordered for a request of ``tenant``; ``in_parts``: it lands layer by layer."""

    tenant: int
    in_parts: bool


class RequestAnswer(NamedTuple):
    """The answer to one match of a request, with the facts that explain its miss later.

    Token counts are from the request's start. ``missing`` is the block that ended the hit.
    ``declined`` is why blocks on lower tiers were not promoted.
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


# -- the journal ---------------------------------------------------------------------------------

MOST_REQUESTS = 1024
MOST_COPIES = 32
"""Copies remembered per request: a long request stores in many steps, and the last ones suffice."""


class Copy(NamedTuple):
    """One completed transfer of a request; a store may include blocks of other requests.

    Bytes are summed over ranks, seconds are the slowest rank's, ``paths`` are the copy paths.
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
    """The journal's record of one of the latest requests."""

    explanation: Explanation | None = None
    hints: Hints | None = None
    refused: tuple[str, ...] = ()
    """The hints that could not be followed, and why."""
    overlaps: bool = False
    """Whether the request's load overlaps with the forward pass."""
    copies: list[Copy] = field(default_factory=list)
    brought: dict[str, int] = field(default_factory=dict)
    """Promoted tokens of the request's hit, by lower tier, until the hit is loaded."""


class GhostFilter:
    """Remembers keys of evicted blocks, roughly: tells "evicted" from "never stored".

    A hash table with one entry per bucket: part of the last key added. A newer key may replace an
    older one, which is harmless: answers only explain misses, and decide nothing.
    """

    def __init__(self, num_keys: int) -> None:
        size = 1 << max(10, (4 * num_keys - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._seen = np.zeros(size, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        self._seen[(keys.array[:, 0] & self._mask).astype(np.int64)] = keys.array[:, 1]

    def has(self, key: Key) -> bool:
        """Return whether this key is remembered."""
        place = int.from_bytes(key[:8], "little") & int(self._mask)
        return bool(self._seen.item(place) == int.from_bytes(key[8:16], "little"))


class Bookkeeper:
    """Reads the event log into counters, miss reasons and the journal. Owns all three.

    The scheduler drains it before it reads them, and otherwise while the engine is idle. An
    exception is kept in ``failure`` until the scheduler raises it.
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
        """The journal; the least recently matched request comes first."""
        self.failure: Exception | None = None
        self._matcher = matcher
        self._admission = admission
        self._lower = lower
        self._writeback = writeback
        self._counts_keys = admission.counts or writeback.counts_requests
        self._tenants = tenants
        self._ghosts = GhostFilter(pool.num_slots)
        self._brought: dict[int, str] = {}
        """The tier of each promoted block that no request has found yet, by part of its key."""
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
        """Event log records that were not read yet."""

    def drain(self) -> None:
        """Read all records appended since the last call."""
        events, read = self.events, self._read
        while events:
            event = events.popleft()
            try:
                read[event.kind](event)
            except Exception as error:
                self.failure = self.failure or error

    def record(self, path: Path, most_bytes: int, now: float) -> None:
        """Record requests in this file from now on. ConfigError if it cannot be opened."""
        tokens = self._matcher.hash_tokens
        self._recorder = Recorder(path, block_tokens=tokens, most_bytes=most_bytes, now=now)

    def raise_failure(self) -> None:
        """Raise the first exception since the last call, if there was one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _touch(self, request_id: RequestId, *, is_first_answer: bool = False) -> Entry:
        """Return the entry of a request, made the newest; a new one if there is none.

        At a first answer, an entry with an explanation is an older request's: it is replaced.
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
        if not isinstance(answer, RequestAnswer):  # the record of another group of the request
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
        """Yield promoted tokens of an answer by tier; blocks count for the first request only."""
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
        return Explanation(  # positional arguments take half the time of keywords
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
    """Return ``num_tokens`` by tier: first those ``brought`` from lower tiers, the rest is host."""
    by_tier: dict[str, int] = {HOST: 0}
    left = num_tokens
    for tier, count in brought.items():
        by_tier[tier] = min(left, count)
        left -= by_tier[tier]
    by_tier[HOST] = left
    return by_tier


@dataclass(frozen=True)
class Onlooker:
    """Read access to a scheduler's counters and journal, for any thread.

    Changes nothing: records that the scheduler has not drained from its event log are not included.
    """

    stats: Callable[[], SchedulerStats]
    journal: Callable[[RequestId], Entry | None]
    recent: Callable[[], tuple[RequestId, ...]]
