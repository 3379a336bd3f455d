"""Device blocks that copies still need, counted in vLLM's own block pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvferry.answers import DeviceBlocks

_NEXT = 64
"""So many of the next free blocks are looked at, or an eighth of all."""


class BlockHolds:
    """Keeps vLLM from giving a block to someone else while a copy reads or writes it.

    Owns one reference per mention, so that a request may finish at once while its stores go on;
    leaves the blocks' meaning to vLLM.
    """

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._held: Counter[int] = Counter()
        self._evicts: bool | None = None

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM could give to a request now."""
        return int(self._pool.get_num_free_blocks())

    def begin_step(self) -> None:
        """What vLLM is about to give away is looked at anew, at most once before the next call.

        Many ask in a step: every request that comes or goes.
        """
        self._evicts = None

    @property
    def evicts(self) -> bool:
        """Whether one of the next blocks that vLLM gives away is one its prefix cache knows.

        Not the very next: ended requests put their last, nameless blocks at the queue's head. And
        where no block is left, the next one comes from a request that ends.
        """
        if self._evicts is None:
            self._evicts = self._gives_cached_blocks()
        return self._evicts

    def _gives_cached_blocks(self) -> bool:
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(min(_NEXT, self._pool.num_gpu_blocks // 8)):
            if block is None or block.next_free_block is None:  # the queue's own end mark
                return True
            if block.block_hash is not None:
                return True
            block = block.next_free_block
        return False

    @property
    def keeps_free_blocks(self) -> bool:
        """Whether some block is in use by copies alone: it is free once they have ended."""
        blocks = self._pool.blocks
        return any(blocks[number].ref_cnt == count for number, count in self._held.items())

    def take(self, ordered: Iterable[DeviceBlocks]) -> None:
        for mention in ordered:
            numbers = mention.blocks.tolist()
            self._pool.touch(self._blocks(numbers))
            self._held.update(numbers)

    def drop(self, released: Iterable[DeviceBlocks]) -> None:
        for mention in released:
            numbers = mention.blocks.tolist()
            # Backwards: the end of a conversation is the first to be given away.
            self._pool.free_blocks(self._blocks(numbers)[::-1])
            self._forget(numbers)

    def drop_all(self) -> None:
        """Only once no copy runs: we are out of service and the ranks have drained."""
        self._pool.free_blocks(self._blocks(list(self._held.elements())))
        self._held.clear()

    def _forget(self, numbers: list[int]) -> None:
        # By hand: a load has a thousand blocks, and subtracting counters takes twice as long.
        held = self._held
        for number in numbers:
            count = held[number] - 1
            if count:
                held[number] = count
            else:
                held.pop(number)  # not del, which a Counter does in Python

    def _blocks(self, numbers: list[int]) -> list[Any]:
        blocks = self._pool.blocks
        return [blocks[number] for number in numbers]
