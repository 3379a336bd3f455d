"""What may be written to a level at all: blocks asked for often enough, and so many bytes a day."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.config import Config
from kvferry.keys import Keys
from kvferry.level_kinds import DISK, REMOTE
from kvferry.policy import SeenOften
from kvferry.types import TierName

_DAY = 86400.0
_BURST = 8
"""One part in so many of a day's bytes may be written at once; the others come over the day."""

_LEAST_KEYS, _MOST_KEYS = 1 << 18, 1 << 20
"""So many different blocks are told apart among all that were asked for lately, in 4 to 16 MiB."""

_TIMES = {"evicted": 1, "asked-twice": 2}
"""How often a block must have been asked for, by the settings' words."""


class WriteBudget:
    """Bytes that may be written, so that no 24 hours see more than a day's. Owns what is left.

    ::

        left at the start: 1/8 of a day's;  comes back: 7/8 of a day's each day

    Counted from the start: a restart begins anew.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._most = bytes_per_day / _BURST
        self._rate = (bytes_per_day - self._most) / _DAY
        self._left = self._most
        self._at = now

    def left(self, now: float) -> int:
        """Bytes that may be written now."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return int(self._left)

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes


class Gate:
    """Lets blocks through to one level. Owns how often keys were asked for, and the budget."""

    def __init__(
        self,
        *,
        times: int = 1,
        num_keys: int = 1,
        bytes_per_day: int | None = None,
        block_bytes: int = 0,
        now: float = 0.0,
    ) -> None:
        """``block_bytes`` are those that a block costs on all ranks together."""
        self._seen = SeenOften(times, num_keys=min(max(num_keys, _LEAST_KEYS), _MOST_KEYS))
        self._block_bytes = block_bytes
        self._budget = WriteBudget(bytes_per_day, now) if bytes_per_day is not None else None

    def see(self, keys: Keys) -> None:
        """A request asked for these blocks."""
        self._seen.see(keys)

    def lets(self, keys: Keys, now: float) -> npt.NDArray[np.bool_]:
        """For each of these, from the first on, whether it may be written now."""
        lets = self._seen.admits(keys)
        if self._budget is not None and self._block_bytes:
            room = max(0, self._budget.left(now)) // self._block_bytes
            lets &= np.cumsum(lets) <= room
        return lets

    def wrote(self, num_blocks: int) -> None:
        """So many were sent."""
        if self._budget is not None:
            self._budget.spend(num_blocks * self._block_bytes)


def times_asked(config: Config, level: TierName) -> int:
    """How often a block must have been asked for to go to this level."""
    after = {DISK: config.disk_after, REMOTE: config.remote_after}.get(level, "evicted")
    return _TIMES[after]


def gate_of(
    config: Config, level: TierName, *, num_keys: int | None, block_bytes: int, now: float
) -> Gate | None:
    """What the settings let through to a level; None where that is everything.

    ``num_keys``: about how many blocks host memory and the level hold together; None: any number.
    """
    times = times_asked(config, level)
    per_day = config.disk_write_per_day if level == DISK else None
    if times == 1 and per_day is None:
        return None
    return Gate(
        times=times,
        num_keys=_MOST_KEYS if num_keys is None else num_keys,
        bytes_per_day=per_day,
        block_bytes=block_bytes,
        now=now,
    )
