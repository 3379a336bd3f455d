"""Who looks after gates that stay shut."""

from __future__ import annotations

import logging
import threading
import time

from kvferry.device.engine.submission import Submission
from kvferry.errors import DeadlineError

log = logging.getLogger(__name__)

QUIET_LOOKS = 60
"""So often it looks in vain before it sleeps: to wake it holds up the load that shuts a gate."""


class GateWatch:
    """Opens gates that stay shut too long, once the loads behind them have been failed.

    Whoever shut in the device's threads or the interpreter (somebody who frees device memory, and
    waits for the very compute that waits for us) could otherwise hang for ever. Owns a thread,
    once there is a gate to watch. ``patience`` is how long queueing a load may take, ``timeout``
    how long all of it may.
    """

    def __init__(self, *, patience: float, timeout: float, every: float = 1.0) -> None:
        self._patience = patience
        self._timeout = timeout
        self._every = every
        self._shut: list[Submission] = []
        self._num_quiet = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Have a thread; False where the process may not have another one: then shut no gate."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvferry-gates", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("nobody can watch over gates, so loads hold their callers: %s", error)
                return False
            self._thread = thread
        return True

    def watch(self, load: Submission) -> None:
        self._shut.append(load)
        if not self._wake.is_set():  # else it looks by itself before long
            self._wake.set()

    def look(self) -> None:
        """Open what is overdue; after a while without any, sleep until there is another gate."""
        self._wake.clear()
        self._num_quiet = 0 if self._shut else self._num_quiet + 1
        for load in tuple(self._shut):
            gate = load.gate
            if gate is None or gate.is_open:
                self._shut.remove(load)
                continue
            shut = time.monotonic() - gate.since
            if shut > (self._timeout if load.queued else self._patience):
                what = "copied" if load.queued else "queued"
                load.fail(DeadlineError(f"was not {what} within {shut:.1f} s; compute went on"))
                log.error("transfer %d %s", load.transfer_id, load.reason)
                gate.open_now()
        if self._shut or self._num_quiet < QUIET_LOOKS:
            self._wake.set()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            if self._closing.wait(self._every):
                return
            self.look()
