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
        self.looked(now)

    def looked(self, now: float) -> None:
        """Deadlines were looked at, behind all receipts that have come."""
        self._due, self._has_waited = now + _LOOK_SECONDS, False

    def is_due(self, now: float) -> bool:
        """Whether to look now, though no receipts have come."""
        if now >= self._due + _LONG_SILENCE and not self._has_waited:
            # Once: where all steps are that far apart, who hangs must be late in one of them.
            self._due, self._has_waited = now + _LOOK_SECONDS, True
        return now >= self._due
