"""What operators see of kvferry: figures for the engine's metrics, and kvferry's HTTP endpoint."""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import Any

from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.messages import RankShape, StepReceipts
from kvferry.scheduler.scheduler import Scheduler
from kvferry.settings.kinds import AUTO
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import (
    Metric,
    MetricKind,
    Snapshot,
    catalog,
    idle,
    installed_version,
)
from kvferry.telemetry.source import Mailbox, Source
from kvferry.tiers.disk.protocol import DiskFigures, add_up
from kvferry.types import DEVICE, HOST, Rank

log = logging.getLogger(__name__)

EXPORTED = {metric.name: metric for metric in catalog()}
SEPARATOR = "\x1f"

_STATS_SECONDS = 1.0
_MOST_WORDS = 300

_MORE_PORTS = 16
"""Further ports to try if the metrics port is taken."""

Figures = dict[str, float]
"""Values by metric name and labels joined by ``SEPARATOR``, as sent between processes."""


def figures(snapshot: Snapshot) -> Figures:
    """Return a snapshot as figures."""
    flat: Figures = {}
    for name, metric in EXPORTED.items():  # as ``samples``, without an object for each
        found = metric.read(snapshot)
        if isinstance(found, dict):
            for labels, value in found.items():
                parts = (labels,) if isinstance(labels, str) else labels
                flat[SEPARATOR.join((name, *parts))] = float(value)
        elif found is not None:
            flat[name] = float(found)
    return flat


def idle_figures(reason: str, words: str) -> Figures:
    """Return the figures of an idle kvferry: the catalog's ``reason``, and it in ``words``."""
    flat: Figures = {SEPARATOR.join((names.INFO.name, installed_version())): 1.0}
    why = "".join(c if c.isprintable() else " " for c in words[:_MOST_WORDS])
    flat[SEPARATOR.join((names.IDLE_INFO.name, why))] = 1.0
    for metric, labels, value in idle(reason):
        flat[SEPARATOR.join((metric.name, *labels))] = value
    return flat


def between(before: Figures, now: Figures) -> Figures:
    """Return one interval's figures: differences for counters, the latest value for gauges."""
    return {
        key: value - before.get(key, 0) if adds_up(key) else value for key, value in now.items()
    }


def add(figures: Figures, others: Figures) -> None:
    """Add another interval's ``others`` to ``figures``: counters add up, gauges are replaced."""
    for key, value in others.items():
        figures[key] = figures.get(key, 0) + value if adds_up(key) else value


@lru_cache(maxsize=4096)  # called once a second for every figure
def adds_up(key: str) -> bool:
    """Whether a figure belongs to a counter and not to a gauge."""
    metric = EXPORTED.get(key.split(SEPARATOR, 1)[0])
    return metric is not None and metric.kind is not MetricKind.GAUGE


def log_line(figures: Figures) -> dict[str, int | float]:
    """Return the few figures for the engine's log line."""
    line: dict[str, int | float] = {
        "kvferry_lookups": _sum(figures, names.LOOKUPS),
        "kvferry_lookup_tokens": _sum(figures, names.LOOKUP_TOKENS),
        "kvferry_hit_tokens": _sum(figures, names.HIT_TOKENS),
    }
    for verb, past, *route in (("load", "loaded", HOST, DEVICE), ("store", "stored", DEVICE, HOST)):
        num_bytes = _sum(figures, names.MOVED_BYTES, *route)
        seconds = _sum(figures, names.MOVED_SECONDS, *route)
        line[f"kvferry_{past}_bytes"] = num_bytes
        line[f"kvferry_{verb}_gb_per_s"] = round(num_bytes / seconds / 1e9, 3) if seconds else 0.0
    line["kvferry_failed_transfers"] = _sum(figures, names.FAILED)
    line["kvferry_transfers_in_flight"] = _sum(figures, names.IN_FLIGHT)
    return line


def _sum(figures: Figures, metric: Metric, *labels: str) -> float:
    start = SEPARATOR.join((metric.name, *labels))
    return sum(
        value for key, value in figures.items() if key == start or key.startswith(start + SEPARATOR)
    )


