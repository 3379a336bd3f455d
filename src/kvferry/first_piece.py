"""How much of a large store goes ahead, while room is made for the rest of it.

::

    one piece     |look up, evict, take slots      |▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|
    ahead         |look up, take|▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|
                                |evict, take slots   |

A pool that is full keeps a few slots free, side by side. What fits them needs no decision about who
goes, and is copied while that is made. With no such slots, or none to be made, there is one piece.
"""

from __future__ import annotations

from kvferry.keys import Keys
from kvferry.scheduler import Scheduler

LEAST_BYTES, MOST_BYTES = 8 << 20, 48 << 20
"""A copy of the least takes about as long as ordering one more; of the most, longer than anybody
takes to find room, and more would only scatter what is kept free for others."""
_LEAST_TIMES = 12
"""As large as the least a store must be: with two pieces its slots are scattered further, which
look-ups and loads pay for. At 64 MB they paid as much as was gained, at 268 a tenth of it."""
_MOST_RUNS = 1
"""Of free slots: with more, a conversation would be scattered further whenever it is stored."""


class FirstPiece:
    """Owns only its bounds; the slots are the pool's, of one group's blocks of ``block_bytes``."""

    def __init__(
        self,
        scheduler: Scheduler,
        block_bytes: int,
        *,
        least: int = LEAST_BYTES,
        most: int = MOST_BYTES,
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._least = -(-least // block_bytes)
        self._most = most // block_bytes

    def num_blocks(self, keys: Keys, first: int) -> int:
        """How many of the blocks from ``first`` on go ahead of the others; 0 where all go as one.

        So it is where there is room for all of them, or where the first is kept already: what is
        new begins later then, and looking for it twice takes longer than is gained.
        """
        pool, num_new = self._pool, len(keys.array) - first
        if num_new < _LEAST_TIMES * self._least or num_new <= pool.num_free or pool.is_divided:
            return 0
        count = min(num_new // 2, self._most, pool.num_free_together(_MOST_RUNS))
        if count < self._least or self._scheduler.knows(keys, first):
            return 0
        # Of the whole store, before a byte of it moves: each piece alone could not see it.
        pool.require_distinct(keys)
        return count
