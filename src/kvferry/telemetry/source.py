"""From a scheduler's counts to the values of every metric, as text; and what requests did."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvferry.core.quantities import quoted
from kvferry.errors import InputError
from kvferry.scheduler.journal import Copy, Entry, Explanation, Reason
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Metric, catalog, why_path
from kvferry.telemetry.mailbox import Mailbox
from kvferry.telemetry.stats import Distribution, SchedulerStats, Traffic
from kvferry.types import HOST, RequestId

if TYPE_CHECKING:
    from kvferry.tiers.disk.protocol import DiskFigures


@dataclass(frozen=True)
class Snapshot:
    """All that one process knows of itself: what the scheduler counted, and its memory.

    None is what this process does not know: in a server the workers pin memory, not the scheduler.
    ``idle`` is one of ``IDLE_REASONS``, empty while it serves. ``disks`` has the drives' figures by
    tier, of all ranks together.
    """

    stats: SchedulerStats
    version: str
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int | None = None
    held_blocks: int | None = None
    idle: str | None = None
    disks: Mapping[str, DiskFigures] = field(default_factory=dict)


Value = float | Distribution
Values = Value | None | Mapping[Any, Value]
"""One value, none while it is unknown, or one for each label or combination of labels."""


class Sample(NamedTuple):
    """One value of one metric; ``labels`` are in the order the metric has them."""

    metric: Metric
    labels: tuple[str, ...]
    value: Value


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Every metric's values, in the catalog's order; known labels begin at zero."""
    for metric, read in _READS.items():
        found = read(snapshot)
        if isinstance(found, Mapping):
            for labels, value in found.items():
                yield Sample(metric, (labels,) if isinstance(labels, str) else labels, value)
        elif found is not None:
            yield Sample(metric, (), found)


def idle(reason: str) -> Iterator[Sample]:
    """Whether nothing is served, and why, where there is no scheduler to count anything."""
    return (Sample(names.IDLE, (each,), float(each == reason)) for each in names.IDLE_REASONS)


def _each(labels: tuple[str, ...], counts: Mapping[str, int]) -> Values:
    return {label: counts.get(label, 0) for label in labels}


def _traffic(read: Callable[[Traffic], Value]) -> Callable[[Snapshot], Values]:
    return lambda s: {route: read(traffic) for route, traffic in s.stats.traffic.items()}


def _pools(name: str) -> Callable[[Snapshot], Values]:
    """One of a pool's counts, for the host and every tier with places."""
    return lambda s: {
        tier: getattr(pool, name) for tier, pool in ((HOST, s.stats.pool), *s.stats.tiers.items())
    }


def _slots(s: Snapshot) -> Values:
    pools = ((HOST, s.stats.pool), *s.stats.tiers.items())
    return {(tier, state): getattr(pool, state) for tier, pool in pools for state in names.STATES}


def _disks(*fields: str) -> Callable[[Snapshot], Values]:
    """One of the drives' figures by tier; two of them as ``read`` and ``write``."""
    if len(fields) == 1:
        return lambda s: {tier: getattr(disk, fields[0]) for tier, disk in s.disks.items()}
    return lambda s: {
        (tier, operation): getattr(disk, name)
        for tier, disk in s.disks.items()
        for operation, name in zip(("read", "write"), fields, strict=True)
    }


def _tenants(name: str) -> Callable[[Snapshot], Values]:
    return lambda s: {tenant: getattr(each, name) for tenant, each in s.stats.tenants.items()}


def _tenant_tiers(name: str) -> Callable[[Snapshot], Values]:
    return lambda s: {
        (tenant, tier): count
        for tenant, each in s.stats.tenants.items()
        for tier, count in getattr(each, name).items()
    }


