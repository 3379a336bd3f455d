"""All metrics: name, meaning, labels and label values; and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache, partial
from importlib import metadata
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.cache.policies.load_or_compute import Verdict
from kvferry.scheduler.journal import Reason
from kvferry.telemetry.stats import SchedulerStats

if TYPE_CHECKING:
    from kvferry.tiers.disk.protocol import DiskFigures

PREFIX = "kvferry_"

MISSES = tuple(reason.value for reason in Reason if reason is not Reason.NOTHING_MISSED)
VERDICTS = tuple(verdict.value for verdict in Verdict)
IDLE_REASONS = ("refused", "failed")
"""``refused``: the model or the settings are not supported. ``failed``: kvferry raised an error."""
STATES = ("free", "cached", "leased", "unready")
DRIVE_ERRORS = ("absent", "damaged", "drive", "late", "unreachable", "other")
"""Why a block could not be read from disk or written. In order: absent, bytes changed, error of the
drive, deadline passed, engine's memory unreachable, other."""

_TIERS = "device, host and the tiers configured below it"
_PATHS = (
    "dma, kernel, staged; cpu for KV in ordinary memory; tier below the host; shared for a "
    "rank that had no part in a store"
)


class MetricKind(Enum):
    """How a metric behaves over time."""

    COUNTER = "counter"  # only grows; its name ends in _total
    GAUGE = "gauge"  # the current value


@dataclass(frozen=True)
class Label:
    """One label of a metric. It has few values: request ids and keys are never label values."""

    name: str
    values: str


@dataclass(frozen=True)
class Metric:
    """One metric. ``read`` takes its values from a snapshot."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[Label, ...] = ()
    read: Callable[[Snapshot], Values] = lambda s: None


@dataclass(frozen=True)
class Snapshot:
    """State of one process at one moment: the scheduler's counts, host memory and drives.

    A value is None where the process does not know it. ``idle`` is one of ``IDLE_REASONS``, or
    empty while kvferry serves. ``disks`` has the drives' figures by tier, summed over all ranks.
    """

    stats: SchedulerStats
    version: str
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int | None = None
    idle: str | None = None
    disks: Mapping[str, DiskFigures] = field(default_factory=dict)


Values = float | None | dict[Any, float]
"""A metric's value, None while unknown, or a value for each label value or tuple of them."""


_TIER = Label("tier", _TIERS)
_LOWER_TIER = Label("tier", "the tiers configured below the host")
_TENANT = Label(
    "tenant",
    "none, those that the setting tenants names, the first 16 others that come, other, before (of "
    "an earlier process)",
)
_ROUTE = (Label("src", _TIERS), Label("dst", _TIERS), Label("path", _PATHS))
_DRIVE_CALL = (_LOWER_TIER, Label("operation", "read, write"))
_DRIVE_ERROR = Label("reason", ", ".join(DRIVE_ERRORS))
_STATE = Label("state", ", ".join(STATES))
_IDLE = Label("reason", ", ".join(IDLE_REASONS))
_IDLE_WORDS = Label("why", "the words of the log line 'kvferry is idle'; one value in a process")
_MISS = Label("reason", ", ".join(MISSES))
_VERDICT = Label("verdict", ", ".join(VERDICTS))

Read = Callable[[Snapshot], Values]
Labelled = tuple[Read, tuple[Label, ...]]
"""A reader of values by label, and those labels."""


def _of(whose: str, labels: tuple[Label, ...], name: str) -> Labelled:
    """Read one attribute of every entry in one of the snapshot's mappings, such as its pools."""
    every, read = attrgetter(whose), attrgetter(name)
    return lambda s: {key: read(each) for key, each in every(s).items()}, labels


_traffic = partial(_of, "stats.traffic", _ROUTE)
_pools = partial(_of, "stats.pools", (_TIER,))
_disks = partial(_of, "disks", (_LOWER_TIER,))
_tenants = partial(_of, "stats.tenants", (_TENANT,))


def _drive(*names: str) -> Labelled:
    """Read the drives' attributes for reads and for writes, by tier and operation."""
    return lambda s: {
        (tier, operation): getattr(disk, name)
        for tier, disk in s.disks.items()
        for operation, name in zip(("read", "write"), names, strict=True)
    }, _DRIVE_CALL


def _tenant_tiers(name: str) -> Labelled:
    return lambda s: {
        (tenant, tier): count
        for tenant, each in s.stats.tenants.items()
        for tier, count in getattr(each, name).items()
    }, (_TENANT, _TIER)


def _each(labels: tuple[str, ...], counts: Mapping[str, int]) -> Values:
    return {label: counts.get(label, 0) for label in labels}


