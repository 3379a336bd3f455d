"""Where chains part in a store of packs: a block that two go on from must end an object.

::

    k6 k7 k8 k9 b0 b1 b2 b3      one object, named b3
               \
                a0 a1 a2 a3      another. Who knows only this way finds k6 to k9 under no name
    k6 k7 k8 k9                  of his: so these are written once more, and named k9
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.types import Key, RunNumbers, SlotArray

Flags = npt.NDArray[np.bool_]

_MOST = 1 << 16


class Joints:
    """Which blocks of one level are known to end an object, and which should once they are sent.

    Owns that, for so many blocks; what it has forgotten is at worst written once more.
    """

    def __init__(self, capacity: int = _MOST) -> None:
        self._capacity = capacity
        self._ends: dict[Key, None] = {}
        self._awaited: dict[Key, None] = {}

    def heard(self, keys: Keys, there: Flags, runs: RunNumbers | None) -> None:
        """The level was asked for chains: what is there, and not what follows, ends an object."""
        if runs is None:
            return
        goes_on = np.zeros(len(keys), dtype=bool)
        goes_on[:-1] = there[1:] & (runs[1:] == runs[:-1])
        self._note(self._ends, keys.take(there & ~goes_on))

    def cut(self, keys: Keys, starts: SlotArray, before: Sequence[Key | None]) -> RunNumbers:
        """The runs to write these blocks as, of which these follow each other.

        Each ends an object. ``before`` are the keys before the runs that begin at ``starts``.
        """
        self._note(self._awaited, (key for key in before if key is not None))
        is_first = np.zeros(len(keys), dtype=bool)
        is_first[starts] = True
        awaited = [at + 1 for at, key in enumerate(keys) if key in self._awaited]
        is_first[[at for at in awaited if at < len(keys)]] = True
        self._note(self._ends, keys.take(np.append(is_first[1:], True)))
        return np.cumsum(is_first)

    def ends(self, key: Key) -> bool:
        """Whether an object has its name, as far as is known."""
        return key in self._ends

    def lost(self, keys: Keys) -> None:
        """These are not there, or not under their names."""
        for key in keys:
            self._ends.pop(key, None)

    def clear(self) -> None:
        self._ends.clear()
        self._awaited.clear()

    def _note(self, where: dict[Key, None], keys: Iterable[Key]) -> None:
        for key in keys:
            where.pop(key, None)
            where[key] = None
        while len(where) > self._capacity:
            del where[next(iter(where))]
