"""Stands in for vLLM's block pool, as far as the connector and its tests use it.

``tests/connector`` runs with vLLM's own where vLLM is installed, and with this one elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Block:
    """A device block, and its neighbours while it is free."""

    __slots__ = (
        "block_hash",
        "block_id",
        "is_null",
        "next_free_block",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None


class FreeQueue:
    """Free blocks between two marks, in the order in which they are given away."""

    def __init__(self) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        _link(self.fake_free_list_head, self.fake_free_list_tail)
        self.num_free_blocks = 0

    def __iter__(self) -> Iterator[Block]:
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            following = block.next_free_block
            yield block
            block = following

    def put_first(self, blocks: Sequence[Block]) -> None:
        first = self.fake_free_list_head.next_free_block
        assert first is not None
        self._put(blocks, self.fake_free_list_head, first)

    def put_last(self, blocks: Sequence[Block]) -> None:
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None
        self._put(blocks, last, self.fake_free_list_tail)

    def _put(self, blocks: Sequence[Block], before: Block, after: Block) -> None:
        for block in blocks:
            _link(before, block)
            before = block
        _link(before, after)
        self.num_free_blocks += len(blocks)

    def take(self, block: Block) -> None:
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not free")
        _link(before, after)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1


def _link(first: Block, second: Block) -> None:
    first.next_free_block, second.prev_free_block = second, first


class BlockPool:
    """Owns the blocks, who is free, and which content is where. Block 0 is nobody's."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        assert enable_caching, "blocks have no names without it"
        self.num_gpu_blocks = num_gpu_blocks
        self.hash_block_size = hash_block_size
        self.blocks = [Block(number) for number in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeQueue()
        self.free_block_queue.put_last(self.blocks[1:])
        self._named: dict[bytes, dict[int, Block]] = {}

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """The next to go; what they held is forgotten."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"{num_blocks} of {self.get_num_free_blocks()} free blocks")
        taken = [block for block, _ in zip(self.free_block_queue, range(num_blocks), strict=False)]
        for block in taken:
            assert block.ref_cnt == 0
            self.free_block_queue.take(block)
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        """One more user of each."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.take(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """One user less of each. Nameless ones go first, for they are of no use to anyone."""
        nameless: list[Block] = []
        named: list[Block] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (nameless if block.block_hash is None else named).append(block)
        self.free_block_queue.put_first(nameless)
        self.free_block_queue.put_last(named)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        """A block for each group, or None if one of them has none."""
        found = []
        for group in kv_cache_group_ids:
            same = self._named.get(_name(block_hash, group))
            if not same:
                return None
            found.append(next(iter(same.values())))
        return found

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Name a request's blocks by its hashes. Several may have one name."""
        per_block = block_size // self.hash_block_size
        for at in range(num_cached_blocks, num_full_blocks):
            block = blocks[at]
            if block.is_null:
                continue
            assert block.block_hash is None, f"block {block.block_id} has a name"
            block.block_hash = _name(
                request.block_hashes[(at + 1) * per_block - 1], kv_cache_group_id
            )
            self._named.setdefault(block.block_hash, {})[block.block_id] = block

    def evict_blocks(self, block_ids: set[int]) -> None:
        """These hold nothing that is still of use, whoever has them."""
        for number in block_ids:
            self._forget(self.blocks[number])

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            same = self._named[block.block_hash]
            del same[block.block_id]
            if not same:
                del self._named[block.block_hash]
            block.block_hash = None


def _name(block_hash: bytes, group: int) -> bytes:
    return block_hash + group.to_bytes(4, "big")
