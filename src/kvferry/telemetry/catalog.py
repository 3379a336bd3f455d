"""Every metric by name: what it counts, its labels, and all values a label can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache, partial
from importlib import metadata
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.cache.policies.load_or_compute import OverlapVerdict, Verdict
from kvferry.scheduler.journal import Copy, Reason
from kvferry.telemetry.stats import Distribution, SchedulerStats
from kvferry.transfer.job import Direction
from kvferry.transfer.planner.choose import PathChoices
from kvferry.types import DEVICE, HOST

if TYPE_CHECKING:
    from kvferry.tiers.disk.protocol import DiskFigures

PREFIX = "kvferry_"

MISSES = tuple(reason.value for reason in Reason if reason is not Reason.NOTHING_MISSED)
VERDICTS = tuple(verdict.value for verdict in Verdict)
OVERLAPS = tuple(verdict.value for verdict in OverlapVerdict)
IDLE_REASONS = ("refused", "failed")
"""The model or the settings are not served; or kvferry raised an exception."""
STATES = ("free", "cached", "leased", "unready")
DRIVE_ERRORS = ("absent", "damaged", "drive", "late", "unreachable", "other")
"""Why a block on disk could not be read or written: it was not there, its bytes had changed, the
drive reported an error, its time was up, or the engine's memory could not be reached."""

_TIERS = "device, host and the tiers configured below it"
_PATHS = (
    "loop, dma, kernel, staged; cpu for KV in ordinary memory; tier below the host; shared for a "
    "rank that had no part in a store"
)


class MetricKind(Enum):
    """How a metric behaves over time."""

    COUNTER = "counter"  # only grows; its name ends in _total
    GAUGE = "gauge"  # as of now
    HISTOGRAM = "histogram"  # counts of values up to fixed bounds, and their sum


@dataclass(frozen=True)
class Label:
    """One label. Its values are few: no request or key ever becomes one."""

    name: str
    values: str


@dataclass(frozen=True)
class Metric:
    """One name on the endpoint."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[Label, ...] = ()
    read: Callable[[Snapshot], Values] = lambda s: None

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which its values appear."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


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


_TIER = Label("tier", _TIERS)
_LOWER_TIER = Label("tier", "the tiers configured below the host")
_OPERATION = Label("operation", "read, write")
_TENANT = Label(
    "tenant",
    "none, those that the setting tenants names, the first 64 others that come, other, before (of "
    "an earlier life)",
)
_ROUTE = (Label("src", _TIERS), Label("dst", _TIERS), Label("path", _PATHS))


def _each(labels: tuple[str, ...], counts: Mapping[str, int]) -> Values:
    return {label: counts.get(label, 0) for label in labels}


def _traffic(name: str) -> Callable[[Snapshot], Values]:
    read = attrgetter(name)
    return lambda s: {route: read(traffic) for route, traffic in s.stats.traffic.items()}


def _pools(name: str) -> Callable[[Snapshot], Values]:
    """One of a pool's counts, for the host and every tier with places."""
    return lambda s: {
        tier: getattr(pool, name) for tier, pool in ((HOST, s.stats.pool), *s.stats.tiers.items())
    }


def _slots(s: Snapshot) -> Values:
    pools = ((HOST, s.stats.pool), *s.stats.tiers.items())
    return {(tier, state): getattr(pool, state) for tier, pool in pools for state in STATES}


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


def _metric(
    kind: MetricKind, name: str, help: str, read: str | Callable[[Snapshot], Values], *labels: Label
) -> Metric:
    """``read`` takes the value from a snapshot, or names the scheduler's figure that it is."""
    read = attrgetter(f"stats.{read}") if isinstance(read, str) else read
    full = f"{PREFIX}{name}{'_total' * (kind is MetricKind.COUNTER)}"
    return Metric(full, kind, help, labels, read)


_counter = partial(_metric, MetricKind.COUNTER)
_gauge = partial(_metric, MetricKind.GAUGE)
_histogram = partial(_metric, MetricKind.HISTOGRAM)

