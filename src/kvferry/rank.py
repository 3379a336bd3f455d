"""One rank's host memory, copy engine and lower tiers: opened together, closed in order.

::

    open:      driver, host memory (first slots ready, growing), lower tiers, copy engine
    close:     lower tiers, copy engine, registrations, mapping, driver

The library (:func:`kvferry.attach`) and a server's workers open a rank the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvferry.config import Config
from kvferry.core.identity import Namespace, store_fingerprint
from kvferry.errors import ConfigError
from kvferry.hostmem.memory import HostMemory
from kvferry.hostmem.slots import SharedMemory, SlotLayout
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.movers import TierMover, open_tiers
from kvferry.transfer.driver import Driver
from kvferry.transfer.engine.cpu import CpuEngine, Stream
from kvferry.transfer.job import CopyEngine
from kvferry.transfer.layout import GroupLayout
from kvferry.types import FIRST_RANK, HOST, Plan, Rank, TierName

if TYPE_CHECKING:
    from kvferry.tiers.disk.protocol import DiskFigures


@dataclass(frozen=True)
class Contents:
    """The identity of a rank's blocks: all that decides their bytes besides the memory layout.

    ``weights`` are digests of the model's weights, or other numbers that change with them. A server
    may have several engines, each with its own blocks: ``engine`` is the number of this one. This
    host has ``engines_here`` of them, from number ``first_engine`` on.
    """

    namespace: Namespace
    weights: tuple[int, ...] = ()
    engine: int = 0
    engines_here: int = 1
    first_engine: int = 0


def tier_setup(
    config: Config,
    layouts: Sequence[GroupLayout],
    contents: Contents | None,
    rank: Rank = FIRST_RANK,
    num_ranks: int = 1,
    num_ranks_here: int | None = None,
) -> TierSetup:
    """Return the setup that a rank's tiers have in common, without a tier's name and options."""
    slot_bytes, here = _slot_bytes(layouts), num_ranks_here or num_ranks
    setup = TierSetup(TierName(""), slot_bytes, rank, num_ranks, num_ranks_here=here, config=config)
    if contents is None:
        for setting, where in (("disk", config.disk), ("remote", config.remote)):
            if where:
                raise ConfigError(
                    f"{setting}: blocks there outlive this process, so say what they are: open the "
                    "rank with contents=Contents(namespace)"
                )
        return setup
    formats = [layout.format for layout in layouts]
    space, engine, first = contents.namespace, contents.engine, contents.first_engine
    count = contents.engines_here
    engines = range(first, first + count) if count > 1 else ()

    def fingerprint(server: int | tuple[int, int]) -> bytes:
        return store_fingerprint(space, server, formats, slot_bytes, rank, contents.weights)

    return replace(
        setup,
        num_ranks_here=here * count,
        namespace=fingerprint((num_ranks, engine)),
        shared_namespace=fingerprint(num_ranks),
        family=store_fingerprint(space, (num_ranks, engine)),
        families=tuple(store_fingerprint(space, (num_ranks, each)) for each in engines),
        label=space.model,
    )


log = logging.getLogger(__name__)

_STEP_SECONDS = 0.25
"""Seconds for which the model counts as busy after a step began."""


class Activity:
    """Whether the model is busy. The engine notes its steps; growth of host memory asks.

    The driver cannot be asked instead: not from another thread while a graph is captured. An engine
    that ``is_starting`` warms up and captures graphs without noting it. So it counts as busy until
    its first step or ``note_started``.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, is_starting: bool = False
    ) -> None:
        self._clock = clock
        self._is_starting = is_starting
        self._last: float | None = None
        self.num_written = math.inf
        """Blocks written to host memory so far (inf before any plan): no more slots are in use."""

    def note_step(self) -> None:
        """Note that a step of the model begins: while it is busy, host memory grows slowly."""
        self._is_starting = False
        self._last = self._clock()

    def note_started(self) -> None:
        """Note that the engine has captured its graphs: host memory may grow at full speed."""
        self._is_starting = False

    def note_plan(self, plan: Plan) -> None:
        """Count the blocks that a plan writes: host memory grows ahead of them."""
        before = 0 if self.num_written == math.inf else self.num_written
        written = sum(len(transfer) for transfer in plan.transfers if transfer.dst == HOST)
        self.num_written = before + written

    def is_busy(self) -> bool:
        is_working = self._last is not None and self._clock() - self._last < _STEP_SECONDS
        return self._is_starting or is_working


