"""Layer-wise overlap: a request that runs alone computes while its load lands, layer by layer.

::

    step n       ordered ──> queued on the device: it cannot fail any more ──> the engine is told
    step n + 1   before layer 0: wait for part 0 │ layer 0 … │ wait for part 1 │ layer k … │ …
    later        landed: a receipt as for any other load

An engine can recover from a failed load only before it has computed with the load's blocks. So it
is told when the whole load is queued on the device; it queues compute behind the load's parts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from kvferry.cache.policies.load_or_compute import LoadOrCompute
from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.loads import AwaitedLoad
from kvferry.connectors.common.messages import RankShape
from kvferry.transfer.job import CopyEngine
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.types import HOST, TransferId

log = logging.getLogger(__name__)

_WHOLE = 1 << 30
"""Number greater than any part's: waiting for it means waiting for the whole load."""


class OverlapDecider:
    """Decides which loads overlap with the forward pass: those of requests that run alone."""

    MIN_SECONDS = 2e-3
    """Shortest load to overlap; for less, a forward pass as one graph beats one in pieces."""

    def __init__(
        self,
        setup: SessionSetup,
        shape: RankShape,
        costs: LoadOrCompute,
        has_others: Callable[[], bool],
        *,
        hash_tokens: int,
    ) -> None:
        """``costs`` has the bandwidth of the loads so far.

        ``has_others`` says whether another request computes in these steps, or soon will.
        """
        is_off = setup.config.overlap_loads == "off" or bool(setup.overlap_refusal)
        # An engine that shares parts of blocks copies them before it calls the connector.
        self._is_off = is_off or hash_tokens != setup.groups[0].block_tokens
        self._block_bytes = shape.block_bytes[0] if shape.block_bytes else 0
        self._block_tokens = setup.groups[0].block_tokens
        self._costs = costs
        self._has_others = has_others

    def is_due(self, num_tokens: int, *, at_least_one_before: bool = False) -> bool:
        """Whether a request may run before its load of ``num_tokens`` has landed.

        While no load was measured, the answer is yes unless ``at_least_one_before`` is set.
        """
        if self._is_off:
            return False
        bandwidth = self._costs.bandwidth_of(HOST)
        if bandwidth is None:
            is_long = not at_least_one_before
        else:
            num_blocks = -(-num_tokens // self._block_tokens)
            is_long = num_blocks * self._block_bytes / bandwidth >= self.MIN_SECONDS
        return is_long and not self._has_others()


class LayerwiseLoads:
    """Owns the loads reported to the engine early, and which of their parts compute waits for.

    An engine may replay one graph of all layers instead of calling us for each. So in each mode of
    computing, the calls count only after one step has called for every layer.
    """

    tells_beside_others = False
    """Whether to report a load early in a step in which other requests compute; for tests."""

    def __init__(
        self,
        engine: CopyEngine,
        layers: Sequence[str],
        layout: GroupLayout,
        *,
        land: Callable[[], None],
    ) -> None:
        """``layers`` are those of the only group, in the order in which they run.

        ``land`` waits until all loads have landed, for when the driver cannot order compute.
        """
        self._engine = engine
        self._land = land
        tensors: dict[str, list[str]] = {}
        for tensor, _, _ in layout.spans:
            tensors.setdefault(tensor.rpartition("[")[0], []).append(tensor)
        parts = LayerParts.of(layout)
        self._part_of = {
            name: parts.last_of(layout, tensors[name]) for name in layers if name in tensors
        }
        self._next_of = {
            name: self._part_of[after] for name, after in itertools.pairwise(self._part_of)
        }
        self._last_part = max(self._part_of.values(), default=0)
        self._told: dict[TransferId, None] = {}
        self._awaited: tuple[TransferId, ...] = ()  # loads that the current forward pass waits for
        self._calls: dict[str, set[str]] = {}
        self._is_called = True
        self._mode = ""
        self._waited = _WHOLE  # compute is ordered after this part of the reported loads
        self.listens = False
        """Whether this step uses the engine's calls for each layer."""

    # -- telling --------------------------------------------------------------------------------

    def landed(self, transfer_id: TransferId) -> None:
        """Forget a load whose receipt has come."""
        self._told.pop(transfer_id, None)

    def may_tell(self, load: AwaitedLoad, *, computes: bool) -> bool:
        """Whether ``load``, the next one to land, may be reported to the engine now.

        A request with a later load would wait for all loads before it. In a step that ``computes``,
        other requests would wait for the load too.
        """
        if not load.is_early or load.is_told or (computes and not self.tells_beside_others):
            return False
        landed = self._engine.num_landed
        return all(landed(each) is not None for each in load.waiting)

    def tell(self, load: AwaitedLoad) -> None:
        """Mark a load as reported to the engine: compute must be ordered after it from now on."""
        load.is_told = True
        self._told |= dict.fromkeys(load.waiting)

    # -- a forward pass -------------------------------------------------------------------------

    def begin_forward(self, mode: str) -> None:
        """Begin a step's forward pass in this ``mode`` of computing, empty if it is one graph."""
        self._mode = mode
        calls = self._calls.setdefault(mode, set())
        is_known = self._is_called and len(calls) == len(self._part_of)
        self.listens = bool(mode) and not is_known
        self._waited = _WHOLE
        self._awaited = tuple(self._told)
        if self._awaited and mode and is_known:
            self.listens, self._waited = True, -1
            self._wait(0)
        elif self._awaited:
            self._order(_WHOLE)

    def before_layer(self, name: str) -> None:
        part = self._part_of.get(name)
        if part is not None:
            self._wait(part)
            self._calls[self._mode].add(name)

    def after_layer(self, name: str) -> None:
        """Wait for the part of the next layer, which writes its KV before its attention runs."""
        part = self._next_of.get(name)
        if part is not None:
            self._wait(part)

    def end_forward(self) -> None:
        """End the forward pass: all of its work is queued, so later work runs after its loads.

        No later step waits for these loads; it waits for those reported since the pass began.
        """
        self.listens = False
        if self._waited < self._last_part:
            # A layer may have run before its part landed; an earlier step had called for them all.
            log.error(
                "the engine did not call for every layer (%s): loads land first from now on",
                self._mode,
            )
            self._is_called = False
            self._order(_WHOLE)
        self._waited = _WHOLE
        for transfer_id in self._awaited:
            self._told.pop(transfer_id, None)
        self._awaited = ()

    def _wait(self, part: int) -> None:
        if part > self._waited:
            self._order(part)
            self._waited = part

    def _order(self, part: int) -> None:
        try:
            self._engine.order_compute_after_part(self._awaited, part)
        except Exception:  # land the loads before any compute is queued that could overtake them
            log.exception("the device will not wait for loads, so the engine does")
            self._land()
