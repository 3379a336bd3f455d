"""What a ferry that closes still writes: blocks that only host memory holds, to the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvferry.pausing import pause
from kvferry.scheduler import Scheduler

log = logging.getLogger(__name__)


def write_out(
    scheduler: Scheduler, advance: Callable[[], None], send: Callable[[], None], seconds: float
) -> None:
    """Go on with ``advance`` and ``send`` until all of it is written, or for so many seconds.

    Also what is being stored now; nobody waits for what is read. Whatever goes wrong, whoever
    closes goes on with that; an interrupt ends it, and is passed on.
    """
    began = time.monotonic()
    end = began + seconds
    try:
        while scheduler.write_out.can_be and (now := time.monotonic()) < end:
            advance()
            scheduler.write_out.advance()
            send()
            if not scheduler.write_out.is_under_way:
                return
            pause(now - began)
    except Exception:
        log.exception("what only host memory holds could not be written out")
