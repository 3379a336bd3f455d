"""Who waits for blocks that come up from a lower level."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvferry.types import TransferId


class Waits:
    """Which requests wait for which transfers. Several may wait for one, and one for several."""

    def __init__(self) -> None:
        self._waiting: dict[TransferId, list[Any]] = {}

    def add(self, request: Any, transfer_ids: Iterable[TransferId]) -> None:
        """The request goes on when these transfers have ended."""
        for transfer_id in transfer_ids:
            self._waiting.setdefault(transfer_id, []).append(request)

    def remove(self, request: Any, transfer_ids: Iterable[TransferId]) -> None:
        """The request waits for these no longer."""
        for transfer_id in transfer_ids:
            others = [other for other in self._waiting[transfer_id] if other is not request]
            if others:
                self._waiting[transfer_id] = others
            else:
                del self._waiting[transfer_id]

    def take(self, transfer_id: TransferId) -> list[Any]:
        """Those who waited for a transfer that has ended, or whose time is up."""
        return self._waiting.pop(transfer_id, [])
