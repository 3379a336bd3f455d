"""What a request's verbs answer with, and what an engine tells of its device blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.answers import DeviceBlocks
from kvferry.errors import InputError
from kvferry.integers import integers
from kvferry.keys import Keys
from kvferry.types import SlotArray, TransferId

NO_BLOCK = -1
"""In a block table: the engine keeps no device block here (outside a window, say)."""

BlockTable = Sequence[int] | npt.NDArray[np.integer]
"""One group's device blocks of a request, by position."""


class Ordered(NamedTuple):
    """One group's part of a load or store: hold ``blocks`` until ``settle`` releases them.

    ``positions`` are the blocks' places in the table of ``request`` (None where the engine offered
    them), ``keys`` their names in the pool. The stores of one group and step travel together, so
    several may name one ``transfer``.
    """

    group: int
    blocks: SlotArray
    transfer: TransferId
    positions: npt.NDArray[np.integer] | range
    keys: Keys
    request: Any = None


class EngineBlocks(Protocol):
    """What an engine tells of its device blocks, so that ended requests can be stored late.

    ``request`` is the scheduler's own; the engine finds its own by the chain it gave it.
    """

    @property
    def evicts(self) -> bool:
        """Whether the next blocks the engine gives away are some its own cache knows."""

    @property
    def num_free(self) -> int:
        """Blocks that the engine could give to a request now."""

    @property
    def num_held(self) -> int:
        """Blocks that copies, and requests which have ended, keep from the engine."""

    def tables(self, request: Any, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """A live request's tables for its first tokens; below ``from_token`` they may be blank."""

    def remains(self, request: Any, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """The same of one that has ended: whatever the engine still has of its blocks."""


def checked_blocks(
    group: int, table: BlockTable, blocks: range, *, least: int = NO_BLOCK
) -> npt.NDArray[np.int64]:
    """These places of a block table, as numbers of our own; refuses what is no block number.

    A copy: the engine may write its table while the blocks are still being read or filled.
    """
    found = integers(table[blocks.start : blocks.stop], "device blocks").copy()
    if found.size and int(found.min()) < least:
        or_none = f", or NO_BLOCK ({NO_BLOCK})" if least == NO_BLOCK else ""
        raise InputError(
            f"group {group}'s block table holds {int(found.min())}; a block is 0 or more{or_none}"
        )
    return found


def require_tables(tables: Sequence[BlockTable], num_groups: int) -> None:
    """Refuse where there is not one table for each group."""
    if len(tables) != num_groups:
        raise InputError(
            f"got {len(tables)} block tables for {num_groups} groups; give one per group"
        )


def held_blocks(
    tables: Sequence[BlockTable], block_tokens: Sequence[int], from_token: int
) -> tuple[DeviceBlocks, ...]:
    """The device blocks of these tables from a token on, by group."""
    found = []
    for group, (table, size) in enumerate(zip(tables, block_tokens, strict=True)):
        blocks = np.asarray(table, dtype=np.int64)[from_token // size :]
        found.append(DeviceBlocks(group, blocks[blocks != NO_BLOCK]))
    return tuple(found)
