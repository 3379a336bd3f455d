"""One rank's memory and the engine that copies to and from it: opened together, closed in order.

::

    driver ──> copy paths, measured ──> host memory (first slots ready, growing) ──> tiers below it
               ──> copy engine
    close:     the tiers, the engine, then the registrations, then the mapping, then the driver

An engine in one process (:func:`kvferry.attach`) and a server's workers open a rank the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.config import Config
from kvferry.core.identity import Namespace, store_fingerprint
from kvferry.errors import ConfigError
from kvferry.hostmem.growth import Pin
from kvferry.hostmem.memory import HostMemory, SharedMemory, SlotLayout
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
    """What the blocks of a rank are, besides the way they lie in memory.

    ``weights`` are sums over the model's, or any other numbers that change with them. Of several
    engines of one server on this host, ``engine`` says which this is, ``engines_here`` of how many,
    ``first_engine`` where they begin: each has blocks of its own.
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
    """What all tiers of a rank are told; name and options are each tier's own."""
    slot_bytes = max(layout.block_bytes for layout in layouts)
    here = num_ranks_here or num_ranks
    if contents is None:
        for setting, where in (("disk", config.disk), ("remote", config.remote)):
            if where:
                raise ConfigError(
                    f"{setting}: blocks there outlive this process, so say what they are: open the "
                    "rank with contents=Contents(namespace)"
                )
        return TierSetup(TierName(""), slot_bytes, rank, num_ranks, num_ranks_here=here)
    formats = [layout.format for layout in layouts]
    server = (num_ranks, contents.engine)
    first, count = contents.first_engine, contents.engines_here
    engines = range(first, first + count) if count > 1 else ()
    return TierSetup(
        TierName(""),
        slot_bytes,
        rank,
        num_ranks,
        num_ranks_here=here * contents.engines_here,
        namespace=store_fingerprint(
            contents.namespace, server, formats, slot_bytes, rank, contents.weights
        ),
        family=store_fingerprint(contents.namespace, server),
        families=tuple(
            store_fingerprint(contents.namespace, (num_ranks, engine)) for engine in engines
        ),
        label=contents.namespace.model,
        shared_namespace=store_fingerprint(
            contents.namespace, num_ranks, formats, slot_bytes, rank, contents.weights
        ),
        config=config,
    )


log = logging.getLogger(__name__)

_STEP_SECONDS = 0.25
"""A model that was given work this long ago still counts as busy."""


class Activity:
    """Whether the model runs. Its engine says so; what should yield to the model asks.

    The driver could be asked too, but not from another thread while a graph is captured. An engine
    that ``is_starting`` warms up and captures graphs without a word: it counts as busy until it
    says that it has started, or gives the model work.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, is_starting: bool = False
    ) -> None:
        self._clock = clock
        self._is_starting = is_starting
        self._last: float | None = None
        self.num_written: int | None = None
        """Host slots that were to be written so far: no more can be in use. None if unknown."""

    def note(self) -> None:
        self._is_starting = False
        self._last = self._clock()

    def note_started(self) -> None:
        self._is_starting = False

    def slots_wanted(self) -> float:
        """No more host slots than this can be in use; any number while an engine starts."""
        if self._is_starting or self.num_written is None:
            return math.inf
        return self.num_written

    def is_busy(self) -> bool:
        is_working = self._last is not None and self._clock() - self._last < _STEP_SECONDS
        return self._is_starting or is_working


class RankMemory:
    """A rank's host memory, its copy engine, and the tiers below. Owns them, and its driver."""

    def __init__(
        self,
        host: HostMemory,
        engine: CopyEngine,
        activity: Activity,
        undo: ExitStack | None = None,
        tiers: Mapping[TierName, TierMover] | None = None,
    ) -> None:
        self.host = host
        self.engine = engine
        self.tiers = dict(tiers or {})
        self._activity = activity
        self.note_step = activity.note
        """Call it when the model is given work: while it has some, host memory grows slowly."""
        self._undo = undo if undo is not None else ExitStack()

    @property
    def ready_slots(self) -> int:
        """Slots, from the first on, that can be used; for ``Scheduler.note_ready``."""
        return self.host.ready_slots

    def disks(self) -> dict[str, DiskFigures]:
        """What the drives below this rank's memory did so far, by tier."""
        found = {name: tier.figures() for name, tier in self.tiers.items()}
        return {name: figures for name, figures in found.items() if figures is not None}

    def note_plan(self, plan: Plan) -> None:
        """These orders are carried out: host memory grows ahead of what is written to it."""
        written = [len(transfer) for transfer in plan.transfers if transfer.dst == HOST]
        self._activity.num_written = (self._activity.num_written or 0) + sum(written)

    def note_started(self) -> None:
        """The engine has captured its graphs: host memory may grow as fast as it can."""
        self._activity.note_started()

    def close(self) -> None:
        """Finish the copies, then give everything back. Safe to call twice.

        A tier that hangs is left behind after a bounded time, with the host memory it may touch.
        """
        with ExitStack() as closing:  # all of them, also when one cannot
            closing.callback(self.engine.close)
            for tier in self.tiers.values():
                closing.callback(tier.close)
        if any(getattr(part, "is_stuck", False) for part in (self.engine, *self.tiers.values())):
            log.error("a copy never ended; its host memory stays as it is")
            self._undo.pop_all()
            return
        self.host.close()
        self._undo.close()