_READS: dict[Metric, Callable[[Snapshot], Values]] = {
    names.INFO: lambda s: {s.version: 1},
    names.IDLE: lambda s: (
        None if s.idle is None else {each: float(each == s.idle) for each in names.IDLE_REASONS}
    ),
    names.LOOKUPS: lambda s: s.stats.queries,
    names.LOOKUP_TOKENS: lambda s: s.stats.asked_tokens,
    names.HIT_TOKENS: lambda s: s.stats.hit_tokens,
    names.PROMOTED_TOKENS: lambda s: s.stats.promoted_tokens,
    names.FULL_HITS: lambda s: s.stats.missed.get(Reason.NOTHING_MISSED.value, 0),
    names.MISSED: lambda s: _each(names.MISSES, s.stats.missed),
    names.DECISIONS: lambda s: _each(names.VERDICTS, s.stats.verdicts),
    names.OVERLAPPED: lambda s: _each(names.OVERLAPS, s.stats.overlaps),
    names.MOVED_BYTES: _traffic(lambda traffic: traffic.sizes.total),
    names.MOVED_SECONDS: _traffic(lambda traffic: traffic.seconds.total),
    names.TRANSFER_BYTES: _traffic(lambda traffic: traffic.sizes),
    names.TRANSFER_SECONDS: _traffic(lambda traffic: traffic.seconds),
    names.COMPLETED: lambda s: s.stats.landed,
    names.FAILED: lambda s: s.stats.failed,
    names.OVERDUE: lambda s: s.stats.overdue,
    names.EXPIRED_HITS: lambda s: s.stats.expired_hits,
    names.PIPELINED_LOADS: lambda s: s.stats.pipelined_loads,
    names.STALE_RECEIPTS: lambda s: s.stats.stale_receipts,
    names.DEFERRED_STORES: lambda s: s.stats.shed_stores,
    names.EVICTED: _pools("evicted"),
    names.REFUSED_PINS: _pools("refused_pins"),
    names.LOOKUP_BLOCKS: lambda s: {tier: asked for tier, (asked, _) in s.stats.asked.items()},
    names.FOUND_BLOCKS: lambda s: {tier: found for tier, (_, found) in s.stats.asked.items()},
    names.LOST_BLOCKS: lambda s: s.stats.lost_blocks,
    names.RESTORED_BLOCKS: lambda s: s.stats.restored,
    names.DRIVE_BYTES: _disks("read_bytes", "written_bytes"),
    names.DRIVE_SECONDS: _disks("read_seconds", "write_seconds"),
    names.DRIVE_FAILED: lambda s: {
        (tier, reason): disk.failed.get(reason, 0)
        for tier, disk in s.disks.items()
        for reason in names.DRIVE_ERRORS
    },
    names.DRIVE_RESTARTS: _disks("restarts"),
    names.DRIVES_UNAVAILABLE: _disks("drives_away"),
    names.PENDING_BLOCKS: _disks("pending"),
    names.DURABLE_LAG: _disks("durable_lag"),
    names.RESETS: lambda s: s.stats.resets,
    names.TENANT_LOOKUPS: _tenants("queries"),
    names.TENANT_TOKENS: _tenants("asked_tokens"),
    names.TENANT_HITS: _tenants("hit_tokens"),
    names.TENANT_SLOTS: _tenant_tiers("slots"),
    names.TENANT_EVICTED: _tenant_tiers("evicted"),
    names.SLOTS: _slots,
    names.PINNED_SLOTS: _pools("pinned"),
    names.SLOT_BYTES: lambda s: s.slot_bytes,
    names.LEASES: lambda s: s.stats.leases,
    names.TIER_UNAVAILABLE: lambda s: {
        tier: int(bool(reason)) for tier, reason in s.stats.ailments.items()
    },
    names.PINNED_BYTES: lambda s: s.pinned_bytes,
    names.HELD_BLOCKS: lambda s: s.held_blocks,
    names.IN_FLIGHT: lambda s: s.stats.in_flight,
    names.QUEUED: lambda s: s.stats.queued,
    names.BYTES_IN_FLIGHT: lambda s: s.stats.bytes_in_flight,
    names.MEMORY_CURVE: lambda s: {
        (tier, f"{times:g}"): ratio
        for tier, points in s.stats.memory_curve.items()
        for times, ratio in points.items()
    },
    names.LOAD_RATE: lambda s: s.stats.bandwidth,
    names.TIER_RATE: lambda s: {
        tier: rate for tier, rate in s.stats.tier_bandwidth.items() if rate is not None
    },
    names.PREFILL_RATE: lambda s: s.stats.prefill_rate,
}


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NOT_NUMBERS = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(snapshot: Snapshot) -> bytes:
    """The text that Prometheus scrapes: every metric that has a value, in the catalog's order.

    It is what prometheus_client would write, in a small part of its time: while the text is made,
    the interpreter is not the engine's.
    """
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
    """The id in vLLM's answer, and which of that answer's requests it is.

    A client knows ``cmpl-5f2c``, the engine ``cmpl-5f2c-0-8b2677e5``: the prompt's number and eight
    random digits more::

        cmpl-5f2c-1-8b2677e5                            the second of several prompts
        1_cmpl-5f2c-0-8b2677e5                          the second of several samples
        chatcmpl-5f2c-8b2677e5                          a chat has one prompt, and no number
        chatcmpl-0f1e2d3c4b5a6978_1-8b2677e5            but for a batch of them
        resp_5f2c_1-8b2677e5                            the second turn of one response
        cmpl-5f2c-0f1e2d3c4b5a6978-beam-0-8b2677e5      a beam, of any answer
    """

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

    A client that sends one X-Request-Id twice has two answers of one id: which one it means is not
    known, and the wrong one would be dropped.
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


WhyPath = Callable[[Copy], str]
"""Why a copy took its path, in words; empty where that is not known here."""


class AskedScheduler(Protocol):
    """What of a scheduler can be asked."""

    def stats(self) -> SchedulerStats: ...

    def journal(self, request_id: RequestId) -> Entry | None: ...

    def recent(self) -> tuple[RequestId, ...]: ...


class Source:
    """Asks a scheduler through its mailbox, from any thread. Owns neither."""

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

    # Run on the engine's thread, so they only pick up facts.

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
