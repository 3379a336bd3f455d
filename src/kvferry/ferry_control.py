"""What is done with a ferry's blocks besides loading and storing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import InputError
from kvferry.hints import Hints, read_seconds
from kvferry.keys import Keys
from kvferry.ownership import OneThread
from kvferry.scheduler import Scheduler
from kvferry.scheduler.control import Acted

Said = Hints | Mapping[str, Any] | None
"""What is known of a request, as callers give it."""


def read_hints(said: Said) -> Hints | None:
    """In our form; None where nothing was said."""
    return said if said is None or isinstance(said, Hints) else Hints.read(said)


class FerryControl:
    """Actions by a request's keys. Owns nothing: the ferry does.

    Each says how much it found and did, and what it did not do, and why (:class:`Acted`).
    """

    _owner: OneThread
    _scheduler: Scheduler

    def _send_plan(self) -> None:
        raise NotImplementedError

    def lookup(self, keys: Keys) -> Acted:
        """What of these blocks is where, without claiming or moving any."""
        self._owner.require()
        return self._scheduler.control.lookup(_checked(keys))

    def hint(self, keys: Keys, hints: Hints | Mapping[str, Any]) -> Acted:
        """Say something about blocks that are here: that a conversation is over, or goes on."""
        self._owner.require()
        said = read_hints(hints)
        if said is None:
            raise InputError("hints must be given; see kvferry.hints.Hints")
        return self._scheduler.control.hint(_checked(keys), said)

    def pin(self, keys: Keys, seconds: float | str | None = None) -> Acted:
        """Let these blocks stay so long, or until they are unpinned, reset or closed.

        At most ``Config.keep_share`` of each level is held, the beginning of a request first.
        """
        self._owner.require()
        return self._scheduler.control.pin(_checked(keys), _seconds(seconds))

    def unpin(self, keys: Keys) -> Acted:
        """Let these blocks go as all others: pins, keeps and priorities of them are forgotten."""
        self._owner.require()
        return self._scheduler.control.unpin(_checked(keys))

    def prefetch(self, keys: Keys, *, keep: float | str | None = None) -> Acted:
        """Bring these blocks up to host memory before they are asked for, and keep them so long.

        They come with :meth:`Ferry.poll`.
        """
        self._owner.require()
        done = self._scheduler.control.prefetch(_checked(keys), _seconds(keep))
        self._send_plan()
        return done

    def drop(self, keys: Keys) -> Acted:
        """Forget these blocks on every level, but for those that other requests go on from."""
        self._owner.require()
        return self._scheduler.control.drop(_checked(keys))


def _checked(keys: Keys) -> Keys:
    if not isinstance(keys, Keys):
        raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
    return keys


def _seconds(seconds: float | str | None) -> float | None:
    return None if seconds is None else read_seconds("seconds", seconds)
