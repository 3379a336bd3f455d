"""More than one level below the device: tiers under the host, fed from it and read through it.

::

    device  <-- load --  host  <-- promote --  lower
            -- store -->       ---- spill --->

A block found only below is first promoted: copied to a host slot like any block that arrives, in
pieces that become matchable as they land. Blocks go down either when they are stored
(write-through) or when the host is about to evict them (spill); a block that is already below is
not copied again, and evicting it from the host costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.lease import Purpose
from kvferry.policy import Watermark
from kvferry.pool import Pool
from kvferry.scheduler.outbox import Outbox
from kvferry.types import HOST, Key, TierName, TransferId

_PIECE_SLOTS = 32
"""A promotion travels in pieces of this size, so that the first can be used before the last."""

_CLEAN_SHARE = 8
"""With spilling, the coldest slot in so many of the host has a copy below before it is needed."""

_PROMOTING_SHARE = 4
"""Promotions under way may claim one slot in so many of the host: they must not flush it."""


class WriteMode(Enum):
    """When the host's blocks are copied to a lower level."""

    THROUGH = "through"  # as soon as they are stored
    SPILL = "spill"  # when the host is about to evict them


@dataclass(frozen=True, eq=False)
class Level:
    """One tier below the host: its name on the workers' side, and its slots."""

    name: TierName
    pool: Pool
    write: WriteMode = WriteMode.SPILL


@dataclass(eq=False)
class _Promotion:
    """Blocks on their way up. One that is ``late`` keeps its slots, but nobody waits for it."""

    keys: Keys
    late: bool = False


class LowerLevels:
    """What is below the host: finds blocks there, brings them up, sends them down.

    Owns the levels' pools and the promotion budget; orders go to the outbox like all others.
    """

    def __init__(self, host: Pool, levels: Sequence[Level], outbox: Outbox) -> None:
        self.levels = tuple(levels)
        self._host = host
        self._outbox = outbox
        self._promoting: dict[TransferId, _Promotion] = {}
        self._most_promoting = max(1, host.num_slots // _PROMOTING_SHARE)
        self._watermark = Watermark(
            least=host.num_slots // _CLEAN_SHARE, most=max(1, host.num_slots // 2)
        )
        self._num_reserved = host.num_reserved

    def __bool__(self) -> bool:
        return bool(self.levels)

    def cached(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether any lower level can be read for it."""
        found = np.zeros(len(keys), dtype=bool)
        for level in self.levels:
            found |= level.pool.cached(keys)
        return found

    @property
    def room(self) -> int:
        """How many more host slots promotions may claim now."""
        return self._most_promoting - sum(
            len(promotion.keys) for promotion in self._promoting.values()
        )

    def promote(self, keys: Keys, *, parent: Key | None, chained: bool) -> set[TransferId]:
        """Bring up those of a run of blocks that the host lacks, as far as the budget goes.

        ``parent`` is the key before the run. Returns the transfers to wait for, also those that
        others began: none if the budget is spent or the host has no room.
        """
        transfers = self._bringing(keys)
        start = 0
        while start < len(keys):
            ahead = keys[start : start + min(self.room, _PIECE_SLOTS)]
            if len(ahead) and self._host.known(ahead).all():
                parent = ahead[len(ahead) - 1]
                start += len(ahead)
                continue
            piece = self._liftable(ahead)
            transfer_id = self._lift(*piece, parent, chained) if piece is not None else None
            if piece is None or transfer_id is None:
                break
            transfers.add(transfer_id)
            if not self._host.known(piece[1]).all():
                break  # the host had no room for all of it: what follows would not be reached
            parent = piece[1][len(piece[1]) - 1]
            start += len(piece[1])
        return transfers

    def _bringing(self, keys: Keys) -> set[TransferId]:
        """The promotions under way that bring any of these blocks."""
        if not self._promoting:
            return set()
        coming = keys.take(self._host.known(keys) & ~self._host.cached(keys)).array[:, 0]
        return {
            transfer_id
            for transfer_id, promotion in self._promoting.items()
            if not promotion.late and np.isin(coming, promotion.keys.array[:, 0]).any()
        }

    def _liftable(self, keys: Keys) -> tuple[Level, Keys] | None:
        """The longest start of a run that one level can complete, and that level."""
        known = self._host.known(keys)
        for level in self.levels:
            complete = known | level.pool.cached(keys)
            length = len(keys) if complete.all() else int(complete.argmin())
            if not known[:length].all():
                return level, keys[:length]
        return None

    def _lift(
        self, level: Level, keys: Keys, parent: Key | None, chained: bool
    ) -> TransferId | None:
        writing = self._host.reserve(keys, parent=parent, chained=chained)
        if writing is None:
            return None
        reading = level.pool.pin(keys.take(writing.positions))
        assert reading is not None
        transfer_id = self._outbox.move(level.name, HOST, reading, writing)
        self._promoting[transfer_id] = _Promotion(keys.take(writing.positions))
        return transfer_id

    def overdue(self, transfer_id: TransferId) -> None:
        """A transfer's time is up: its deadline has ended all waiting, so nobody may begin to."""
        if transfer_id in self._promoting:
            self._promoting[transfer_id].late = True

    def landed(self, transfer_id: TransferId) -> None:
        """A transfer ended; if it was a promotion its share of the budget is free again."""
        self._promoting.pop(transfer_id, None)

    def write_through(self, keys: Keys, *, parent: Key | None, chained: bool) -> None:
        """These blocks were just stored in the host, behind ``parent`` if they are a chain.

        What follows a block that no level has is left out: alone it would serve nobody.
        """
        if parent is not None and not self._know(Keys.from_bytes((parent,))):
            return
        for level in self.levels:
            if level.write is WriteMode.THROUGH and len(keys):
                self._send_down(level, keys, parent=parent, chained=chained)

    def _know(self, key: Keys) -> bool:
        return any(level.pool.known(key)[0] for level in self.levels)

    def spill(self) -> None:
        """Once a step: copy down what the host would evict next, ahead of need.

        A burst that outruns the watermark evicts blocks that have no copy below yet.
        """
        if not self.levels:
            return
        self._watermark.demand(self._host.num_reserved - self._num_reserved)
        self._num_reserved = self._host.num_reserved
        wanted = self._watermark.depth - self._host.num_free
        for level in self.levels:
            if level.write is WriteMode.SPILL and wanted > 0:
                coldest = self._host.coldest(wanted)[::-1]
                missing = coldest.take(~level.pool.known(coldest))
                # No chain: ends come before beginnings here, as they should go later on.
                self._send_down(level, missing, parent=None, chained=False)

    def _send_down(self, level: Level, keys: Keys, *, parent: Key | None, chained: bool) -> None:
        """Copy those of the host's blocks to a level that it lacks and has room for."""
        writing = level.pool.reserve(keys, parent=parent, chained=chained)
        if writing is not None:
            reading = self._host.pin(keys.take(writing.positions), Purpose.COPY)
            assert reading is not None
            self._outbox.move(HOST, level.name, reading, writing)

    def reset(self) -> None:
        for level in self.levels:
            level.pool.reset()

    def check_integrity(self) -> None:
        for level in self.levels:
            level.pool.check_integrity()