INFO = _gauge(
    "info",
    "Always 1; the version that serves this.",
    lambda s: {s.version: 1},
    Label("version", "one"),
)
IDLE = _gauge(
    "idle",
    "1 while kvferry serves nothing, by reason; where vLLM is the engine. Its log has the words.",
    lambda s: None if s.idle is None else {each: float(each == s.idle) for each in IDLE_REASONS},
    Label("reason", ", ".join(IDLE_REASONS)),
)
IDLE_INFO = _gauge(
    "idle_info",
    "1 while kvferry serves nothing; the label has the reason in words.",
    lambda s: None,
    Label("why", "the words of the log line 'kvferry is idle'; one value in a process's life"),
)
LOOKUPS = _counter("lookups", "Requests looked up.", "queries")
LOOKUP_TOKENS = _counter(
    "lookup_tokens", "Tokens that looked-up requests lacked on the device.", "asked_tokens"
)
HIT_TOKENS = _counter(
    "hit_tokens", "Tokens loaded from the host instead of computed.", "hit_tokens"
)
TIER_HIT_TOKENS = _counter(
    "tier_hit_tokens",
    "Tokens found instead of computed, by the tier that had them when they were asked for.",
    "tier_hit_tokens",
    _TIER,
)
PROMOTED_TOKENS = _counter(
    "promoted_tokens", "Tokens promoted from lower tiers first.", "promoted_tokens"
)
FULL_HITS = _counter(
    "full_hits",
    "Requests for which nothing was missing.",
    lambda s: s.stats.missed.get(Reason.NOTHING_MISSED.value, 0),
)
MISSED = _counter(
    "misses",
    "Requests that got less than they asked for.",
    lambda s: _each(MISSES, s.stats.missed),
    Label("reason", ", ".join(MISSES)),
)
DECISIONS = _counter(
    "decisions",
    "Load-or-compute decisions.",
    lambda s: _each(VERDICTS, s.stats.verdicts),
    Label("verdict", ", ".join(VERDICTS)),
)
OVERLAPPED = _counter(
    "overlaps",
    "Loads by how they went together with the forward pass; where vLLM is the engine.",
    lambda s: _each(OVERLAPS, s.stats.overlaps),
    Label("overlap", ", ".join(OVERLAPS)),
)
MOVED_BYTES = _counter(
    "moved_bytes", "Bytes copied, summed over ranks.", _traffic("sizes.total"), *_ROUTE
)
MOVED_SECONDS = _counter(
    "moved_seconds", "Seconds of copying, summed over ranks.", _traffic("seconds.total"), *_ROUTE
)
TRANSFER_BYTES = _histogram(
    "transfer_bytes", "Bytes of one copy on one rank.", _traffic("sizes"), *_ROUTE
)
TRANSFER_SECONDS = _histogram(
    "transfer_seconds", "Seconds of one copy on one rank.", _traffic("seconds"), *_ROUTE
)
COMPLETED = _counter("completed_transfers", "Transfers that every rank has answered for.", "landed")
FAILED = _counter(
    "failed_transfers", "Completed transfers that did not bring their bytes.", "failed"
)
OVERDUE = _counter(
    "overdue_transfers", "Transfers whose deadline passed before their answer.", "overdue"
)
EXPIRED_HITS = _counter(
    "expired_hits", "Hits let go because they were not loaded in time.", "expired_hits"
)
PIPELINED_LOADS = _counter(
    "pipelined_loads", "Loads that began while their last blocks were promoted.", "pipelined_loads"
)
STALE_RECEIPTS = _counter(
    "stale_receipts", "Answers that came twice or too late.", "stale_receipts"
)
DEFERRED_STORES = _counter(
    "deferred_stores", "Times that stores waited because too many were in flight.", "shed_stores"
)
EVICTED = _counter("evicted_blocks", "Blocks dropped to make room.", _pools("evicted"), _TIER)
REFUSED_PINS = _counter(
    "refused_pins",
    "Blocks that were not pinned because pin_share of the tier already was.",
    _pools("refused_pins"),
    _TIER,
)
LOOKUP_BLOCKS = _counter(
    "lookup_blocks",
    "Blocks that were looked up in a tier that finds them by key.",
    lambda s: {tier: asked for tier, (asked, _) in s.stats.asked.items()},
    _LOWER_TIER,
)
FOUND_BLOCKS = _counter(
    "found_blocks",
    "Blocks looked up in such a tier that were there.",
    lambda s: {tier: found for tier, (_, found) in s.stats.asked.items()},
    _LOWER_TIER,
)
LOST_BLOCKS = _counter(
    "lost_blocks",
    "Blocks that failed alone in copies below the host that brought others.",
    "lost_blocks",
)
RESTORED_BLOCKS = _gauge(
    "restored_blocks",
    "Blocks of an earlier life that a tier with places began with.",
    "restored",
    _LOWER_TIER,
)
DRIVE_BYTES = _counter(
    "drive_bytes",
    "Bytes read from and written to drives.",
    _disks("read_bytes", "written_bytes"),
    _LOWER_TIER,
    _OPERATION,
)
DRIVE_SECONDS = _counter(
    "drive_seconds",
    "Seconds spent in calls to drives, summed over their threads.",
    _disks("read_seconds", "write_seconds"),
    _LOWER_TIER,
    _OPERATION,
)
DRIVE_FAILED = _counter(
    "drive_failed_blocks",
    "Blocks that could not be read or written, by reason.",
    lambda s: {
        (tier, reason): disk.failed.get(reason, 0)
        for tier, disk in s.disks.items()
        for reason in DRIVE_ERRORS
    },
    _LOWER_TIER,
    Label("reason", ", ".join(DRIVE_ERRORS)),
)
DRIVE_RESTARTS = _counter(
    "drive_restarts",
    "Times that the process of a drive had to be started again.",
    _disks("restarts"),
    _LOWER_TIER,
)
DRIVES_UNAVAILABLE = _gauge(
    "drives_unavailable",
    "Directories that cannot be used now, on all ranks.",
    _disks("drives_away"),
    _LOWER_TIER,
)
PENDING_BLOCKS = _gauge(
    "pending_blocks", "Blocks written and not yet durable.", _disks("pending"), _LOWER_TIER
)
DURABLE_LAG = _gauge(
    "durable_lag_seconds",
    "Age of the oldest block that is written and not yet durable.",
    _disks("durable_lag"),
    _LOWER_TIER,
)
RESETS = _counter("resets", "Times that everything was forgotten.", "resets")
TENANT_LOOKUPS = _counter(
    "tenant_lookups", "Requests looked up, by tenant.", _tenants("queries"), _TENANT
)
TENANT_TOKENS = _counter(
    "tenant_lookup_tokens",
    "Tokens that they lacked on the device, by tenant.",
    _tenants("asked_tokens"),
    _TENANT,
)
TENANT_HITS = _counter(
    "tenant_hit_tokens",
    "Those of them loaded from the host, by tenant.",
    _tenants("hit_tokens"),
    _TENANT,
)
TENANT_SLOTS = _gauge(
    "tenant_slots", "Slots that each tenant has.", _tenant_tiers("slots"), _TENANT, _TIER
)
TENANT_EVICTED = _counter(
    "tenant_evicted_blocks",
    "Blocks evicted to make room, by tenant.",
    _tenant_tiers("evicted"),
    _TENANT,
    _TIER,
)
SLOTS = _gauge(
    "slots",
    "Places for one block, by what they hold.",
    _slots,
    _TIER,
    Label("state", ", ".join(STATES)),
)
PINNED_SLOTS = _gauge(
    "pinned_slots",
    "Slots that are not evicted because of a pin, a TTL or a priority.",
    _pools("pinned"),
    _TIER,
)
SLOT_BYTES = _gauge("slot_bytes", "Bytes of one slot on one rank.", lambda s: s.slot_bytes, _TIER)
LEASES = _gauge("leases", "Claims on slots while bytes move.", "leases", _TIER)
TIER_UNAVAILABLE = _gauge(
    "tier_unavailable",
    "1 while a tier cannot be used on some rank, else 0; /explain has the reason.",
    lambda s: {tier: int(bool(reason)) for tier, reason in s.stats.ailments.items()},
    _LOWER_TIER,
)
PINNED_BYTES = _gauge(
    "pinned_bytes",
    "Host memory registered with a GPU driver, summed over ranks.",
    lambda s: s.pinned_bytes,
)
HELD_BLOCKS = _gauge(
    "held_blocks",
    "Device blocks that copies keep from being reused; where vLLM is the engine.",
    lambda s: s.held_blocks,
)
IN_FLIGHT = _gauge("transfers_in_flight", "Transfers handed out and not yet answered.", "in_flight")
QUEUED = _gauge("queued_transfers", "Copies ordered and not yet handed out.", "queued")
BYTES_IN_FLIGHT = _gauge(
    "bytes_in_flight",
    "Bytes between device and host, handed out or about to be.",
    "bytes_in_flight",
)
LOAD_RATE = _gauge(
    "load_bytes_per_second",
    "Bandwidth of loads that decisions go by; absent while unknown.",
    "bandwidth",
)
TIER_RATE = _gauge(
    "tier_bytes_per_second",
    "What a tier brings up while it has something to, that decisions go by; absent while unknown.",
    lambda s: {tier: rate for tier, rate in s.stats.tier_bandwidth.items() if rate is not None},
    _LOWER_TIER,
)
PREFILL_RATE = _gauge(
    "prefill_tokens_per_second",
    "Prefill rate that decisions go by; absent while unknown.",
    "prefill_rate",
)


