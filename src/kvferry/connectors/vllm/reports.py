"""What others see of kvferry in vLLM: figures, events for routers, a port of our own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvferry.config import Config
from kvferry.connectors.vllm.control import EngineBell, VllmTokens
from kvferry.connectors.vllm.events import BlockEvents
from kvferry.connectors.vllm.messages import RankShape
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Metric, MetricKind, catalog, why_path
from kvferry.telemetry.mailbox import Inbox
from kvferry.telemetry.source import Snapshot, Source, idle, installed_version, samples
from kvferry.telemetry.stats import SIZE_BOUNDS, TIME_BOUNDS, Distribution
from kvferry.tiers.disk.figures import DiskFigures, add_up
from kvferry.types import DEVICE, HOST, Rank

if TYPE_CHECKING:
    from kvferry.telemetry.endpoint import ControlDoor


EXPORTED = {metric.name: metric for metric in catalog()}
BOUNDS = {names.TRANSFER_BYTES.name: SIZE_BOUNDS, names.TRANSFER_SECONDS.name: TIME_BOUNDS}
SEPARATOR = "\x1f"

_SUM = "sum"

Figures = dict[str, float]


def figures(snapshot: Snapshot) -> Figures:
    """A snapshot as flat numbers."""
    flat: Figures = {}
    for metric, labels, value in samples(snapshot):
        key = SEPARATOR.join((metric.name, *labels))
        if isinstance(value, Distribution):
            flat |= {f"{key}{SEPARATOR}{i}": float(n) for i, n in enumerate(value.counts) if n}
            flat[f"{key}{SEPARATOR}{_SUM}"] = value.total
        else:
            flat[key] = float(value)
    return flat


def idle_figures(why: str) -> Figures:
    """All that is to be said of a kvferry that serves nothing."""
    told: Figures = {SEPARATOR.join((names.INFO.name, installed_version())): 1.0}
    for metric, labels, value in idle(why):
        assert not isinstance(value, Distribution)
        told[SEPARATOR.join((metric.name, *labels))] = value
    return told


def between(before: Figures, now: Figures) -> Figures:
    """One interval: differences for counters, the latest value for gauges."""
    return {
        key: value - before.get(key, 0) if adds_up(key) else value for key, value in now.items()
    }


def add(figures: Figures, others: Figures) -> None:
    """Put another interval's into these."""
    for key, value in others.items():
        figures[key] = figures.get(key, 0) + value if adds_up(key) else value


def log_line(figures: Figures) -> dict[str, int | float]:
    """The few figures worth a line in a log."""
    loaded, load_seconds = _moved(figures, HOST, DEVICE)
    stored, store_seconds = _moved(figures, DEVICE, HOST)
    return {
        "kvferry_queries": _sum(figures, names.QUERIES),
        "kvferry_asked_tokens": _sum(figures, names.ASKED_TOKENS),
        "kvferry_hit_tokens": _sum(figures, names.HIT_TOKENS),
        "kvferry_loaded_bytes": loaded,
        "kvferry_load_gb_per_s": _rate(loaded, load_seconds),
        "kvferry_stored_bytes": stored,
        "kvferry_store_gb_per_s": _rate(stored, store_seconds),
        "kvferry_failed_transfers": _sum(figures, names.FAILED),
        "kvferry_transfers_in_flight": _sum(figures, names.IN_FLIGHT),
    }


@lru_cache(maxsize=4096)  # once a second for every figure there is
def adds_up(key: str) -> bool:
    """Whether a figure counts on, rather than saying how something is."""
    metric = EXPORTED.get(key.split(SEPARATOR, 1)[0])
    return metric is not None and metric.kind is not MetricKind.GAUGE


def values_of(bounds: Sequence[float], parts: Mapping[str, float]) -> list[tuple[float, int]]:
    """Values, and how often, that fill a histogram's buckets as counted and have the counted sum.

    A metric in vLLM takes one value at a time, and only how many fell into each bucket is known.
    The real sum is between that of all lower bounds and that of all upper ones: so is ours, with
    every value at the same point of its bucket.
    """
    counts = {int(i): round(n) for i, n in parts.items() if i != _SUM and n > 0}
    total = parts.get(_SUM, 0.0)
    edges = (0.0, *bounds)
    low = sum(n * edges[i] for i, n in counts.items())
    width = sum(n * (edges[i + 1] - edges[i]) for i, n in counts.items() if i < len(bounds))
    above = counts.get(len(bounds), 0)
    share = min(1.0, max(0.0, (total - low) / width)) if width else 0.0
    rest = max(0.0, total - low - share * width)
    found = []
    for i, n in counts.items():
        if i == len(bounds):
            value = edges[i] + rest / above
        else:
            value = min(edges[i] + share * (edges[i + 1] - edges[i]), edges[i + 1])
        # A bucket begins right after its lower bound: on it, a value would count one too low.
        found.append((max(value, math.nextafter(edges[i], math.inf)), n))
    return found