def open_on_cpu(
    layouts: Sequence[GroupLayout],
    config: Config,
    *,
    rank: Rank = FIRST_RANK,
    compute: Stream | None = None,
    num_ranks: int = 1,
    num_ranks_here: int | None = None,
    shared: SharedMemory | None = None,
    contents: Contents | None = None,
) -> RankMemory:
    """For KV tensors in ordinary memory. A disk needs ``contents``: what it has outlives us."""
    activity = Activity()
    with ExitStack() as undo:
        host = _open_host(layouts, config, activity, num_ranks_here, shared)
        undo.callback(host.close)
        whose = tier_setup(config, layouts, contents, rank, num_ranks, num_ranks_here)
        tiers = _open_tiers(config, host, whose, undo)
        engine = CpuEngine(layouts, host.tier.rows, compute=compute, rank=rank)
        undo.pop_all()
        return RankMemory(host, engine, activity, tiers=tiers)


def open_on_gpu(
    layouts: Sequence[GroupLayout],
    config: Config,
    *,
    rank: Rank = FIRST_RANK,
    device: int = 0,
    compute_stream: Callable[[], int] | None = None,
    num_ranks: int = 1,
    num_ranks_here: int | None = None,
    shared: SharedMemory | None = None,
    driver: Driver | None = None,
    is_starting: bool = False,
    contents: Contents | None = None,
) -> RankMemory:
    """For KV tensors on GPU ``device``. Without ``driver``, this machine's is opened.

    While an engine ``is_starting``, until ``note_started``, host memory grows slowly: pinning at
    full speed held one back from capturing its graphs for 7 s of 8 (one NVIDIA H200, 2026-11-15).
    Where the driver pins no host memory, copies go one by one through the driver: slow and right.
    """
    # Here: what they bring is needed with a GPU only.
    from kvferry.transfer.engine.gpu import GpuEngine, torch_compute_stream
    from kvferry.transfer.paths.opening import open_launcher, open_paths

    activity = Activity(is_starting=is_starting)
    with ExitStack() as undo:
        if driver is None:
            driver = Driver.open(device)
            undo.callback(driver.close)
        launcher = open_launcher(driver)
        if launcher is not None:
            undo.callback(launcher.close)
        host = _open_host(layouts, config, activity, num_ranks_here, shared, driver)
        undo.callback(host.close)
        whose = tier_setup(config, layouts, contents, rank, num_ranks, num_ranks_here)
        tiers = _open_tiers(config, host, whose, undo)
        rows = host.tier.rows
        engine = GpuEngine(
            driver,
            layouts,
            host_base=int(rows.ctypes.data),
            host_pitch=int(rows.strides[0]),
            num_slots=len(rows),
            compute_stream=compute_stream or torch_compute_stream(device),
            paths=open_paths(
                driver, launcher, ring_bytes=config.staging_ring, is_pinned=host.is_pinned
            ),
            rank=rank,
            host_chunk=host.chunk_bytes,
        )
        engine.prepare()
        return RankMemory(host, engine, activity, undo.pop_all(), tiers)


def _open_host(
    layouts: Sequence[GroupLayout],
    config: Config,
    activity: Activity,
    num_ranks_here: int | None,
    shared: SharedMemory | None,
    driver: Driver | None = None,
) -> HostMemory:
    """Host slots for the blocks of these groups; a ``driver`` pins them for its card."""
    return HostMemory(
        config.host,
        _slot_bytes(layouts),
        registrar=driver,
        pin=Pin(config.host_pin),
        busy=activity.is_busy,
        wanted=activity.slots_wanted,
        pci_bus_id=driver.identity().pci_bus_id if driver is not None else None,
        num_ranks=num_ranks_here,
        shared=shared,
    )


def _open_tiers(
    config: Config, host: HostMemory, whose: TierSetup, undo: ExitStack
) -> dict[TierName, TierMover]:
    tiers = open_tiers(config.all_tiers, host.tier, whose)
    for tier in tiers.values():
        undo.callback(tier.close)
    return tiers


def slot_layout(layouts: Sequence[GroupLayout]) -> SlotLayout:
    """How these groups' blocks lie in host slots: for ranks that share one host memory."""
    return SlotLayout.of([each.block_bytes for each in layouts], [each.format for each in layouts])


def _slot_bytes(layouts: Sequence[GroupLayout]) -> int:
    return max(layout.block_bytes for layout in layouts)
