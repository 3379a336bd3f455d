"""Which places hold a block that may be read, and when the journal must hear of it.

Between the threads that move blocks and the ledger. A place is empty from the moment a write to it
begins until the write has succeeded, and everything reaches the journal in the order in which it
happened here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvferry.keys import Keys
from kvferry.tiers.disk.ledger import Ledger
from kvferry.tiers.disk.messages import Numbers, Words
from kvferry.tiers.disk.proofs import Proofs
from kvferry.tiers.disk.status import Count, Flags, Status


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in the order of events: what a commit has to cover."""

    notes: int
    generation: int
    places: list[Numbers]
    """Written since the last commit, in the order of their writes."""


class Shelf:
    """Owns the order of events; leaves the medium to the ledger. Any thread may use it."""

    def __init__(self, ledger: Ledger, status: Status, commit_seconds: float) -> None:
        self._ledger = ledger
        self._status = status
        self._commit_seconds = commit_seconds
        self._changed = threading.Condition()  # guards all below
        self._generation = 0
        self._written: list[Numbers] = []
        self._num_written = 0
        self._since = 0.0
        """When the oldest event that no commit covers happened; 0: there is none."""
        self._committing: tuple[int, float] = (0, 0.0)
        """How many blocks the commit under way is for, and the time of the first."""
        self._num_failed_syncs = 0
        self._is_urgent = False
        self._is_closed = False

    def look(self, places: Numbers, generation: int) -> tuple[Flags, Proofs]:
        """Which of these hold a block, and the proofs of what they hold."""
        with self._changed:
            here = self._ledger.present[places]
            if generation != self._generation:
                here[:] = False
            return here, self._ledger.proofs[places]

    def begin(self, places: Numbers) -> int:
        """These are about to be overwritten; the answer is for :meth:`keep`."""
        with self._changed:
            self._ledger.present[places] = False
            return self._num_failed_syncs

    def keep(
        self, places: Numbers, keys: Words, proofs: Proofs, generation: int, begun: int
    ) -> str:
        """These were written whole, since ``begun``; why they are not kept, or nothing."""
        with self._changed:
            if generation != self._generation:
                return "told to forget it meanwhile"
            if begun != self._num_failed_syncs:
                # The kernel may have dropped their bytes with the others', and says so only once.
                return "the drive did not keep what was written meanwhile"
            if len(places):
                self._ledger.note_written(places, Keys(keys), proofs)
                self._written.append(places)
                self._num_written += len(places)
                self._note()
            return ""

    def lose(self, places: Numbers) -> None:
        """Nothing at these places can be read any more."""
        with self._changed:
            if len(places):
                self._ledger.note_lost(places)
                self._note()

    def lose_damaged(self, places: Numbers, proofs: Proofs) -> None:
        """As :meth:`lose`, but for places where something else was written meanwhile."""
        with self._changed:
            same = (self._ledger.proofs[places] == proofs).all(axis=1)
            self.lose(places[same & self._ledger.present[places]])

    def forget(self, generation: int) -> None:
        """Nothing of an earlier generation is here any more; to be committed at once."""
        with self._changed:
            self._generation = generation
            self._ledger.forget()
            self._written.clear()
            self._num_written = 0
            self._is_urgent = True
            self._note()

    def start_at(self, generation: int) -> None:
        """Count generations from here: what was recovered belongs to this one."""
        with self._changed:
            self._generation = generation

    def _note(self) -> None:
        if not self._since:
            self._since = time.monotonic()
            self._changed.notify_all()
        elif self._is_urgent:
            self._changed.notify_all()
        self._show()

    # -- for the one thread that commits ----------------------------------------------------------

    def wait_until_due(self, timeout: float) -> bool:
        """Until something must be committed now, or time is up, or all is over; whether it must."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._since + self._commit_seconds if self._since else end
                if self._is_urgent or (self._since and now >= due):
                    return True
                if self._is_closed or now >= end:
                    return False
                self._changed.wait(min(due, end) - now)

    def mark(self) -> Mark:
        """What has happened until now. The next commit answers for it, or :meth:`put_back` does."""
        with self._changed:
            mark = Mark(self._ledger.num_noted, self._generation, self._written)
            self._committing = (self._num_written, self._since)
            self._written = []
            self._num_written = 0
            self._since = 0.0
            self._is_urgent = False
            return mark

    def put_back(self, mark: Mark, *, are_lost: bool) -> None:
        """The commit failed. ``are_lost``: so may be the bytes, whatever a later call says."""
        with self._changed:
            if are_lost:  # and so may be those of writes that came or began meanwhile
                self._num_failed_syncs += 1
                for places in (*mark.places, *self._written):
                    self._ledger.note_lost(places)
                self._written = []
                self._num_written = 0
            else:
                self._written[:0] = mark.places
                self._num_written += self._committing[0]
            self._since = self._committing[1] or self._since or time.monotonic()
            self._committing = (0, 0.0)
            self._show()

    def committed(self) -> None:
        with self._changed:
            self._committing = (0, 0.0)
            self._show()

    def _show(self) -> None:
        count, since = self._committing
        self._status.put(Count.PENDING, count + self._num_written)
        self._status.put(Count.PENDING_SINCE, int((since or self._since) * 1e6))

    def close(self) -> None:
        """Let the thread that waits go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
