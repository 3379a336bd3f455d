"""A level that keeps several blocks of a chain in one object, which has the name of the last.

It finds a block only for who knows the chain as far as that name. So its "yes" is true for
everybody; but its "no" says nothing to a chain that goes on differently, and is believed by nobody
but who asked.
"""

from __future__ import annotations

import numpy as np

from kvferry.keys import Keys
from kvferry.scheduler.joints import Joints
from kvferry.scheduler.level import (
    REMEMBER_KEYS,
    REMEMBER_SECONDS,
    Flags,
    KeyedLevel,
    WriteMode,
)
from kvferry.types import RunNumbers, TierName


class PackingLevel(KeyedLevel):
    """A keyed level with ``most_in_one`` blocks in one object at most. Owns where objects end."""

    joints: Joints

    def __init__(
        self,
        name: TierName,
        write: WriteMode = WriteMode.SPILL,
        *,
        most_in_one: int,
        remember: float = REMEMBER_SECONDS,
        capacity: int = REMEMBER_KEYS,
    ) -> None:
        super().__init__(name, write, remember=remember, capacity=capacity)
        self.most_in_one = most_in_one
        self.joints = Joints()

    def answered(
        self,
        keys: Keys,
        there: Flags,
        now: float,
        *,
        in_time: bool = True,
        runs: RunNumbers | None = None,
    ) -> None:
        """What was not said in time is a "no" for everybody: it is the store that is slow."""
        if in_time:
            self.num_asked += int(np.count_nonzero(~there))
            self._note_not_found(keys.take(~there), now)
            self.joints.heard(keys, there, runs)
            keys = keys.take(there)
        # Several chains may have been asked for in one question, with the same beginning.
        _, first = np.unique(keys.array[:, 0], return_index=True)
        keys = keys.take(np.sort(first))
        super().answered(keys, np.full(len(keys), in_time), now)

    def _note_not_found(self, keys: Keys, now: float) -> None:
        """An asker who knows one way to go on did not find these. They may be there for others.

        But our having written them helps him nothing: with what he computes they are written again,
        for those who go his way. And who removes objects by age does not tell us.
        """
        self.joints.lost(keys)
        self._answers.doubt_sent(keys.take(~self._answers.there(keys, now)))

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        self.joints.lost(keys.take(~ok))
        super().moved(keys, ok, upward=upward, now=now)

    def dropped(self, keys: Keys) -> None:
        self.joints.lost(keys)
        super().dropped(keys)

    def reset(self) -> None:
        self.joints.clear()
        super().reset()
