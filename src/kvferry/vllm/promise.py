"""What vLLM was promised and waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvferry.scheduler import Request
from kvferry.types import TransferId
from kvferry.vllm.messages import EarlyShares


class Promise(NamedTuple):
    """A load that vLLM waits for: whose it is, its transfers, the first group's blocks.

    Without transfers nothing will bring it, and vLLM must be told. With ``early`` shares vLLM may
    be told of it before it has landed.
    """

    request_id: str
    ferried: Request | None
    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]
    early: EarlyShares | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its loads are ordered, and were not taken back since."""
        return self.ferried is not None and self.ferried.loading.issuperset(self.transfers)


def sorted_out(
    promises: Iterable[Promise],
) -> tuple[dict[str, tuple[TransferId, ...]], dict[str, tuple[int, ...]], dict[str, EarlyShares]]:
    """By request: the transfers of loads, the blocks nothing will bring, and who is told early."""
    loads: dict[str, tuple[TransferId, ...]] = {}
    undone: dict[str, tuple[int, ...]] = {}
    early: dict[str, EarlyShares] = {}
    for promise in promises:
        if not promise.transfers:
            undone[promise.request_id] = promise.blocks
        elif promise.is_kept:
            loads[promise.request_id] = promise.transfers
            if promise.early is not None:
                early[promise.request_id] = promise.early
    return loads, undone, early