def catalog() -> Iterator[Metric]:
    """All metrics, in the order of this file."""
    return (value for value in globals().values() if isinstance(value, Metric))


class Sample(NamedTuple):
    """One value of one metric; ``labels`` are in the order the metric has them."""

    metric: Metric
    labels: tuple[str, ...]
    value: Value


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Every metric's values, in the catalog's order; known labels begin at zero."""
    for metric in catalog():
        found = metric.read(snapshot)
        if isinstance(found, Mapping):
            for labels, value in found.items():
                yield Sample(metric, (labels,) if isinstance(labels, str) else labels, value)
        elif found is not None:
            yield Sample(metric, (), found)


def idle(reason: str) -> Iterator[Sample]:
    """Whether nothing is served, and why, where there is no scheduler to count anything."""
    return (Sample(IDLE, (each,), float(each == reason)) for each in IDLE_REASONS)


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


class FerryCollector:
    """The metrics for any registry of prometheus_client, by a snapshot for each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Any]:
        """The families without values, so that registering takes no snapshot."""
        return _families("".join(_HEADS.values()))

    def collect(self) -> Iterator[Any]:
        return _families(exposition(self._snapshot()).decode())


def _families(text: str) -> Iterator[Any]:
    from prometheus_client.parser import text_string_to_metric_families  # may not be installed

    return iter(text_string_to_metric_families(text))


