"""Device blocks that copies still need, counted in vLLM's own block pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvferry.answers import DeviceBlocks


class BlockHolds:
    """Keeps vLLM from giving a block to someone else while a copy reads or writes it.

    Owns one reference per mention, so that a request may finish at once while its stores go on;
    leaves the blocks' meaning to vLLM.
    """

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._held: Counter[int] = Counter()

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM could give to a request now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def evicts(self) -> bool:
        """Whether the next block that vLLM gives to a request is one its prefix cache knows."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        return block is not None and block.block_hash is not None

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
                del held[number]

    def _blocks(self, numbers: list[int]) -> list[Any]:
        blocks = self._pool.blocks
        return [blocks[number] for number in numbers]
