"""Bookkeeping that follows once the order is out: who waits for a copy does not wait for it."""

from __future__ import annotations

from collections.abc import Callable


class WrittenLater:
    """Within it what was just done is written down at the end, or before the next thing is done.

    Owns the one piece of bookkeeping that is owed. Whoever enters it asks for nothing meanwhile
    that the bookkeeping would answer. It is written whatever ends the block.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._owed: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        self.catch_up()

    def write(self, write: Callable[[], None]) -> None:
        """Do this now, or later where that is asked for."""
        if self._is_on:
            self.catch_up()
            self._owed = write
        else:
            write()

    def catch_up(self) -> None:
        """Do what is owed, now."""
        owed, self._owed = self._owed, None
        if owed is not None:
            owed()
