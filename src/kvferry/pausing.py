"""How long who waits for a copy rests before it looks again."""

from __future__ import annotations

import time

_LEAST_PAUSE, _MOST_PAUSE = 2e-5, 5e-4
_PAUSE_SHARE = 50


def pause(waited: float) -> None:
    """Rest for a fiftieth of the time waited so far: so little is lost at the end.

    Meanwhile the interpreter is left to the thread that queues the copy.
    """
    time.sleep(min(_MOST_PAUSE, max(_LEAST_PAUSE, waited / _PAUSE_SHARE)))
