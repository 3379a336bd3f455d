"""Load or recompute: which brings a hit's tokens sooner, by what was measured so far."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

_WEIGHT = 0.2  # of the newest measurement in a running average
_MIN_TOKENS = 16  # a measurement over fewer tokens is mostly overhead
_MEASURE_EVERY = 32  # hits declined in a row before one is loaded to see: only loads measure


class Verdict(Enum):
    """Why a hit is loaded or not."""

    LOAD_ALWAYS = "load_always"  # the policy says so
    COMPUTE_ALWAYS = "compute_always"  # the policy says so
    LOAD_UNMEASURED = "load_unmeasured"  # a rate is not known yet: loading is the better bet
    LOAD_FASTER = "load_faster"  # by what was measured so far
    COMPUTE_FASTER = "compute_faster"  # by what was measured so far
    LOAD_TO_MEASURE = "load_to_measure"  # computing won so long that the link may be another now


class Decision(NamedTuple):
    """One verdict and the two times it compares, in seconds (None: not known)."""

    verdict: Verdict
    load_seconds: float | None = None
    compute_seconds: float | None = None

    @property
    def load(self) -> bool:
        return self.verdict not in (Verdict.COMPUTE_ALWAYS, Verdict.COMPUTE_FASTER)


class LoadOrCompute:
    """Decides per request. Owns two running averages: the link's bandwidth, the prefill rate.

    One bad first measurement would end all loads, and with them all measurements: so a hit is
    loaded now and then although computing it looks faster.
    """

    def __init__(self, policy: str, *, prefill_rate: float | None = None) -> None:
        self._policy = policy
        self._given_rate = prefill_rate
        self._learned_rate: float | None = None
        self._bandwidth: float | None = None
        self._num_declined = 0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second; what was given wins over what was learned."""
        return self._given_rate if self._given_rate is not None else self._learned_rate

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of loads, as measured."""
        return self._bandwidth

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """A load of this size took this long on the link."""
        if num_bytes > 0 and seconds > 0:
            self._bandwidth = _average(self._bandwidth, num_bytes / seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._learned_rate = _average(self._learned_rate, num_tokens / seconds)

    def decide(self, num_tokens: int, num_bytes: int, queued_bytes: int) -> Decision:
        """For a hit of ``num_tokens`` in ``num_bytes``, behind ``queued_bytes`` on the link."""
        if self._policy == "always":
            return Decision(Verdict.LOAD_ALWAYS)
        if self._policy == "never":
            return Decision(Verdict.COMPUTE_ALWAYS)
        if self._bandwidth is None or self.prefill_rate is None or not num_bytes:
            return Decision(Verdict.LOAD_UNMEASURED)
        load = (num_bytes + queued_bytes) / self._bandwidth
        compute = num_tokens / self.prefill_rate
        if load <= compute:
            self._num_declined = 0
            return Decision(Verdict.LOAD_FASTER, load, compute)
        self._num_declined += 1
        if self._num_declined % _MEASURE_EVERY == 0 and not queued_bytes:
            return Decision(Verdict.LOAD_TO_MEASURE, load, compute)
        return Decision(Verdict.COMPUTE_FASTER, load, compute)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