_READ: dict[str, Read] = {
    "info": lambda s: {s.version: 1},
    "idle": lambda s: None if s.idle is None else {e: float(e == s.idle) for e in IDLE_REASONS},
    "idle_info": lambda s: None,  # only processes without a scheduler have it
    "full_hits": lambda s: s.stats.missed.get(Reason.NOTHING_MISSED.value, 0),
    "misses": lambda s: _each(MISSES, s.stats.missed),
    "decisions": lambda s: _each(VERDICTS, s.stats.verdicts),
    "lookup_blocks": lambda s: {tier: asked for tier, (asked, _) in s.stats.asked.items()},
    "found_blocks": lambda s: {tier: found for tier, (_, found) in s.stats.asked.items()},
    "drive_failed_blocks": lambda s: {
        (tier, why): disk.failed.get(why, 0)
        for tier, disk in s.disks.items()
        for why in DRIVE_ERRORS
    },
    "slots": lambda s: {
        (tier, state): getattr(pool, state)
        for tier, pool in s.stats.pools.items()
        for state in STATES
    },
    "slot_bytes": lambda s: {**s.slot_bytes},
    "tier_unavailable": lambda s: {t: int(bool(why)) for t, why in s.stats.ailments.items()},
    "pinned_bytes": lambda s: s.pinned_bytes,
}
"""Readers of the metrics that are not simply an attribute of the scheduler's stats."""


def _metric(
    kind: MetricKind, name: str, help: str, read: str | Labelled | None = None, *labels: Label
) -> Metric:
    """Make a metric. ``read`` is a reader, or names an attribute of the scheduler's stats."""
    if isinstance(read, tuple):
        values, labels = read
    else:
        values = _READ.get(name) or attrgetter(f"stats.{read or name}")
    full = f"{PREFIX}{name}{'_total' * (kind is MetricKind.COUNTER)}"
    return Metric(full, kind, help, labels, values)


_counter = partial(_metric, MetricKind.COUNTER)
_gauge = partial(_metric, MetricKind.GAUGE)

INFO = _gauge("info", "Always 1; the version that serves this.", None, Label("version", "one"))
IDLE = _gauge("idle", "1 while kvferry is idle, by reason. Only with vLLM.", None, _IDLE)
IDLE_INFO = _gauge(
    "idle_info", "1 while kvferry is idle, with the reason in words.", None, _IDLE_WORDS
)
LOOKUPS = _counter("lookups", "Requests looked up.", "queries")
LOOKUP_TOKENS = _counter(
    "lookup_tokens", "Tokens of looked-up requests not on the device.", "asked_tokens"
)
HIT_TOKENS = _counter("hit_tokens", "Tokens loaded from the host instead of computed.")
TIER_HIT_TOKENS = _counter(
    "tier_hit_tokens", "Tokens found instead of computed, by the tier that had them.", None, _TIER
)
PROMOTED_TOKENS = _counter("promoted_tokens", "Tokens promoted from lower tiers first.")
FULL_HITS = _counter("full_hits", "Requests for which nothing was missing.")
MISSED = _counter("misses", "Requests that missed tokens, by miss reason.", None, _MISS)
DECISIONS = _counter("decisions", "Load-or-compute decisions.", None, _VERDICT)
MOVED_COPIES = _counter("moved_copies", "Copies, summed over ranks.", _traffic("num_copies"))
MOVED_BYTES = _counter("moved_bytes", "Bytes copied, summed over ranks.", _traffic("num_bytes"))
MOVED_SECONDS = _counter(
    "moved_seconds", "Seconds of copying, summed over ranks.", _traffic("seconds")
)
COMPLETED = _counter("completed_transfers", "Transfers with a receipt from every rank.", "landed")
FAILED = _counter("failed_transfers", "Completed transfers that failed.", "failed")
OVERDUE = _counter(
    "overdue_transfers", "Transfers whose deadline passed before they completed.", "overdue"
)
EXPIRED_HITS = _counter("expired_hits", "Hits released because they were not loaded in time.")
UNHEEDED_HINTS = _counter(
    "unheeded_hints", "Requests with hints, or an orchestrator's actions, that were not followed."
)
STALE_RECEIPTS = _counter("stale_receipts", "Receipts that came twice or too late.")
DEFERRED_STORES = _counter(
    "deferred_stores", "Times that stores waited because too many were in flight.", "shed_stores"
)
EVICTED = _counter("evicted_blocks", "Blocks dropped to make room.", _pools("evicted"))
REFUSED_PINS = _counter(
    "refused_pins", "Blocks not pinned: pin_share was reached.", _pools("refused_pins")
)
LOOKUP_BLOCKS = _counter(
    "lookup_blocks", "Blocks looked up in a tier that finds them by key.", None, _LOWER_TIER
)
FOUND_BLOCKS = _counter(
    "found_blocks", "Blocks found in a tier that finds them by key.", None, _LOWER_TIER
)
REFUSED_BLOCKS = _counter(
    "refused_blocks",
    "Blocks that a tier without slots did not take: it was full or refused writes.",
    "refused",
    _LOWER_TIER,
)
LOST_BLOCKS = _counter(
    "lost_blocks", "Blocks that failed in copies below the host that succeeded for others."
)
RESTORED_BLOCKS = _gauge(
    "restored_blocks",
    "Blocks of an earlier process that a tier found at its start.",
    "restored",
    _LOWER_TIER,
)
DRIVE_BYTES = _counter(
    "drive_bytes", "Bytes read from and written to drives.", _drive("read_bytes", "written_bytes")
)
DRIVE_SECONDS = _counter(
    "drive_seconds",
    "Seconds in calls to drives, all threads.",
    _drive("read_seconds", "write_seconds"),
)
DRIVE_FAILED = _counter(
    "drive_failed_blocks", "Failed blocks, by reason.", None, _LOWER_TIER, _DRIVE_ERROR
)
DRIVES_UNAVAILABLE = _gauge(
    "drives_unavailable", "Unavailable directories, all ranks.", _disks("drives_away")
)
PENDING_BLOCKS = _gauge("pending_blocks", "Blocks written and not yet durable.", _disks("pending"))
DURABLE_LAG = _gauge(
    "durable_lag_seconds", "Age of the oldest pending block.", _disks("durable_lag")
)
RESETS = _counter("resets", "Times that the cache was reset.")
TENANT_LOOKUPS = _counter("tenant_lookups", "Requests looked up, by tenant.", _tenants("queries"))
TENANT_TOKENS = _counter(
    "tenant_lookup_tokens", "Tokens not on the device, by tenant.", _tenants("asked_tokens")
)
TENANT_HITS = _counter("tenant_hit_tokens", "Tokens loaded, by tenant.", _tenants("hit_tokens"))
TENANT_SLOTS = _gauge("tenant_slots", "Slots that each tenant has.", _tenant_tiers("slots"))
TENANT_EVICTED = _counter(
    "tenant_evicted_blocks", "Blocks evicted, by tenant.", _tenant_tiers("evicted")
)
SLOTS = _gauge("slots", "Slots by state.", None, _TIER, _STATE)
PINNED_SLOTS = _gauge(
    "pinned_slots", "Slots that a pin, a TTL or a priority holds.", _pools("pinned")
)
SLOT_BYTES = _gauge("slot_bytes", "Bytes of one slot on one rank.", None, _TIER)
LEASES = _gauge("leases", "Claims on slots while bytes move.", None, _TIER)
TIER_UNAVAILABLE = _gauge(
    "tier_unavailable",
    "1 while a tier cannot be used on some rank, else 0; /explain has the reason.",
    None,
    _LOWER_TIER,
)
PINNED_BYTES = _gauge("pinned_bytes", "Host memory registered with a GPU driver, on all ranks.")
IN_FLIGHT = _gauge(
    "transfers_in_flight", "Transfers sent to ranks, not yet completed.", "in_flight"
)
QUEUED = _gauge("queued_transfers", "Copies that wait for the next plan.", "queued")
BYTES_IN_FLIGHT = _gauge("bytes_in_flight", "Bytes between device and host, in flight or queued.")
LOAD_RATE = _gauge(
    "load_bytes_per_second", "Bandwidth of loads that decisions use, if known.", "bandwidth"
)
PREFILL_RATE = _gauge(
    "prefill_tokens_per_second", "Prefill rate that decisions use, if known.", "prefill_rate"
)


