"""What an eviction policy hears late: nobody who waits for a copy waits for its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvferry.types import SlotArray

_MOST_OWED = 16
"""Some half a millisecond of news: whoever comes next would wait for all of it."""


class News(NamedTuple):
    """Slots of which a policy is to be told, by which of its methods, and as of when."""

    at: float
    tell: Callable[[SlotArray], None]
    slots: SlotArray


class ToldLater:
    """Owns the news that are owed. They are told in their order, before anything they hang on
    changes: who follows whom, who asked for what, who may go.

    A policy that raises when told is heard of by who asks (:meth:`require_well`): raised here, it
    would break off whatever a pool is amid, such as the end of somebody's copy.
    """

    __slots__ = ("_failure", "_owed", "_tell", "is_on")

    def __init__(self, tell: Callable[[News], None]) -> None:
        self.is_on = False
        """Whether anything may be owed at all."""
        self._tell = tell
        self._owed: deque[News] = deque()
        self._failure: Exception | None = None

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)

    def owe(self, news: News) -> None:
        self._owed.append(news)
        if len(self._owed) > _MOST_OWED:
            self.catch_up()

    def catch_up(self) -> None:
        """Tell what is owed, now."""
        owed = self._owed
        while owed:
            try:
                self._tell(owed.popleft())
            except Exception as error:
                self._failure = self._failure or error

    def require_well(self) -> None:
        """Raise what the policy raised when it was told, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


# ------------------------------------------------------------------------------------------------
# Bookkeeping that follows once the order is out: who waits for a copy does not wait for it.


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
