"""When it is time to see who is late: now and then, and not before ranks could answer."""

from __future__ import annotations

_LOOK_SECONDS = 0.25
"""How often deadlines are looked at where no receipts come."""

_LONG_SILENCE = 1.0
"""After so long without a look vLLM was not stepping (it slept, or nobody drove it). What the ranks
finished meanwhile they can say only in the step that comes: until then nobody is late."""


class Lateness:
    """Owns when the next look is due, and whether ranks were given time since the last one."""

    __slots__ = ("_due", "_has_waited")

    def __init__(self, now: float) -> None:
        self._due = now + _LOOK_SECONDS
        self._has_waited = False

    def is_due(self, now: float) -> bool:
        """Whether to see who is late though no receipts have come."""
        return now >= self._due

    def looks(self, now: float) -> bool:
        """Whether to see who is late now, behind whatever receipts have come.

        Not at once after a pause: a receipt may be of before it, and say nothing of the others. But
        time is given once: where all steps are far apart, who hangs must be late in one of them.
        """
        if now >= self._due + _LONG_SILENCE and not self._has_waited:
            self._due, self._has_waited = now + _LOOK_SECONDS, True
        if now < self._due and self._has_waited:
            return False
        self._due, self._has_waited = now + _LOOK_SECONDS, False
        return True