_ALL = tuple(value for value in globals().values() if isinstance(value, Metric))


def catalog() -> Iterator[Metric]:
    """Return all metrics, in the order of this file."""
    return iter(_ALL)


class Sample(NamedTuple):
    """One value of a metric. ``labels`` are the label values, in the order of ``metric.labels``."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield every metric's values, in the catalog's order. Known label values start at zero."""
    for metric in _ALL:
        found = metric.read(snapshot)
        if isinstance(found, dict):
            for labels, value in found.items():
                yield Sample(metric, (labels,) if isinstance(labels, str) else labels, value)
        elif found is not None:
            yield Sample(metric, (), found)


def idle(reason: str) -> Iterator[Sample]:
    """Yield the samples of ``IDLE`` for an idle process, which has no scheduler."""
    return (Sample(IDLE, (each,), float(each == reason)) for each in IDLE_REASONS)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(snapshot: Snapshot) -> bytes:
    """Return the text that Prometheus scrapes: every metric that has a value, in catalog order.

    prometheus_client would take many times as long, and meanwhile the engine could not run Python.
    """
    found: dict[str, list[str]] = {}
    for metric, labels, value in samples(snapshot):
        line = f"{metric.name}{_braces(metric.name, labels)} {float(value)!r}\n"
        found.setdefault(metric.name, []).append(line)
    return "".join(
        head + "".join(found[name]) for name, head in _HEADS.items() if name in found
    ).encode()


@lru_cache(maxsize=1024)
def _braces(name: str, labels: tuple[str, ...]) -> str:
    pairs = sorted(zip(_LABELS[name], labels, strict=True))
    texts = [f'{label}="{text.translate(_ESCAPES)}"' for label, text in pairs]
    return f"{{{','.join(texts)}}}" if texts else ""


def _head(metric: Metric) -> str:
    words = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {words}\n# TYPE {metric.name} {metric.kind.value}\n"


_HEADS = {metric.name: _head(metric) for metric in catalog()}
_LABELS = {metric.name: tuple(label.name for label in metric.labels) for metric in catalog()}


@cache
def installed_version() -> str:
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