def _sum(figures: Figures, metric: Metric, *labels: str) -> float:
    start = SEPARATOR.join((metric.name, *labels))
    return sum(
        value for key, value in figures.items() if key == start or key.startswith(start + SEPARATOR)
    )


def _moved(figures: Figures, src: str, dst: str) -> tuple[float, float]:
    return _sum(figures, names.MOVED_BYTES, src, dst), _sum(figures, names.MOVED_SECONDS, src, dst)


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0


# ------------------------------------------------------------------------------------------------
# What others see of kvferry in vLLM: figures, events for routers, a port of our own.

log = logging.getLogger("vllm.kvferry")

_STATS_SECONDS = 1.0


class Reports:
    """Tells, and lets orders in. Owns the endpoint and what was told so far.

    ``pinned`` and ``disks`` are the scheduler side's own: what each rank last said. ``engine_here``
    counts the engines of a data-parallel server on this host: each has a port of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: Config,
        *,
        shape: RankShape,
        num_ranks: int,
        pinned: Mapping[Rank, int],
        disks: Mapping[tuple[Rank, str], DiskFigures],
        engine_here: int,
        has_listeners: bool,
        tiers: Sequence[LowerTier],
        hash_tokens: int,
        tokens: VllmTokens,
    ) -> None:
        self._scheduler = scheduler
        scheduler.watch_requests()
        self._choices = shape.choices
        self._num_sharing = num_ranks if shape.is_shared else 1
        rank_tiers = (HOST, *(tier.name for tier in shape.tiers))
        self._slot_bytes: dict[str, int] = dict.fromkeys(rank_tiers, shape.slot_bytes)
        self._pinned = pinned
        self._disks = disks
        self.events: BlockEvents | None = None
        if has_listeners:
            self.events = BlockEvents(scheduler.pool, scheduler.groups, hash_tokens, tiers=tiers)
        self._told: dict[str, float] = {}
        self._told_at = 0.0
        self.inbox = Inbox()
        """What the endpoint was asked and ordered: seen to once a step."""
        self.bell = EngineBell()
        self._endpoint: Any = None
        self._door = self._control_door(config, tokens)
        if config.metrics_port is not None:
            self._serve(config.metrics_host, config.metrics_port + engine_here)
        elif self._door is not None:
            log.warning("kvferry takes no orders: control is served on metrics_port; give one")

    @property
    def is_ordered(self) -> bool:
        """Whether somebody outside waits for a step."""
        return self.inbox.has_orders or self._scheduler.control.is_busy

    def finished(self, request: Request) -> None:
        """A request ends that orders may name later."""
        if self._door is not None:
            self._scheduler.control.remember(request.id, request.chain.keys())

    def _control_door(self, config: Config, tokens: VllmTokens) -> ControlDoor | None:
        """Who carries out orders, where the settings let anybody give them."""
        if config.control == "off" or config.control_token is None:
            return None
        from kvferry.telemetry.endpoint import ControlDoor

        self.inbox.wake = self.bell
        self.bell.find()
        return ControlDoor(
            self._scheduler.control,
            self.inbox,
            config.control_token,
            keys_of_tokens=tokens,
            local_only=config.control == "local",
        )

    def _serve(self, host: str, port: int) -> None:
        """Metrics, and why a request missed."""
        from kvferry.telemetry.endpoint import Endpoint

        source = Source(
            self._scheduler.onlooker,
            self.inbox,
            slot_bytes=self._slot_bytes,
            pinned_bytes=self._pinned_bytes,
            why_path=lambda copy: why_path(copy, self._choices, num_sharing=self._num_sharing),
            disks=self._summed_disks,
        )
        try:
            self._endpoint = Endpoint(source, host=host, port=port, door=self._door)
        except Exception as error:
            log.warning("kvferry serves no metrics of its own: %s", error)

    def ordered(self, ordered: Iterable[Ordered]) -> None:
        """Have routers told of these blocks once they can be matched."""
        if self.events is not None:
            for part in ordered:
                self.events.ordered(part)

    def take_events(self) -> Iterable[Any]:
        return self.events.take() if self.events is not None else ()

    @property
    def is_due(self) -> bool:
        """Whether it is time to tell again."""
        return time.monotonic() >= self._told_at + _STATS_SECONDS

    def take_stats(self, *, num_held: int) -> dict[str, float] | None:
        """What was counted since the last call; None if that is nothing."""
        counted = figures(
            Snapshot(
                self._scheduler.stats(),
                installed_version(),
                self._slot_bytes,
                self._pinned_bytes(),
                num_held,
                idle="",
                disks=self._summed_disks(),
            )
        )
        before, self._told, self._told_at = self._told, counted, time.monotonic()
        return between(before, counted) if counted != before else None

    def _pinned_bytes(self) -> int:
        return sum(list(self._pinned.values()))  # a copy: an endpoint's thread may ask

    def _summed_disks(self) -> dict[str, DiskFigures]:
        """Of all ranks."""
        found: dict[str, list[DiskFigures]] = {}
        for (_, tier), told in list(self._disks.items()):
            found.setdefault(tier, []).append(told)
        return {tier: add_up(parts) for tier, parts in found.items()}

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
