"""For each of vLLM's requests: whether it may run while its load lands, by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.config import Config
from kvferry.device.planning.path_choices import PathChoices
from kvferry.policy import OverlapDecision, Overlapping
from kvferry.scheduler import State
from kvferry.stats import SchedulerStats
from kvferry.vllm.blocks import VllmBlocks
from kvferry.vllm.messages import EarlyShares, RankShape
from kvferry.vllm.setup import Setup
from kvferry.vllm.tracked import Tracked

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
        self._policy = Overlapping(policy, stall=setup.config.overlap_stall)
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
