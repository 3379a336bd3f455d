"""A cap on bytes a second: whoever wants to move some is told how long to wait."""

from __future__ import annotations

_BURST_SECONDS = 0.05
"""What was not used lately may be used at once, but no more than this much of it."""


class Bandwidth:
    """Owns when the line is free again. ``None`` is no cap."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def wait(self, num_bytes: int, now: float) -> float:
        """Claim so many bytes; returns the seconds until they may go."""
        if self._rate is None:
            return 0.0
        start = max(self._free_at, now - _BURST_SECONDS)
        self._free_at = start + num_bytes / self._rate
        return max(0.0, start - now)
