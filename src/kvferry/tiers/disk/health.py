"""Whether a drive can be used: what ails it, by cause, and when it is well again.

A block that fails is a failed block. Many in a row, a drive that does not answer, a file that is
not there: the drive ails, its orders fail at once, and it is asked now and then. No room to write
ails nobody: what is there can still be read.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from kvferry.errors import TransferError
from kvferry.quantities import format_size
from kvferry.tiers.base import Way
from kvferry.tiers.disk.block_file import SECTOR, BlockFile
from kvferry.tiers.disk.lanes import Lanes
from kvferry.tiers.mapping import PrivateMemory

MANY_ERRORS = 16
"""So many calls to the drive in a row must fail before we stop asking it."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_REST = 60.0


class DriveHealth:
    """Collects what is wrong and tells the lanes, and the engine by ``tell``. Any thread may."""

    def __init__(
        self,
        lanes: Lanes,
        file: BlockFile,
        tell: Callable[[str], None],
        *,
        path: str,
        keep_free: int,
        check_seconds: float,
    ) -> None:
        self._lanes = lanes
        self._file = file
        self._tell = tell
        self._path = path
        self._keep_free = keep_free
        self._check_seconds = check_seconds
        self._lock = threading.Lock()  # guards all below
        self._ailments: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._in_a_row = {Way.READ: 0, Way.WRITE: 0}
        self._rest = check_seconds
        self._ask_at = 0.0
        self._num_failed = 0
        self.is_lost = False
        """The file has not been there for long: whoever serves it should begin anew."""
        self._page = PrivateMemory(SECTOR).bytes.data

    def worked(self, way: Way) -> None:
        if self._in_a_row[way]:
            with self._lock:
                self._in_a_row[way] = 0

    def failed(self, way: Way, error: Exception) -> None:
        """One call for one block failed."""
        is_full = isinstance(error, OSError) and error.errno in _NO_SPACE and way is Way.WRITE
        with self._lock:
            self._in_a_row[way] += 1
            if self._in_a_row[way] < MANY_ERRORS:
                return
            self._in_a_row[way] = 0
            self._ask_at = time.monotonic() + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        if is_full:
            self.refuse_writes("space", f"no room to write: {error}")
        else:
            self.ail("errors", f"{MANY_ERRORS} errors in a row, the last: {error}")

    def ail(self, cause: str, reason: str) -> None:
        """It cannot be used for this reason; an empty one: not any more for this cause."""
        with self._lock:
            if not self._set(self._ailments, cause, reason):
                return
            now = next(iter(self._ailments.values()), "")
            self._lanes.ail(now)
            self._tell(now)  # after the lanes: whoever hears of it finds the failed results first

    def refuse_writes(self, cause: str, reason: str) -> None:
        """Nothing can be written for this reason; an empty one: not any more for this cause."""
        with self._lock:
            if self._set(self._refusals, cause, reason):
                self._lanes.refuse_writes(next(iter(self._refusals.values()), ""))

    def check(self) -> None:
        """Look at the drive, as a thread that may hang does every second."""
        try:
            self._file.check()
            self._check_space()
            if "errors" in self._ailments and time.monotonic() >= self._ask_at:
                self._file.read(0, self._page)
                with self._lock:
                    self._in_a_row = {Way.READ: 0, Way.WRITE: 0}
                self.ail("errors", "")
        except (OSError, TransferError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.ail("check", said or str(error))
            self._num_failed += 1
            self.is_lost = self._num_failed > MANY_ERRORS
        else:
            self.ail("check", "")
            self._num_failed = 0
            if time.monotonic() > self._ask_at + _LONGEST_REST:
                self._rest = self._check_seconds

    def _check_space(self) -> None:
        """A file that grows as it is written must leave the floor alone, and others some room."""
        found = os.statvfs(self._path)
        free = found.f_bavail * found.f_frsize
        is_due = time.monotonic() >= self._ask_at
        if "space" in self._refusals and is_due and free > self._keep_free:
            self.refuse_writes("space", "")
        if self._file.is_whole:
            return
        is_short = free <= self._keep_free
        self.refuse_writes(
            "floor", f"{format_size(self._keep_free)} of the file system stay free" * is_short
        )

    def _set(self, reasons: dict[str, str], cause: str, reason: str) -> bool:
        """Note it; whether the first reason is another now."""
        before = next(iter(reasons.values()), "")
        if reason:
            reasons.setdefault(cause, reason)
        else:
            reasons.pop(cause, None)
        return before != next(iter(reasons.values()), "")
