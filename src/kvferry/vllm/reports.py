"""What others see of kvferry in vLLM: figures, events for routers, a port of our own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.config import Config
from kvferry.metrics.inbox import Inbox
from kvferry.metrics.reasons import why_path
from kvferry.metrics.samples import Snapshot
from kvferry.metrics.source import Source, installed_version
from kvferry.scheduler import Level, Ordered, Request, Scheduler
from kvferry.tiers.disk.status import DiskFigures, add_up
from kvferry.types import HOST, Rank
from kvferry.vllm.events import EventLog
from kvferry.vllm.figures import between, figures
from kvferry.vllm.messages import RankShape
from kvferry.vllm.outside import EngineBell, VllmTokens

if TYPE_CHECKING:
    from kvferry.metrics.control_door import ControlDoor

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
        levels: Sequence[Level],
        hash_tokens: int,
        tokens: VllmTokens,
    ) -> None:
        self._scheduler = scheduler
        scheduler.watch_requests()
        self._choices = shape.choices
        self._num_sharing = num_ranks if shape.is_shared else 1
        tiers = (HOST, *(level.name for level in shape.levels))
        self._slot_bytes: dict[str, int] = dict.fromkeys(tiers, shape.slot_bytes)
        self._pinned = pinned
        self._disks = disks
        self.events: EventLog | None = None
        if has_listeners:
            self.events = EventLog(scheduler.pool, scheduler.groups, hash_tokens, levels=levels)
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
        from kvferry.metrics.control_door import ControlDoor

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
        from kvferry.metrics.endpoint import Endpoint

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
        for (_, level), told in list(self._disks.items()):
            found.setdefault(level, []).append(told)
        return {level: add_up(parts) for level, parts in found.items()}

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
