"""Transfers that are begun by the thread that submits them, since it waits for them anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.device.engine.lane import Lane

SMALL_BYTES = 80 << 20
"""What takes a few pieces only: they are queued sooner than another thread hears of them. Of more
the first are queued at once, and while they are copied the thread gets there."""


class BegunHere:
    """What ``begun_here`` enters. Made once: it is entered for every transfer.

    Threads hear of it last: they would take turns with us at the interpreter.
    """

    def __init__(self, lanes: Iterable[Lane], order: Callable[[], None] | None) -> None:
        self._lanes = tuple(lanes)
        self._order = order

    def __enter__(self) -> None:
        for lane in self._lanes:
            lane.hold()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for lane in self._lanes:
                lane.begin(SMALL_BYTES)
            if self._order is not None and kind is None:
                self._order()
        finally:
            for lane in self._lanes:
                lane.release()