class RankMemory:
    """Owns a rank's host memory, copy engine, lower tiers and driver.

    The caller notes the model's steps in ``activity``, so that host memory grows slowly beside it.
    """

    def __init__(
        self,
        host: HostMemory,
        engine: CopyEngine,
        activity: Activity,
        tiers: Mapping[TierName, TierMover],
        undo: ExitStack,
    ) -> None:
        self.host = host
        self.engine = engine
        self.tiers = dict(tiers)
        self.activity = activity
        self._undo = undo

    @classmethod
    def open(
        cls,
        layouts: Sequence[GroupLayout],
        config: Config,
        *,
        gpu: int | None = None,
        rank: Rank = FIRST_RANK,
        num_ranks: int = 1,
        num_ranks_here: int | None = None,
        contents: Contents | None = None,
        shared: SharedMemory | None = None,
        compute: Stream | None = None,
        compute_stream: Callable[[], int] | None = None,
        driver: Driver | None = None,
        is_starting: bool = False,
    ) -> RankMemory:
        """Open a rank for KV tensors in ordinary memory, or on the GPU with number ``gpu``.

        A disk or a shared store needs ``contents``, as its blocks outlive this process. ``compute``
        is the stream of a model in ordinary memory. On a GPU, ``compute_stream`` returns the handle
        of the model's (default: torch's current one). ``driver`` defaults to this machine's.

        While an engine ``is_starting``, until ``activity.note_started``, host memory grows slowly:
        pinning at full speed delayed an engine's graph capture for 7 s of 8 (one NVIDIA H200,
        2026-11-15). If host memory cannot be pinned, the driver copies segment by segment: slow,
        but correct.
        """
        activity = Activity(is_starting=is_starting)
        with ExitStack() as undo:
            if gpu is not None or driver is not None:
                # Imported here: only a GPU needs them.
                from kvferry.transfer.engine.gpu import GpuEngine, torch_compute_stream
                from kvferry.transfer.paths.opening import open_launcher, open_paths

                if driver is None:
                    driver = Driver.open(gpu or 0)
                    undo.callback(driver.close)
                launcher = open_launcher(driver)
                if launcher is not None:
                    undo.callback(launcher.close)
            host = HostMemory(
                config.host,
                _slot_bytes(layouts),
                registrar=driver,
                pin=config.host_pin,
                busy=activity.is_busy,
                wanted=lambda: activity.num_written,
                pci_bus_id=driver.identity().pci_bus_id if driver is not None else None,
                num_ranks=num_ranks_here,
                shared=shared,
            )
            undo.callback(host.close)
            setup = tier_setup(config, layouts, contents, rank, num_ranks, num_ranks_here)
            tiers = open_tiers(config.all_tiers, host.tier, setup)
            for tier in tiers.values():
                undo.callback(tier.close)
            rows = host.tier.rows
            if driver is None:
                cpu = CpuEngine(layouts, rows, compute=compute, rank=rank)
                return cls(host, cpu, activity, tiers, undo.pop_all())
            engine = GpuEngine(
                driver,
                layouts,
                host_base=int(rows.ctypes.data),
                host_pitch=int(rows.strides[0]),
                num_slots=len(rows),
                compute_stream=compute_stream or torch_compute_stream(gpu or 0),
                paths=open_paths(
                    driver, launcher, ring_bytes=config.staging_ring, is_pinned=host.is_pinned
                ),
                rank=rank,
                host_chunk=host.chunk_bytes,
            )
            engine.prepare()
            return cls(host, engine, activity, tiers, undo.pop_all())

    @property
    def ready_slots(self) -> int:
        """Number of usable slots, from slot 0 on, for ``Scheduler.note_ready``."""
        return self.host.ready_slots

    def disks(self) -> dict[str, DiskFigures]:
        """Return the figures of this rank's drives, by tier."""
        found = {name: tier.figures() for name, tier in self.tiers.items()}
        return {name: figures for name, figures in found.items() if figures is not None}

    def close(self) -> None:
        """Finish the copies, then release everything. Safe to call twice.

        If a tier or copy hangs beyond a bounded time, the host memory it may touch stays mapped.
        """
        with ExitStack() as closing:  # closes all of them, even if one raises
            closing.callback(self.engine.close)
            for tier in self.tiers.values():
                closing.callback(tier.close)
        if any(getattr(part, "is_stuck", False) for part in (self.engine, *self.tiers.values())):
            log.error("a copy never ended; its host memory stays as it is")
            self._undo.pop_all()
        self._undo.close()


def slot_layout(layouts: Sequence[GroupLayout]) -> SlotLayout:
    """Return the layout of these groups' blocks in host slots, for ranks that share host memory."""
    return SlotLayout.of([each.block_bytes for each in layouts], [each.format for each in layouts])


def _slot_bytes(layouts: Sequence[GroupLayout]) -> int:
    return max(layout.block_bytes for layout in layouts)
