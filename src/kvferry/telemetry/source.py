"""From one snapshot to the values of every metric."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvferry.cache.leases import PoolCounts
from kvferry.core.quantities import quoted
from kvferry.errors import InputError
from kvferry.scheduler.journal import Copy, Entry, Explanation, Reason
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Metric, catalog, why_path
from kvferry.telemetry.mailbox import Mailbox
from kvferry.telemetry.stats import Distribution, SchedulerStats
from kvferry.types import HOST, RequestId

if TYPE_CHECKING:
    from kvferry.tiers.disk.figures import DiskFigures


@dataclass(frozen=True)
class Snapshot:
    """All that one process can say of itself: what the scheduler counted, and its memory.

    None is what this process does not know: in a server the workers pin memory, not the scheduler.
    ``idle`` is one of the catalog's reasons, empty while it serves. ``disks`` has what drives did,
    by tier, of all ranks together.
    """

    stats: SchedulerStats
    version: str
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int | None = None
    held_blocks: int | None = None
    idle: str | None = None
    disks: Mapping[str, DiskFigures] = field(default_factory=dict)


class Sample(NamedTuple):
    """One value of one metric; ``labels`` are in the order the metric has them."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Every metric's values. Known labels are there from the start, at zero."""
    stats = snapshot.stats
    yield Sample(names.INFO, (snapshot.version,), 1)
    for metric, value in _plain(snapshot):
        if value is not None:
            yield Sample(metric, (), value)
    if snapshot.idle is not None:
        yield from idle(snapshot.idle)
    for reason in names.MISSES:
        yield Sample(names.MISSED, (reason,), stats.missed.get(reason, 0))
    for verdict in names.VERDICTS:
        yield Sample(names.DECISIONS, (verdict,), stats.verdicts.get(verdict, 0))
    for overlap in names.OVERLAPS:
        yield Sample(names.OVERLAPPED, (overlap,), stats.overlaps.get(overlap, 0))
    for key, traffic in stats.traffic.items():
        yield Sample(names.MOVED_BYTES, key, traffic.sizes.total)
        yield Sample(names.MOVED_SECONDS, key, traffic.seconds.total)
        yield Sample(names.TRANSFER_BYTES, key, traffic.sizes)
        yield Sample(names.TRANSFER_SECONDS, key, traffic.seconds)
    for rank_tier, counts in ((HOST, stats.pool), *stats.tiers.items()):
        yield from _tier(rank_tier, counts)
    for rank_tier, points in stats.memory_curve.items():
        for times, ratio in points.items():
            yield Sample(names.MEMORY_CURVE, (rank_tier, f"{times:g}"), ratio)
    for rank_tier, num_leases in stats.leases.items():
        yield Sample(names.LEASES, (rank_tier,), num_leases)
    for tier, ailment in stats.ailments.items():
        yield Sample(names.TIER_UNAVAILABLE, (tier,), int(bool(ailment)))
    for tier, (num_asked, num_found) in stats.asked.items():
        yield Sample(names.ASKED_BLOCKS, (tier,), num_asked)
        yield Sample(names.FOUND_BLOCKS, (tier,), num_found)
    for tier, num_restored in stats.restored.items():
        yield Sample(names.RESTORED_BLOCKS, (tier,), num_restored)
    for tier, rate in stats.tier_bandwidth.items():
        if rate is not None:
            yield Sample(names.LEVEL_RATE, (tier,), rate)
    for tier, disk in snapshot.disks.items():
        yield from _disk(tier, disk)
    for name, tenant in stats.tenants.items():
        yield Sample(names.TENANT_QUERIES, (name,), tenant.queries)
        yield Sample(names.TENANT_ASKED, (name,), tenant.asked_tokens)
        yield Sample(names.TENANT_HITS, (name,), tenant.hit_tokens)
        for rank_tier, count in tenant.slots.items():
            yield Sample(names.TENANT_SLOTS, (name, rank_tier), count)
        for rank_tier, count in tenant.evicted.items():
            yield Sample(names.TENANT_EVICTED, (name, rank_tier), count)
    for rank_tier, num_bytes in snapshot.slot_bytes.items():
        yield Sample(names.SLOT_BYTES, (rank_tier,), num_bytes)


