"""The only place where the serving loop meets kvferry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.keys import Keys
from kvferry.types import RequestId


@dataclass(frozen=True)
class Ended:
    """What the transfers that ended since the last look mean to the engine.

    ``loads`` pairs a request with how many of its loaded blocks, from the first, are good.
    ``released_blocks`` are device blocks no transfer touches any more, once per hold.
    """

    loads: tuple[tuple[RequestId, int], ...] = ()
    released_blocks: tuple[int, ...] = ()


class Offloader(Protocol):
    """What the engine asks of whoever keeps its blocks elsewhere."""

    @property
    def has_pending(self) -> bool:
        """Whether transfers are under way."""

    def match(self, request_id: RequestId, keys: Keys, num_device_blocks: int) -> int:
        """How many blocks after the first ``num_device_blocks`` can be loaded; claims them."""

    def load(self, request_id: RequestId, blocks: Sequence[int]) -> None:
        """Fill ``blocks`` with what was matched."""

    def store(self, request_id: RequestId, keys: Keys, blocks: Sequence[int]) -> list[int]:
        """Keep these blocks, whose compute is queued; returns those a transfer will read."""

    def dispatch(self) -> None:
        """Start everything asked for since the last call."""

    def settle(self) -> Ended:
        """Learn what ended."""

    def wait(self, seconds: float) -> None:
        """Wait until something may have ended, at most ``seconds``."""

    def preempt(self, request_id: RequestId) -> None: ...

    def abort(self, request_id: RequestId) -> None: ...

    def finish(self, request_id: RequestId) -> None: ...
