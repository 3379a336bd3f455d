"""For lazy stores: the blocks vLLM will give away next, as its free queue has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.identity import Namespace, adopt
from kvferry.keys import Keys

_GROUP_BYTES = 4
"""A block's hash in vLLM's pool ends in its group's number."""


def next_to_go(
    block: Any, depth: int, namespace: Namespace
) -> Iterator[tuple[int, Keys, list[int]]]:
    """Per group, keys and ids of named blocks among ``depth`` of the free queue, from this on."""
    named: dict[int, tuple[list[bytes], list[int]]] = {}
    for _ in range(depth):
        if block is None or block.next_free_block is None:  # the queue's own end mark
            break
        if block.block_hash is not None and not block.is_null:
            name = bytes(block.block_hash)
            group = int.from_bytes(name[-_GROUP_BYTES:], "big")
            hashes, ids = named.setdefault(group, ([], []))
            hashes.append(name[:-_GROUP_BYTES])
            ids.append(block.block_id)
        block = block.next_free_block
    for group, (hashes, ids) in named.items():
        yield group, adopt(namespace, hashes), ids


def num_allocated(scheduler_output: Any) -> int:
    """Device blocks that requests were given in this step."""
    tables = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
    tables += [ids for ids in scheduler_output.scheduled_cached_reqs.new_block_ids if ids]
    return sum(len(ids) for table in tables for ids in table)
