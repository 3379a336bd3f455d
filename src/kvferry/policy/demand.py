"""How far ahead of need to look: a watermark that follows demand."""

from __future__ import annotations

import math

_STEPS_AHEAD = 4  # a copy started now lands within a few steps
_KEEP = 0.9  # of yesterday's demand, each step: a burst is remembered for about twenty steps


class Watermark:
    """How many places should be ready to be given away: the recent peak of demand, times a few.

    Owns one number.
    """

    def __init__(self, *, least: int = 0, most: int) -> None:
        """Look at least and at most this far ahead."""
        self._least = least
        self._most = most
        self._peak = 0.0

    def demand(self, count: int) -> None:
        """This many places were taken in the step that just passed."""
        self._peak = max(float(count), self._peak * _KEEP)
        if self._peak < 0.5:
            self._peak = 0.0

    @property
    def depth(self) -> int:
        return min(self._most, max(self._least, math.ceil(self._peak * _STEPS_AHEAD)))
