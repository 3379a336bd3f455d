"""Load or recompute: which is faster for a hit, by the rates measured so far."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvferry.types import HOST, TierName

_WEIGHT = 0.2  # share of the newest measurement in a running average
_MIN_TOKENS = 16  # a measurement over fewer tokens is mostly overhead
_FIRST_PATIENCE, _MOST_PATIENCE = 2, 32  # hits in a row not loaded, before one is loaded to measure


class Verdict(Enum):
    """Why a hit is loaded or not."""

    LOAD_ALWAYS = "load_always"  # the setting says so
    LOAD_UNMEASURED = "load_unmeasured"  # a rate is not known yet: loading is the better bet
    LOAD_FASTER = "load_faster"  # by the measured rates
    COMPUTE_FASTER = "compute_faster"  # by the measured rates
    LOAD_TO_MEASURE = "load_to_measure"  # many hits were computed, so the bandwidth may be outdated


class Decision(NamedTuple):
    """One verdict and the two times it compares, in seconds (None: not known)."""

    verdict: Verdict
    load_seconds: float | None = None
    compute_seconds: float | None = None

    @property
    def load(self) -> bool:
        return self.verdict is not Verdict.COMPUTE_FASTER


class LoadOrCompute:
    """Decides per request. Owns running averages: the prefill rate, and each link's bandwidth.

    A link leads from the host to the device, or from a lower tier to the host. Only loads measure a
    link, so a hit is sometimes loaded although computing looks faster. That happens soon at first,
    when one slow read of a drive that just woke may be the only measurement; then ever more rarely.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.prefill_rate: float | None = None
        """Prompt tokens computed per second, as measured; None before the first measurement."""
        self._bandwidths: dict[TierName, float] = {}
        self._num_declined: dict[TierName, int] = {}  # hits computed in a row, by link
        self._patience: dict[TierName, int] = {}

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of loads to the device, as measured; None while unknown."""
        return self.bandwidth_of(HOST)

    def bandwidth_of(self, link: TierName) -> float | None:
        """Return bytes per second from the host to the device, or from a lower tier to the host."""
        return self._bandwidths.get(link)

    def note_load(self, num_bytes: int, seconds: float, link: TierName = HOST) -> None:
        """Note that a load of this size took this long on the link."""
        if num_bytes > 0 and seconds > 0:
            new = num_bytes / seconds
            old = self._bandwidths.get(link, new)
            self._bandwidths[link] = old + _WEIGHT * (new - old)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note that the engine computed this many prompt tokens in this time."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            new = num_tokens / seconds
            old = new if self.prefill_rate is None else self.prefill_rate
            self.prefill_rate = old + _WEIGHT * (new - old)

    def decide(
        self, num_tokens: int, num_bytes: int, queued_bytes: int, link: TierName = HOST
    ) -> Decision:
        """Decide for a hit of ``num_tokens`` in ``num_bytes``, behind ``queued_bytes`` on the link.

        For a lower tier's link, the load time includes the copy from the host to the device.
        """
        if self._policy == "always":
            return Decision(Verdict.LOAD_ALWAYS)
        bandwidth = self._bandwidths.get(link)
        if bandwidth is None or self.prefill_rate is None or not num_bytes:
            return Decision(Verdict.LOAD_UNMEASURED)
        load = (num_bytes + queued_bytes) / bandwidth
        if link != HOST:
            load += num_bytes / self._bandwidths.get(HOST, float("inf"))
        compute = num_tokens / self.prefill_rate
        if load <= compute:
            self._num_declined[link] = 0
            return Decision(Verdict.LOAD_FASTER, load, compute)
        self._num_declined[link] = self._num_declined.get(link, 0) + 1
        patience = self._patience.get(link, _FIRST_PATIENCE)
        if self._num_declined[link] < patience or queued_bytes:
            return Decision(Verdict.COMPUTE_FASTER, load, compute)
        self._num_declined[link] = 0
        self._patience[link] = min(_MOST_PATIENCE, 2 * patience)
        return Decision(Verdict.LOAD_TO_MEASURE, load, compute)


class BusyTime:
    """Measures the busy time of a link on which many transfers are under way at once."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self.since = 0.0
        """Time of the link's last completion, or of its first transfer after it was idle."""
        self._num_bytes = 0

    def begin(self, now: float) -> None:
        """Note that a transfer began."""
        if not self._num_under_way:
            self.since, self._num_bytes = now, 0
        self._num_under_way += 1

    def give_up(self) -> None:
        """Stop counting one transfer that is overdue; the others' measurement goes on."""
        self._num_under_way -= 1

    def end(self, num_bytes: int, now: float) -> tuple[int, float]:
        """Note that a transfer ended; return bytes and seconds since the last measurement."""
        self._num_under_way -= 1
        self._num_bytes += num_bytes
        if now <= self.since:  # several ended at once: they count with the next
            return 0, 0.0
        came, seconds = self._num_bytes, now - self.since
        self.since, self._num_bytes = now, 0
        return came, seconds