class Reports:
    """Owns the HTTP endpoint, the mailbox of its requests, and the figures reported last."""

    def __init__(
        self,
        setup: SessionSetup,
        scheduler: Scheduler,
        *,
        shape: RankShape,
        hash_tokens: int,
    ) -> None:
        """``shape`` is the first rank's. Each engine on a host has its own metrics port."""
        self._scheduler = scheduler
        self._slot_bytes: dict[str, int] = dict.fromkeys(
            (HOST, *(tier.name for tier in shape.tiers)), shape.slot_bytes
        )
        self._pinned: dict[Rank, int] = {}
        self._disks: dict[tuple[Rank, str], DiskFigures] = {}
        self._reported: Figures = {}
        self.due_at = 0.0
        """Time (``time.monotonic``) of the next report."""
        self.mailbox = Mailbox()
        self.mailbox.before_answers = scheduler.book.drain
        api = self._control_api(setup, hash_tokens)
        self.takes_orders = api is not None
        """Whether control requests are served, which may name requests that have ended."""
        self._endpoint: Any = None
        if setup.config.metrics_port is not None:
            self._serve(setup, api)
        elif api is not None:
            log.warning("kvferry serves no control: it is served on metrics_port, which is none")

    def _control_api(self, setup: SessionSetup, hash_tokens: int) -> Any:
        """Return the control API; None if the settings have no control token."""
        config = setup.config
        if config.control_token is None:
            return None
        from kvferry.telemetry.endpoint import ControlApi

        self.mailbox.wake = setup.find_waker()
        assert setup.keys_of_tokens is not None
        return ControlApi(
            self._scheduler.control,
            self.mailbox,
            config.control_token,
            keys_of_tokens=setup.keys_of_tokens(hash_tokens),
        )

    def _serve(self, setup: SessionSetup, control: Any) -> None:
        from kvferry.telemetry.endpoint import Endpoint

        config = setup.config
        source = Source(
            self._scheduler.onlooker,
            self.mailbox,
            slot_bytes=self._slot_bytes,
            pinned_bytes=self._pinned_bytes,
            disks=self._summed_disks,
        )
        given: Any = DEFAULT_PORT if config.metrics_port is AUTO else config.metrics_port
        port = given + setup.engine_here
        try:
            self._endpoint = Endpoint(
                source,
                host=config.metrics_host,
                port=port,
                last_port=port + _MORE_PORTS,
                control=control,
            )
        except Exception as error:
            log.warning("kvferry serves no metrics of its own: %s", error)
            return
        words = "kvferry serves its metrics at %s"
        if port and self._endpoint.port != port:
            log.warning(f"{words}, because port %d is taken", self._endpoint.url, port)
        else:
            logging.getLogger(setup.log_name).info(words, self._endpoint.url)

    def note(self, report: StepReceipts) -> None:
        """Record the ranks' pinned memory and drive figures."""
        self._pinned |= {rank: num_bytes for rank, _, num_bytes in report.ready}
        for rank, tier, disk in report.disks:
            self._disks[rank, tier] = disk

    @property
    def has_orders(self) -> bool:
        """Whether a control request waits for a step of the engine."""
        return self.mailbox.has_commands or self._scheduler.control.is_busy

    def take_stats(self) -> Figures | None:
        """Return the figures since the last call; None if nothing has changed."""
        counted = figures(
            Snapshot(
                self._scheduler.stats(),
                installed_version(),
                self._slot_bytes,
                self._pinned_bytes(),
                idle="",
                disks=self._summed_disks(),
            )
        )
        before, self._reported = self._reported, counted
        self.due_at = time.monotonic() + _STATS_SECONDS
        return between(before, counted) if counted != before else None

    def _pinned_bytes(self) -> int:
        return sum(list(self._pinned.values()))  # a copy, as the endpoint's thread may call this

    def _summed_disks(self) -> dict[str, DiskFigures]:
        """Return each tier's drive figures, added up over all ranks."""
        found: dict[str, list[DiskFigures]] = {}
        for (_, tier), disk in list(self._disks.items()):
            found.setdefault(tier, []).append(disk)
        return {tier: add_up(parts) for tier, parts in found.items()}

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
