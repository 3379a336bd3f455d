"""When a request may run before its load has landed: its layers then wait for their own parts.

::

    landed first    [load ----------------------][forward]
    overlapped      [load ----------------------]
                       [forward, each layer behind its part]

Everybody in a step waits for it. So where others are, a load counts as landed only when the rest of
it takes no longer than they may be held up; where they may not be at all, it lands first.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class OverlapVerdict(Enum):
    """How a load and the forward pass that reads it go together."""

    OFF = "off"  # the settings say so, or this model or engine cannot wait layer by layer
    ALWAYS = "always"  # the settings say so
    SHORT = "short"  # so short that there is nothing to hide
    OTHERS = "others"  # others are there, and may not be held up
    UNMEASURED = "unmeasured"  # others are there, and nobody knows how long it would hold them up
    ALONE = "alone"  # nobody else is there: the forward pass begins as soon as the load has
    WITHIN = "within"  # others are there, and all of it holds them up for less than they may be
    ENDING = "ending"  # others are there: the forward pass begins when the rest of it does


class OverlapDecision(NamedTuple):
    """One verdict. Where others are ``share`` of the load must have landed before it may be read.

    None: all of it must have, and its request is not told of before, whoever runs.
    """

    verdict: OverlapVerdict
    share: float | None = None
    load_seconds: float | None = None

    @property
    def is_early(self) -> bool:
        return self.share is not None

    @property
    def is_alone(self) -> bool:
        """Whether it may be read at once as long as nobody comes."""
        return self.verdict in (OverlapVerdict.ALONE, OverlapVerdict.ALWAYS)

    @property
    def words(self) -> str:
        """For people who ask."""
        if self.share is None or self.load_seconds is None:
            return self.verdict.value
        return (
            f"{self.verdict.value}: {1e3 * self.load_seconds:.1f} ms to load, beside others once "
            f"{100 * self.share:.0f}% have landed"
        )


class Overlapping:
    """Decides for each load. Owns no figures: how long a load takes is told."""

    LEAST_SECONDS = 1e-3
    """A load that takes less is over before a forward pass is on its way."""

    def __init__(self, policy: str, *, stall: float) -> None:
        """By ``policy`` (auto, always, off); a step may be held up by ``stall`` seconds."""
        self._policy = policy
        self._stall = stall

    def decide(self, load_seconds: float | None, has_others: bool) -> OverlapDecision:
        """For a load that takes so long by what was measured, beside other requests or none."""
        if self._policy == "off":
            return OverlapDecision(OverlapVerdict.OFF)
        if self._policy == "always":
            return OverlapDecision(OverlapVerdict.ALWAYS, 0.0, load_seconds)
        if has_others and not self._stall:
            return OverlapDecision(OverlapVerdict.OTHERS, None, load_seconds)
        if load_seconds is None:
            # Others may come while it is on its way: then it is not told of before it has landed.
            return OverlapDecision(
                OverlapVerdict.UNMEASURED if has_others else OverlapVerdict.ALONE, 1.0
            )
        if load_seconds < self.LEAST_SECONDS:
            return OverlapDecision(OverlapVerdict.SHORT, None, load_seconds)
        share = max(0.0, 1.0 - self._stall / load_seconds)
        if not has_others:
            return OverlapDecision(OverlapVerdict.ALONE, share, load_seconds)
        verdict = OverlapVerdict.ENDING if share else OverlapVerdict.WITHIN
        return OverlapDecision(verdict, share, load_seconds)
