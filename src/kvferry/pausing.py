"""How who waits for a copy rests: briefly, punctually, and without the interpreter.

A copy's end can be asked for or waited for. Waiting in the driver has no time limit, and a call
back from the card comes some 100 to 250 microseconds late; asking after short sleeps loses 5 to 15
(one NVIDIA H200, 2026-11-16), if the kernel ends a sleep when it should: by itself it takes 50
microseconds more.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

_LEAST_PAUSE, _MOST_PAUSE = 3e-6, 1e-5
_PAUSE_SHARE = 100
_SET_SLACK, _GET_SLACK = 29, 30
_FINE_NANOSECONDS = 1000


def pause(waited: float) -> None:
    """Rest for a hundredth of the time waited so far, and never long: so little is lost at the end.

    Besides, a processor that rests for longer is slow when it wakes: with pauses of up to 50
    microseconds all that follows a copy's end took a sixth longer, for a tenth to a fifth of a core
    less.
    """
    time.sleep(min(_MOST_PAUSE, max(_LEAST_PAUSE, waited / _PAUSE_SHARE)))


class PunctualSleep:
    """Within it this thread's sleeps end on time, where the kernel can be told so (Linux)."""

    def __init__(self) -> None:
        self._prctl = _find_prctl()
        self._before = 0

    def __enter__(self) -> None:
        if self._prctl is not None:
            self._before = self._prctl(_GET_SLACK, 0, 0, 0, 0)
            if self._before > _FINE_NANOSECONDS:
                self._prctl(_SET_SLACK, _FINE_NANOSECONDS, 0, 0, 0)

    def __exit__(self, *_: object) -> None:
        if self._prctl is not None and self._before > _FINE_NANOSECONDS:
            self._prctl(_SET_SLACK, self._before, 0, 0, 0)


@functools.cache
def _find_prctl() -> Callable[..., int] | None:
    try:
        # Without letting go of the interpreter: the call is shorter than having it back takes.
        function = ctypes.PyDLL(None).prctl
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
