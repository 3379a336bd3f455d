"""For each of vLLM's requests: whether it may run while its load lands, by what was measured."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from kvferry.cache.policies.load_or_compute import OverlapDecision, Overlapping
from kvferry.config import Config
from kvferry.connectors.vllm.blocks import VllmBlocks
from kvferry.connectors.vllm.messages import EarlyShares, RankShape
from kvferry.connectors.vllm.requests import AwaitedLoad, Tracked
from kvferry.connectors.vllm.translate import Setup
from kvferry.scheduler.promotion import State
from kvferry.telemetry.stats import SchedulerStats
from kvferry.transfer.engine.contract import CopyEngine
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.transfer.planner.choose import PathChoices
from kvferry.types import TransferId

WORTH_SECONDS = 2e-3
"""A load that takes longer is worth a forward pass in pieces, where it could be one graph."""

_OTHERS = (State.ANSWERED, State.LOADING, State.LOADED, State.RUNNING)


class VllmOverlap:
    """Knows how long a load takes, and asks the policy. Owns nothing of a request's."""

    def __init__(
        self,
        setup: Setup,
        shape: RankShape,
        requests: Mapping[str, Tracked],
        blocks: VllmBlocks,
        stats: Callable[[], SchedulerStats],
    ) -> None:
        """``requests`` are all there are; ``stats`` are asked where no speed was measured."""
        policy = "off" if why_not(setup, blocks.hash_tokens) else setup.config.overlap_loads
        self._policy = Overlapping(policy, stall=setup.config.overlap_max_delay)
        self._is_off = policy == "off"
        self._choices: PathChoices | None = shape.choices
        self._block_bytes = shape.block_bytes[0] if shape.block_bytes else 0
        self._block_tokens = setup.groups[0].block_tokens
        self._requests = requests
        self._stats = stats

    def decide(self, num_tokens: int) -> OverlapDecision:
        """For a load of so many tokens that is about to be ordered."""
        if self._is_off:
            return self._policy.decide(None, False)
        has_others = self._has_others
        return self._policy.decide(self._seconds(num_tokens, has_others), has_others)

    def leaves_a_block(self, num_tokens: int) -> bool:
        """Whether to compute a prompt's last block although it could be loaded.

        One token alone is computed by one graph of all layers, which must wait for the whole load;
        more of them layer by layer. That costs some time, and only who runs alone has it.
        """
        if self._is_off or self._has_others:
            return False
        seconds = self._seconds(num_tokens, False)
        return seconds is not None and seconds >= WORTH_SECONDS

    @property
    def _has_others(self) -> bool:
        """Whether requests compute in these steps, or will: from the start, or once loaded."""
        return any(each.ferried.state in _OTHERS for each in self._requests.values())

    def _seconds(self, num_tokens: int, has_others: bool) -> float | None:
        """By the planner's measurements; where it has none, by the loads so far."""
        num_blocks = -(-num_tokens // self._block_tokens)
        if self._choices is not None:
            return self._choices.load_seconds(0, num_blocks, busy=has_others)
        bandwidth = self._stats().bandwidth
        return num_blocks * self._block_bytes / bandwidth if bandwidth else None


def shares_of(overlap: OverlapDecision | None) -> EarlyShares | None:
    """How much of the load must have landed before vLLM is told; None where all of it must have."""
    if overlap is None or overlap.share is None:
        return None
    return EarlyShares(0.0 if overlap.is_alone else overlap.share, overlap.share)


def why_not(setup: Setup, hash_tokens: int) -> str:
    """Why no request of this server may run before its load has landed; empty where it may."""
    config: Config = setup.config
    if config.overlap_loads == "off":
        return "overlap_loads is off"
    if len(setup.groups) != 1 or not setup.is_full:
        return "only one group of full attention can be waited for layer by layer"
    if setup.uses_drafts:
        return "the layers of a draft model run after the model's own"
    if setup.splits_batches:
        return "vLLM runs two halves of a batch side by side"
    if hash_tokens != setup.groups[0].block_tokens:
        return "vLLM shares parts of blocks, and copies those before we are called"
    return ""


# ------------------------------------------------------------------------------------------------
# Loads that vLLM was told of before they landed: its forward pass waits for them, layer by layer.
#
# ::
#
#     step n        ordered ──> on its way: nothing can go wrong with it any more ──> vLLM is told
#     step n + 1    before layer 0: wait for part 0 │ layer 0 … │ wait for part 1 │ layer k … │ …
#     later         landed: a receipt as for any other load
#
# vLLM goes on without a load that fails only as long as it has not computed with it. So it is told
# when the load is queued on the device as a whole, and not before; and what it then computes is
# queued behind the load. On the device, that is: nobody here waits.
#
# A layer's KV is written before its attention is: so whoever leaves a layer waits for the next
# one's
# part. Where a step replays one graph of all layers, or does not call us for each, everything is
# waited for before it. Which steps call us is seen, not believed: in each mode some step must have
# called for every layer before we count on it.

log = logging.getLogger(__name__)

WHOLE = 1 << 30
"""A part after all others."""


class LandingLoads:
    """Owns which loads may be told of early and which were, and how far compute waits for them."""

    def __init__(
        self,
        engine: CopyEngine,
        layers: Sequence[str],
        layout: GroupLayout,
        *,
        land: Callable[[], None],
        parts: LayerParts | None = None,
    ) -> None:
        """``layers`` are those of the only group, in the order in which they run.

        ``land`` waits until all loads have landed: for a driver that will not order compute.
        """
        self._engine = engine
        self._land = land
        parts = parts or LayerParts.of(layout)
        self._shares = parts.shares
        self._part_of = _parts_of(layers, layout, parts)
        self._last_part = max(self._part_of.values(), default=0)
        self._next_of = _next_of(layers, self._part_of)
        self._ordered: list[AwaitedLoad] = []  # in the order in which they land
        self._told: dict[TransferId, None] = {}
        self._awaited: tuple[TransferId, ...] = ()
        """Those of them that had been told of when the forward pass began."""
        self._calls: dict[str, set[str]] = {}
        self._is_called = True
        self._mode = ""
        self._waited = WHOLE
        """Compute is behind this part of what was told; all of it, between forward passes."""
        self.listens = False
        """Whether a layer's calls mean anything in this step."""

    # -- telling --------------------------------------------------------------------------------

    def ordered(self, load: AwaitedLoad) -> None:
        """A load is on its way; those that must land first are in line all the same."""
        self._ordered.append(load)

    def ended(self, load: AwaitedLoad) -> None:
        """Its receipts are here."""
        if load in self._ordered:
            self._ordered.remove(load)
        for transfer_id in load.transfers:
            self._told.pop(transfer_id, None)

    def due(self, *, beside_others: bool) -> AwaitedLoad | None:
        """The load that vLLM may be told of now, if any may.

        Only the one that lands next: whoever ran with a later one would wait for all before it.
        """
        load = self._ordered[0] if self._ordered else None
        if load is None or load.early is None or load.is_told:
            return None
        wanted = load.early.beside if beside_others else load.early.at_rest
        for transfer_id in load.transfers:
            landed = self._engine.num_landed(transfer_id)
            if landed is None or self._shares[landed] < wanted:
                return None
        return load

    def told(self, load: AwaitedLoad) -> None:
        """vLLM was told of it: from now on compute must be ordered behind it."""
        load.is_told = True
        self._told |= dict.fromkeys(load.transfers)

    # -- a forward pass -------------------------------------------------------------------------

    def begin_forward(self, mode: str) -> None:
        """A step with a forward pass begins; ``mode`` says how, empty where it is one graph."""
        self._mode = mode
        calls = self._calls.setdefault(mode, set())
        is_known = self._is_called and len(calls) == len(self._part_of)
        self.listens = bool(mode) and not is_known
        self._waited = WHOLE
        self._awaited = tuple(self._told)
        if not self._awaited:
            return
        if mode and is_known:
            self.listens, self._waited = True, -1
            self._wait(0)
        else:
            self._order(WHOLE)

    def before_layer(self, name: str) -> None:
        part = self._part_of.get(name)
        if part is None:
            return
        self._wait(part)
        self._calls[self._mode].add(name)

    def after_layer(self, name: str) -> None:
        part = self._next_of.get(name)
        if part is not None:
            self._wait(part)

    def end_forward(self) -> None:
        """All of its work is queued. What is queued later comes after it, and so after the loads.

        So each load is waited for once; but for those that vLLM was told of meanwhile.
        """
        self.listens = False
        if self._waited < self._last_part:
            # A layer may have been computed too early. It was seen to call, in this very mode.
            log.error(
                "vLLM did not call for every layer (%s): from now on loads land first", self._mode
            )
            self._is_called = False
            self._order(WHOLE)
        self._waited = WHOLE
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
        except Exception:  # compute that is not behind the loads must not be queued before
            log.exception("the device will not wait for loads, so vLLM does")
            self._land()


def _parts_of(layers: Sequence[str], layout: GroupLayout, parts: LayerParts) -> dict[str, int]:
    """With which part each layer of this rank has landed."""
    tensors: dict[str, list[str]] = {}
    for tensor, _, _ in layout.spans:
        tensors.setdefault(tensor.rpartition("[")[0], []).append(tensor)
    return {name: parts.last_of(layout, tensors[name]) for name in layers if name in tensors}


def _next_of(layers: Sequence[str], part_of: Mapping[str, int]) -> dict[str, int]:
    """By layer, the part of the one that runs after it."""
    here = [name for name in layers if name in part_of]
    return {name: part_of[after] for name, after in itertools.pairwise(here)}
