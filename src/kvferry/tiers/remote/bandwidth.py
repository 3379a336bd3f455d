"""A cap on bytes a second: whoever wants to move some may, or is told how long to wait."""

from __future__ import annotations

import threading

_BURST_SECONDS = 0.05
"""What was not used lately may be used at once, but no more than this much of it."""


class Bandwidth:
    """Owns when the line is free again. ``None`` is no cap.

    Bytes count from the moment they go. Nobody holds a place for bytes that wait: whoever gave up
    waiting would have to give it back, or the line would seem taken for ever.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()  # guards when it is free
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """So many bytes go now: 0. Or they cannot yet, and nothing is taken: the seconds until
        it is worth asking again.
        """
        if self._rate is None:
            return 0.0
        with self._lock:
            if self._free_at > now:
                return self._free_at - now
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + num_bytes / self._rate
            return 0.0
