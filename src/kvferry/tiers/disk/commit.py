"""The thread that makes blocks durable: first their bytes, then the journal's word for them.

At most a second passes from a write to the end of the commit that covers it, if the drive is well.
It also looks at the drive every second, because it is the one that may hang doing so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.errors import KvferryError
from kvferry.tiers.disk.blocks import BlockFile
from kvferry.tiers.disk.figures import Count
from kvferry.tiers.disk.ledger import Ledger
from kvferry.tiers.disk.queue import DriveHealth
from kvferry.tiers.disk.workers import Mark, Shelf
from kvferry.tiers.ipc.status_page import StatusPage


class Committer:
    """Owns the thread; alone commits the ledger. ``forgot`` hears what is forgotten for good."""

    def __init__(
        self,
        shelf: Shelf,
        ledger: Ledger,
        file: BlockFile,
        health: DriveHealth,
        status: StatusPage,
        *,
        check_seconds: float,
        forgot: Callable[[int], None],
    ) -> None:
        self._shelf = shelf
        self._ledger = ledger
        self._file = file
        self._health = health
        self._status = status
        self._check_seconds = check_seconds
        self._forgot = forgot
        self._generation = 0
        self._is_closed = False
        self.began = 0.0
        """When the call to the drive that is under way began; 0: none is."""
        self.thread = threading.Thread(target=self._run, name="kvferry-drive-commit", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def start_at(self, generation: int) -> None:
        self._generation = generation

    def _run(self) -> None:
        check_at, is_tidy = 0.0, False
        while True:
            is_due = self._shelf.wait_until_due(self._check_seconds)
            self.began = time.monotonic()
            if self.began >= check_at:
                self._health.check()
                check_at = self.began + self._check_seconds
            if is_due or self._ledger.is_compacting or not is_tidy:
                is_tidy = self._commit() and not is_due
            self.began = 0.0
            if self._is_closed:
                self._commit()
                return

    def _commit(self) -> bool:
        """Whether all that had happened before is durable now."""
        start = time.monotonic()
        mark = self._shelf.mark()
        try:
            self._file.sync()
        except OSError as error:
            return self._failed(mark, error, are_lost=True)
        try:
            # The order matters: a record must not come before its bytes, nor cover later ones.
            self._ledger.commit(mark.notes)
        except (OSError, KvferryError) as error:
            return self._failed(mark, error, are_lost=False)
        self._health.refuse_writes("journal", "")
        self._status.put(Count.JOURNAL_BYTES, self._ledger.num_journal_bytes)
        if mark.generation != self._generation:
            # Before what came since counts as durable: a mark to forget would take it along.
            self._generation = mark.generation
            self._forgot(mark.generation)
        self._shelf.committed()
        self._status.add(Count.COMMITS, 1)
        self._status.add(Count.COMMIT_MICROSECONDS, int((time.monotonic() - start) * 1e6))
        return True

    def _failed(self, mark: Mark, error: Exception, *, are_lost: bool) -> bool:
        self._shelf.put_back(mark, are_lost=are_lost)
        self._health.refuse_writes("journal", f"what is written cannot be made durable: {error}")
        return False

    def close(self, timeout: float) -> bool:
        """Commit what is left; whether that was done in time."""
        self._is_closed = True
        self._shelf.close()
        self.thread.join(timeout)
        return not self.thread.is_alive()
