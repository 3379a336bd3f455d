"""Requests whose blocks are on their way to a rank: what vLLM waits to hear of, and hears."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.types import TransferId
from kvferry.vllm.messages import EarlyShares


@dataclass(eq=False)
class AwaitedLoad:
    """Ends when nothing is waited for. ``blocks`` are the device blocks it brings.

    With ``early`` shares vLLM may be told before it lands: when so much of it has landed.
    """

    request_id: str
    waiting: set[TransferId]
    epoch: int
    blocks: set[int] = field(default_factory=set)
    failed: bool = False
    early: EarlyShares | None = None
    is_told: bool = False
    transfers: frozenset[TransferId] = field(init=False)

    def __post_init__(self) -> None:
        self.transfers = frozenset(self.waiting)


class ToldLoads:
    """What vLLM is told of loads at the end of a step."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        """Requests that need not wait any longer, whether their blocks came or not."""
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def fail(self, request_id: str, blocks: Iterable[int]) -> None:
        self.arrived.add(request_id)
        self._failed.add(request_id)
        self._invalid.update(blocks)

    def take_arrived(self) -> set[str]:
        arrived, self.arrived = self.arrived, self.arrived and set()
        return arrived

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, self._failed and set()
        return failed

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, self._invalid and set()
        return invalid
