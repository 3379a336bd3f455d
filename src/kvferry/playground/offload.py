"""The only place where the serving loop meets kvferry."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.closing import Closing
from kvferry.config import Config
from kvferry.contents import Contents, tier_setup
from kvferry.device.engine.base import CopyEngine
from kvferry.device.engine.cpu import CpuEngine
from kvferry.device.layout import describe
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.keys import KeyChain, Keys
from kvferry.metrics.inbox import Inbox
from kvferry.metrics.source import Source
from kvferry.playground.runner import Runner
from kvferry.policy import policy_named
from kvferry.pool import Pool
from kvferry.scheduler import Ordered, Request, Scheduler, Settled, WriteMode, level_of
from kvferry.stats import SchedulerStats
from kvferry.tiers import HostTier, Mover, Tier, TierMover, open_levels
from kvferry.types import DEVICE, HOST, RequestId
from kvferry.worker import Route, Worker

if TYPE_CHECKING:
    from kvferry.tiers.disk.status import DiskFigures


class Offloader(Closing):
    """kvferry as the engine sees it: a scheduler half and a worker half, in one process.

    Owns both halves, the copy engine and the host memory. The engine holds every device block
    that ``load`` and ``store`` return until ``settle`` releases it.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        host_bytes: int,
        config: Config | None = None,
        lower: Mapping[Tier, WriteMode] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Below the host lie the levels that ``config`` names, or else the tiers in ``lower``.

        Nearest first; they are ours to close. ``clock`` is what host memory's policy goes by.
        """
        config = config if config is not None else Config()
        lower = lower or {}
        layouts = [describe(tensors, block_axis=0) for tensors in runner.group_tensors()]
        slot_bytes = max(layout.block_bytes for layout in layouts)
        if host_bytes < slot_bytes:
            raise InputError(
                f"a block has {slot_bytes} bytes, host memory of {host_bytes} bytes holds none"
            )
        for tier in lower:
            if tier.block_bytes != slot_bytes:
                raise InputError(
                    f"a block has {slot_bytes} bytes, one of tier {tier.name} {tier.block_bytes}"
                )
        self.host = HostTier(host_bytes // slot_bytes, slot_bytes)
        below = {tier.name: TierMover(self.host, tier) for tier in lower}
        writes = {tier.name: write for tier, write in lower.items()}
        if config.all_levels:
            contents = Contents(runner.namespace)
            below = open_levels(config.all_levels, self.host, tier_setup(config, layouts, contents))
            writes = dict.fromkeys(below, WriteMode(config.level_write))
        level_policy = policy_named(config.level_policy)
        self.scheduler = Scheduler(
            Pool(self.host.num_slots, policy_named(config.policy), clock=clock),
            runner.groups,
            config=config,
            num_device_blocks=runner.num_blocks,
            block_bytes=[layout.block_bytes for layout in layouts],
            levels=[
                level_of(
                    name,
                    each.num_places,
                    writes[name],
                    level_policy,
                    recovered=[each.recovered()],
                    most_in_one=each.most_in_one,
                )
                for name, each in below.items()
            ],
        )
        self.scheduler.watch_requests()
        self.inbox = Inbox()
        # Threads start here, so it comes last: nothing after it can fail and leave them behind.
        copies: CopyEngine = CpuEngine(layouts, self.host.rows, compute=runner.compute)
        movers: dict[Route, Mover] = {(DEVICE, HOST): copies, (HOST, DEVICE): copies}
        self.worker = Worker(movers, levels=below)
        self._levels = below

    @property
    def has_pending(self) -> bool:
        """Whether transfers are under way or about to start."""
        scheduler = self.scheduler
        return scheduler.num_in_flight + scheduler.num_queued > 0 or scheduler.control.is_busy

    def open(self, request_id: RequestId, chain: KeyChain, hints: Hints | None = None) -> Request:
        """A request has come: what it matches, loads and stores it says itself."""
        return self.scheduler.open(request_id, chain, hints)

    @property
    def offer_depth(self) -> int:
        """How many of the blocks next to be dropped should be offered; 0 unless stores are lazy."""
        return self.scheduler.offer_depth

    def offer(self, group: int, keys: Keys, blocks: Sequence[int]) -> Sequence[Ordered]:
        """Keep what is new of these free blocks, the next to be dropped first."""
        return self.scheduler.offer(group, keys, blocks)

    def note_step(
        self, *, num_allocated: int, num_prefill_tokens: int, prefill_seconds: float
    ) -> None:
        """What the engine did in a step: kvferry learns from it when to store and when to load."""
        self.scheduler.note_allocated(num_allocated)
        if num_prefill_tokens:
            self.scheduler.note_prefill(num_prefill_tokens, prefill_seconds)

    def dispatch(self) -> None:
        """Start everything asked for since the last call."""
        plan = self.scheduler.plan()
        if plan:
            self.worker.execute(plan)

    def settle(self) -> Settled:
        """Learn what ended since the last call, and answer who asks from other threads."""
        self.inbox.answer()
        for change in self.worker.health():
            self.scheduler.note_health(change)
        return self.scheduler.settle(self.worker.poll())

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def source(self) -> Source:
        """What a metrics endpoint can ask."""
        slot_bytes: dict[str, int] = dict.fromkeys((HOST, *self._levels), self.host.slot_bytes)
        return Source(self.scheduler.onlooker, self.inbox, slot_bytes=slot_bytes, disks=self._disks)

    def _disks(self) -> dict[str, DiskFigures]:
        found = {name: level.figures() for name, level in self._levels.items()}
        return {name: figures for name, figures in found.items() if figures is not None}

    def close(self) -> None:
        """Finish what moves, then end both halves. Safe to call twice."""
        self.worker.close()
        self.scheduler.close()
        self.host.close()