def _disk(tier: str, disk: DiskFigures) -> Iterator[Sample]:
    yield Sample(names.DRIVE_BYTES, (tier, "read"), disk.read_bytes)
    yield Sample(names.DRIVE_BYTES, (tier, "write"), disk.written_bytes)
    yield Sample(names.DRIVE_SECONDS, (tier, "read"), disk.read_seconds)
    yield Sample(names.DRIVE_SECONDS, (tier, "write"), disk.write_seconds)
    for reason in names.FAILED_WHY:
        yield Sample(names.DRIVE_FAILED, (tier, reason), disk.failed.get(reason, 0))
    yield Sample(names.DRIVE_RESTARTS, (tier,), disk.restarts)
    yield Sample(names.DRIVES_UNAVAILABLE, (tier,), disk.drives_away)
    yield Sample(names.PENDING_BLOCKS, (tier,), disk.pending)
    yield Sample(names.DURABLE_LAG, (tier,), disk.durable_lag)


def idle(why: str) -> Iterator[Sample]:
    """Whether nothing is served, and why."""
    for reason in names.IDLE_REASONS:
        yield Sample(names.IDLE, (reason,), float(reason == why))


def _plain(snapshot: Snapshot) -> tuple[tuple[Metric, float | None], ...]:
    """Those without labels; None where it is not known."""
    stats = snapshot.stats
    return (
        (names.QUERIES, stats.queries),
        (names.ASKED_TOKENS, stats.asked_tokens),
        (names.HIT_TOKENS, stats.hit_tokens),
        (names.PROMOTED_TOKENS, stats.promoted_tokens),
        (names.FULL_HITS, stats.missed.get(Reason.NOTHING_MISSED.value, 0)),
        (names.LANDED, stats.landed),
        (names.FAILED, stats.failed),
        (names.OVERDUE, stats.overdue),
        (names.EXPIRED_HITS, stats.expired_hits),
        (names.EARLY_LOADS, stats.early_loads),
        (names.STALE_RECEIPTS, stats.stale_receipts),
        (names.SHED_STORES, stats.shed_stores),
        (names.LOST_BLOCKS, stats.lost_blocks),
        (names.RESETS, stats.resets),
        (names.PINNED_BYTES, snapshot.pinned_bytes),
        (names.HELD_BLOCKS, snapshot.held_blocks),
        (names.IN_FLIGHT, stats.in_flight),
        (names.QUEUED, stats.queued),
        (names.BYTES_IN_FLIGHT, stats.bytes_in_flight),
        (names.LOAD_RATE, stats.bandwidth),
        (names.PREFILL_RATE, stats.prefill_rate),
    )


def _tier(tier: str, counts: PoolCounts) -> Iterator[Sample]:
    yield Sample(names.EVICTED, (tier,), counts.evicted)
    yield Sample(names.HELD_SLOTS, (tier,), counts.held)
    yield Sample(names.REFUSED_HOLDS, (tier,), counts.refused_holds)
    for state in names.STATES:
        yield Sample(names.SLOTS, (tier, state), getattr(counts, state))


# ------------------------------------------------------------------------------------------------
# One snapshot as the text that Prometheus scrapes.
#
# What prometheus_client would write, letter by letter, in a small part of its time: it is an
# engine's
# process that is scraped, and while the text is made the interpreter is not the engine's.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NOT_NUMBERS = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(snapshot: Snapshot) -> bytes:
    """Every metric that has a value, in the catalog's order."""
    found: dict[str, list[str]] = {}
    for sample in samples(snapshot):
        found.setdefault(sample.metric.name, []).extend(_lines(sample))
    parts = []
    for name, head in _HEADS.items():
        if name in found:
            parts.append(head)
            parts += found[name]
    return "".join(parts).encode()


