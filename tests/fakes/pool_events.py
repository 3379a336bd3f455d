"""What left a pool, as a reader of its event log sees it."""

from __future__ import annotations

from kvferry.cache.events import EventKind
from kvferry.cache.pool import Pool
from kvferry.core.keys import Key


class Evictions:
    """Collects the keys of evicted blocks. ``keys`` grows by those of each :meth:`read`."""

    def __init__(self, pool: Pool) -> None:
        self._reader = pool.log.reader((EventKind.EVICT,))
        self.keys: list[Key] = []

    def read(self) -> list[Key]:
        """All keys so far, those evicted since the last call at the end."""
        for event in self._reader.take():
            self.keys.extend(event.all_keys())
        return self.keys

    def clear(self) -> None:
        self.read()
        self.keys.clear()
