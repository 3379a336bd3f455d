"""A request whose blocks are on their way to a rank: what vLLM waits to hear of."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.types import TransferId


@dataclass(eq=False)
class AwaitedLoad:
    """Ends when nothing is waited for. ``blocks`` are the device blocks it brings."""

    request_id: str
    waiting: set[TransferId]
    epoch: int
    blocks: set[int] = field(default_factory=set)
    failed: bool = False