def _lines(sample: Sample) -> Iterator[str]:
    name, value = sample.metric.name, sample.value
    braces, before, after = _places(name, sample.labels)
    if not isinstance(value, Distribution):
        yield f"{name}{braces} {shown(value)}\n"
        return
    bounds = (*_shown_bounds(value.bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        yield f"{name}_bucket{{{before}{bound}{after}}} {shown(count)}\n"
    yield f"{name}_count{braces} {shown(sum(value.counts))}\n"
    yield f"{name}_sum{braces} {shown(value.total)}\n"


@lru_cache(maxsize=1024)
def _places(name: str, labels: tuple[str, ...]) -> tuple[str, str, str]:
    """The labels in their braces; and what stands before and after a bucket's bound in its own."""
    pairs = {
        label: f'{label}="{text.translate(_ESCAPES)}"'
        for label, text in sorted(zip(_LABELS[name], labels, strict=True))
    }
    before = [*(pair for label, pair in pairs.items() if label < "le"), 'le="']
    after = ['"', *(pair for label, pair in pairs.items() if label > "le")]
    return f"{{{','.join(pairs.values())}}}" if pairs else "", ",".join(before), ",".join(after)


@lru_cache(maxsize=8)
def _shown_bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(map(shown, bounds))


def shown(value: float) -> str:
    """A number as Go writes it, which turns to exponents sooner than Python."""
    text = repr(float(value))
    if text in _NOT_NUMBERS:
        return _NOT_NUMBERS[text]
    dot = text.find(".")
    if value > 0 and dot > 6:
        digits = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{digits}e+{dot - 1:02d}"
    return text


def _head(metric: Metric) -> str:
    words = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {words}\n# TYPE {metric.name} {metric.kind.value}\n"


_HEADS = {metric.name: _head(metric) for metric in catalog()}
_LABELS = {metric.name: tuple(label.name for label in metric.labels) for metric in catalog()}


# ------------------------------------------------------------------------------------------------
# Which requests of an engine an answer of its server is of, by the names that vLLM makes of it.
#
# What a client knows as ``cmpl-5f2c`` is ``cmpl-5f2c-0-8b2677e5`` in the engine: the prompt's
# number
# and eight random digits more. ::
#
#     cmpl-5f2c-1-8b2677e5                            the second of several prompts
#     1_cmpl-5f2c-0-8b2677e5                          the second of several samples
#     chatcmpl-5f2c-8b2677e5                          a chat has one prompt, and no number
#     chatcmpl-0f1e2d3c4b5a6978_1-8b2677e5            but for a batch of them
#     resp_5f2c_1-8b2677e5                            the second turn of one response
#     cmpl-5f2c-0f1e2d3c4b5a6978-beam-0-8b2677e5      a beam, of whatever answer

MOST_REQUESTS = 256
"""Of one answer, for one order: the engine waits until it is carried out."""

_RANDOM = r"(?:-[0-9a-f]{8})?"  # vLLM can be told to leave it out
# A client may choose the middle of a name, so only what vLLM adds there in every case is taken off:
# "chatcmpl-agent_3" is a name of its own, no part of "chatcmpl-agent".
_FORMS = tuple(
    re.compile(rf"(?P<sample>(?:\d+_)?)(?P<answer>{answer})(?P<part>{part}){_RANDOM}")
    for answer, part in (
        (r".+?", r"-[0-9a-f]{16}-beam-\d+"),
        (r"(?:cmpl|embd|pooling|classify|score)-.+?", r"-\d+"),
        (r"chatcmpl-[0-9a-f]{16}", r"_\d+"),
        (r"resp_.+?", r"_\d+"),
        (r".+?", ""),
    )
)
_SERVERS = re.compile(r"^(?:chat)?cmpl-")


class RequestName(NamedTuple):
    """The id in vLLM's answer, and which of that answer's requests it is."""

    answer: str
    part: str


def read_name(request_id: RequestId) -> RequestName:
    """What an engine's name of a request says."""
    for form in _FORMS:
        if found := form.fullmatch(request_id):
            return RequestName(found["answer"], found["sample"] + found["part"])
    return RequestName(request_id, "")


def is_of_client(name: str, request_id: RequestId) -> bool:
    """Whether a client knows it so: by its answer's id, or by the X-Request-Id it sent itself."""
    if name not in request_id:  # far cheaper, and there are a thousand
        return False
    answer = read_name(request_id).answer
    return bool(name) and name in (answer, _SERVERS.sub("", answer))


def requests_of(answer: str, request_ids: Iterable[RequestId]) -> list[RequestId]:
    """Those of one answer, in their order. InputError where several answers had this id.

    A client that sends one X-Request-Id twice has two answers of one id: which is meant nobody
    knows, and the wrong one would be dropped.
    """
    found: dict[RequestId, str] = {}
    for request_id in request_ids:
        if answer in request_id and (name := read_name(request_id)).answer == answer:
            found[request_id] = name.part
    if len(set(found.values())) < len(found):
        raise InputError(f"several answers have the id {quoted(answer)}; {_one_of(found)}")
    if len(found) > MOST_REQUESTS:
        raise InputError(
            f"{quoted(answer)} has {len(found)} requests, and an order is for {MOST_REQUESTS} at "
            f"most; {_one_of(found)}"
        )
    return list(found)


def _one_of(found: Iterable[RequestId]) -> str:
    some = ", ".join(quoted(request_id) for request_id in list(found)[-3:])
    return f"name one by its engine's name, such as {some}"


# ------------------------------------------------------------------------------------------------
# Where an endpoint gets its answers: one scheduler, asked on its own thread.

WhyPath = Callable[[Copy], str]
"""Why a copy took its path, in words; empty where that is not known here."""


class AskedScheduler(Protocol):
    """What of a scheduler can be asked."""

    def stats(self) -> SchedulerStats: ...

    def journal(self, request_id: RequestId) -> Entry | None: ...

    def recent(self) -> tuple[RequestId, ...]: ...


class Source:
    """Asks a scheduler through its mailbox. Owns neither; safe to call from any thread."""

    def __init__(
        self,
        scheduler: AskedScheduler,
        mailbox: Mailbox,
        *,
        slot_bytes: Mapping[str, int] | None = None,
        pinned_bytes: Callable[[], int | None] = lambda: None,
        why_path: WhyPath = lambda copy: why_path(copy, None),
        disks: Callable[[], Mapping[str, DiskFigures]] = dict,
    ) -> None:
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._slot_bytes = dict(slot_bytes or {})
        self._pinned_bytes = pinned_bytes
        self._why_path = why_path
        self._disks = disks

    def snapshot(self) -> Snapshot:
        stats = self._mailbox.ask(self._scheduler.stats)
        return Snapshot(
            stats,
            installed_version(),
            self._slot_bytes,
            self._pinned_bytes(),
            disks=self._disks(),
        )

    def explain(self, request_id: RequestId) -> dict[str, Any] | None:
        """What is remembered of a request, as plain data; None if nothing is.

        A server tells its users a shorter name than its engine has, and may make several requests
        of one: then it is the latest that ``request_id`` is the client's name of, and ``others``
        names the rest.
        """
        ids = [request_id]
        entry = self._mailbox.ask(self._entry, request_id)
        if entry is None:
            every = self._mailbox.ask(self._scheduler.recent)
            ids = [found for found in reversed(every) if is_of_client(request_id, found)]
            entry = self._mailbox.ask(self._entry, ids[0]) if ids else None
        if entry is None:
            return None
        return {**plain(ids[0], entry, self._why_path), "others": ids[1:]}

    def recent(self, most: int = 50) -> list[dict[str, Any]]:
        """The latest requests and what each of them missed, the latest first."""
        return [
            {
                "request_id": request_id,
                "reason": why.reason.value if why is not None else None,
                "asked_tokens": why.asked_tokens if why is not None else None,
                "host_tokens": why.host_tokens if why is not None else None,
            }
            for request_id, why in self._mailbox.ask(self._latest, most)
        ]

    def away(self) -> dict[str, str]:
        """The tiers that cannot be used now, and why."""
        ailments = self._mailbox.ask(self._scheduler.stats).ailments
        return {tier: ailment for tier, ailment in ailments.items() if ailment}

    # Run on the engine's thread, so they pick up facts and leave all else to whoever asked.

    def _entry(self, request_id: RequestId) -> Entry | None:
        """A copy: the journal's own goes on changing."""
        entry = self._scheduler.journal(request_id)
        return None if entry is None else replace(entry, copies=entry.copies.copy())

    def _latest(self, most: int) -> list[tuple[RequestId, Explanation | None]]:
        found = []
        for request_id in reversed(self._scheduler.recent()[-most:]):
            entry = self._scheduler.journal(request_id)
            found.append((request_id, entry.explanation if entry is not None else None))
        return found


def plain(request_id: RequestId, entry: Entry, why_path: WhyPath) -> dict[str, Any]:
    """One journal entry, ready for JSON."""
    why = entry.explanation
    return {
        "request_id": request_id,
        "explanation": why.as_dict() if why is not None else None,
        "hints": entry.hints.as_dict() if entry.hints is not None else None,
        "refused": list(entry.refused),
        "overlap": entry.overlap,
        "copies": [{**asdict(copy), "why": why_path(copy)} for copy in entry.copies],
    }


@cache
def installed_version() -> str:
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
