"""Every metric by name: what it counts, its labels, and all values a label can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

from kvferry.cache.policies.load_or_compute import OverlapVerdict, Verdict
from kvferry.scheduler.journal import Copy, Reason
from kvferry.telemetry.memory_curve import TIMES
from kvferry.transfer.job import Direction
from kvferry.transfer.planner.choose import PathChoices
from kvferry.types import DEVICE, HOST

PREFIX = "kvferry_"

MISSES = tuple(reason.value for reason in Reason if reason is not Reason.NOTHING_MISSED)
VERDICTS = tuple(verdict.value for verdict in Verdict)
OVERLAPS = tuple(verdict.value for verdict in OverlapVerdict)
IDLE_REASONS = ("refused", "failed")
"""The model or the settings are not served; or kvferry raised an exception."""
MEMORIES = tuple(f"{times:g}" for times in TIMES)
"""How many times its memory a tier might have."""
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

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which its values appear."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


_TIER = Label("tier", _TIERS)
_LOWER_TIER = Label("tier", "the tiers configured below the host")
_OPERATION = Label("operation", "read, write")
_TENANT = Label(
    "tenant",
    "none, those that the setting tenants names, the first 64 others that come, other, before (of "
    "an earlier life)",
)
_ROUTE = (Label("src", _TIERS), Label("dst", _TIERS), Label("path", _PATHS))


def _counter(name: str, help: str, *labels: Label) -> Metric:
    return Metric(f"{PREFIX}{name}_total", MetricKind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: Label) -> Metric:
    return Metric(PREFIX + name, MetricKind.GAUGE, help, labels)


def _histogram(name: str, help: str, *labels: Label) -> Metric:
    return Metric(PREFIX + name, MetricKind.HISTOGRAM, help, labels)


INFO = _gauge("info", "Always 1; the version that serves this.", Label("version", "one"))
IDLE = _gauge(
    "idle",
    "1 while kvferry serves nothing, by reason; where vLLM is the engine. Its log has the words.",
    Label("reason", ", ".join(IDLE_REASONS)),
)
LOOKUPS = _counter("lookups", "Requests looked up.")
LOOKUP_TOKENS = _counter("lookup_tokens", "Tokens that looked-up requests lacked on the device.")
HIT_TOKENS = _counter("hit_tokens", "Tokens loaded from the host instead of computed.")
PROMOTED_TOKENS = _counter("promoted_tokens", "Tokens promoted from lower tiers first.")
FULL_HITS = _counter("full_hits", "Requests for which nothing was missing.")
MISSED = _counter(
    "misses", "Requests that got less than they asked for.", Label("reason", ", ".join(MISSES))
)
DECISIONS = _counter(
    "decisions", "Load-or-compute decisions.", Label("verdict", ", ".join(VERDICTS))
)
OVERLAPPED = _counter(
    "overlaps",
    "Loads by how they went together with the forward pass; where vLLM is the engine.",
    Label("overlap", ", ".join(OVERLAPS)),
)
MOVED_BYTES = _counter("moved_bytes", "Bytes copied, summed over ranks.", *_ROUTE)
MOVED_SECONDS = _counter("moved_seconds", "Seconds of copying, summed over ranks.", *_ROUTE)
TRANSFER_BYTES = _histogram("transfer_bytes", "Bytes of one copy on one rank.", *_ROUTE)
TRANSFER_SECONDS = _histogram("transfer_seconds", "Seconds of one copy on one rank.", *_ROUTE)
COMPLETED = _counter("completed_transfers", "Transfers that every rank has answered for.")
FAILED = _counter("failed_transfers", "Completed transfers that did not bring their bytes.")
OVERDUE = _counter("overdue_transfers", "Transfers whose deadline passed before their answer.")
EXPIRED_HITS = _counter("expired_hits", "Hits let go because they were not loaded in time.")
PIPELINED_LOADS = _counter(
    "pipelined_loads",
    "Loads that began while their last blocks were promoted.",
)
STALE_RECEIPTS = _counter("stale_receipts", "Answers that came twice or too late.")
DEFERRED_STORES = _counter(
    "deferred_stores", "Times that stores waited because too many were in flight."
)
EVICTED = _counter("evicted_blocks", "Blocks dropped to make room.", _TIER)
REFUSED_PINS = _counter(
    "refused_pins", "Blocks that were not pinned because pin_share of the tier already was.", _TIER
)
LOOKUP_BLOCKS = _counter(
    "lookup_blocks", "Blocks that were looked up in a tier that finds them by key.", _LOWER_TIER
)
FOUND_BLOCKS = _counter(
    "found_blocks", "Blocks looked up in such a tier that were there.", _LOWER_TIER
)
LOST_BLOCKS = _counter(
    "lost_blocks", "Blocks that failed alone in copies below the host that brought others."
)
RESTORED_BLOCKS = _gauge(
    "restored_blocks", "Blocks of an earlier life that a tier with places began with.", _LOWER_TIER
)
DRIVE_BYTES = _counter(
    "drive_bytes", "Bytes read from and written to drives.", _LOWER_TIER, _OPERATION
)
DRIVE_SECONDS = _counter(
    "drive_seconds",
    "Seconds spent in calls to drives, summed over their threads.",
    _LOWER_TIER,
    _OPERATION,
)
DRIVE_FAILED = _counter(
    "drive_failed_blocks",
    "Blocks that could not be read or written, by reason.",
    _LOWER_TIER,
    Label("reason", ", ".join(DRIVE_ERRORS)),
)
DRIVE_RESTARTS = _counter(
    "drive_restarts", "Times that the process of a drive had to be started again.", _LOWER_TIER
)
DRIVES_UNAVAILABLE = _gauge(
    "drives_unavailable", "Directories that cannot be used now, on all ranks.", _LOWER_TIER
)
PENDING_BLOCKS = _gauge("pending_blocks", "Blocks written and not yet durable.", _LOWER_TIER)
DURABLE_LAG = _gauge(
    "durable_lag_seconds",
    "Age of the oldest block that is written and not yet durable.",
    _LOWER_TIER,
)
RESETS = _counter("resets", "Times that everything was forgotten.")
TENANT_LOOKUPS = _counter("tenant_lookups", "Requests looked up, by tenant.", _TENANT)
TENANT_TOKENS = _counter(
    "tenant_lookup_tokens", "Tokens that they lacked on the device, by tenant.", _TENANT
)
TENANT_HITS = _counter(
    "tenant_hit_tokens", "Those of them loaded from the host, by tenant.", _TENANT
)
TENANT_SLOTS = _gauge("tenant_slots", "Slots that each tenant has.", _TENANT, _TIER)
TENANT_EVICTED = _counter(
    "tenant_evicted_blocks", "Blocks evicted to make room, by tenant.", _TENANT, _TIER
)
SLOTS = _gauge(
    "slots", "Places for one block, by what they hold.", _TIER, Label("state", ", ".join(STATES))
)
PINNED_SLOTS = _gauge(
    "pinned_slots", "Slots that are not evicted because of a pin, a TTL or a priority.", _TIER
)
SLOT_BYTES = _gauge("slot_bytes", "Bytes of one slot on one rank.", _TIER)
LEASES = _gauge("leases", "Claims on slots while bytes move.", _TIER)
TIER_UNAVAILABLE = _gauge(
    "tier_unavailable",
    "1 while a tier cannot be used on some rank, else 0; /explain has the reason.",
    _LOWER_TIER,
)
PINNED_BYTES = _gauge(
    "pinned_bytes", "Host memory registered with a GPU driver, summed over ranks."
)
HELD_BLOCKS = _gauge(
    "held_blocks", "Device blocks that copies keep from being reused; where vLLM is the engine."
)
IN_FLIGHT = _gauge("transfers_in_flight", "Transfers handed out and not yet answered.")
QUEUED = _gauge("queued_transfers", "Copies ordered and not yet handed out.")
BYTES_IN_FLIGHT = _gauge(
    "bytes_in_flight", "Bytes between device and host, handed out or about to be."
)
MEMORY_CURVE = _gauge(
    "memory_curve_ratio",
    "Share of prompt tokens that this tier and those above it would have, had it this many "
    "times its memory; an estimate, absent while too little is known.",
    _TIER,
    Label("memory", ", ".join(MEMORIES)),
)
LOAD_RATE = _gauge(
    "load_bytes_per_second", "Bandwidth of loads that decisions go by; absent while unknown."
)
TIER_RATE = _gauge(
    "tier_bytes_per_second",
    "What a tier brings up while it has something to, that decisions go by; absent while unknown.",
    _LOWER_TIER,
)
PREFILL_RATE = _gauge(
    "prefill_tokens_per_second", "Prefill rate that decisions go by; absent while unknown."
)


def catalog() -> Iterator[Metric]:
    """All metrics, in the order of this file."""
    return (value for value in globals().values() if isinstance(value, Metric))


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