@cache
def installed_version() -> str:
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


_ONLY = {
    "cpu": "cpu: for KV tensors in ordinary memory there is no other path.",
    "tier": "tier: between host memory and the tiers below it there is no other path.",
}


def why_path(copy: Copy, choices: PathChoices | None, *, num_sharing: int = 1) -> str:
    """In words; empty where it cannot be said.

    ``choices`` are the rank's, None where it has none to make. ``num_sharing`` ranks have one host
    memory: each stores its part of a transfer, and chose the path for that part.
    """
    for path in copy.paths:
        if path in _ONLY:
            return _ONLY[path]
        if choices is not None and path in choices.paths and {copy.src, copy.dst} == {DEVICE, HOST}:
            return _chosen(copy, path, choices, num_sharing)
    return ""


def _chosen(copy: Copy, path: str, choices: PathChoices, num_sharing: int) -> str:
    why = partial(choices.why, busy=copy.beside_model, num_runs=copy.num_runs)
    if copy.dst == DEVICE:
        return why(Direction.LOAD, copy.group, copy.num_blocks, path)
    least, rest = divmod(copy.num_blocks, num_sharing)
    parts = sorted({least + (rest > 0), least} - {0}, reverse=True)
    told = (why(Direction.STORE, copy.group, part, path) for part in parts)
    return next(filter(None, told), "")
