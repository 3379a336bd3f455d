"""Writes to what outlives the server: held until the weights are known to be those it began with.

A store on disk is named by the weights that the server had when it opened it. Blocks of others must
not get in under names that the next server will ask for, or it would be served them. So a write
waits until sums over the weights have been taken that are younger than its blocks::

    step n    write ordered: held
    step m    sums marked: some times a second, all that is held
    step m+1  the same weights ──> written; or others ──> refused, and all is forgotten

After a reset blocks have names that no other life asks for, so nothing has to be held then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvferry.config import Config
from kvferry.types import Transfer

LASTING_EPOCH = 0
"""Its blocks have the same names in every life of a server; those of later epochs do not."""

_LOOK_SECONDS = 0.05
"""A look takes the thread that runs the model 0.2 ms."""


class LastingWrites:
    """Owns the writes that are held, no tier."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.names = frozenset(spec.name for spec in config.all_levels if spec.outlives_us)
        self._clock = clock
        self._held: list[Transfer] = []
        self._marked: list[Transfer] = []
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._held) + len(self._marked)

    def hold(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Keep those that write to what outlives us; returns the others."""
        self._held += [transfer for transfer in transfers if transfer.dst in self.names]
        return [transfer for transfer in transfers if transfer.dst not in self.names]

    def is_due(self) -> bool:
        """Whether it is time to look at the weights for what is held."""
        return bool(self._held) and self._clock() >= self._look_at

    def note_mark(self) -> None:
        """Sums of the weights as they are now will be taken."""
        self._marked += self._held
        self._held = []
        self._look_at = self._clock() + _LOOK_SECONDS

    def take_marked(self) -> tuple[Transfer, ...]:
        """Those whose blocks are older than the last sums."""
        marked, self._marked = tuple(self._marked), []
        return marked

    def take_all(self) -> tuple[Transfer, ...]:
        self.note_mark()
        return self.take_marked()
