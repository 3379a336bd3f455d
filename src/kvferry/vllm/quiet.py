"""Something worth saying, but not with every request."""

from __future__ import annotations

import time


class Seldom:
    """Says when it is time to say something again. Owns when that was last."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
