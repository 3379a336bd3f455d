"""What vLLM was promised and waits for."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.scheduler import Request
from kvferry.types import TransferId


class Promise(NamedTuple):
    """A load that vLLM waits for: whose it is, its transfers, the first group's blocks.

    Without transfers nothing will bring it, and vLLM must be told.
    """

    request_id: str
    ferried: Request | None
    transfers: tuple[TransferId, ...]
    blocks: tuple[int, ...]

    @property
    def is_kept(self) -> bool:
        """Whether its loads are ordered, and were not taken back since."""
        return self.ferried is not None and self.ferried.loading.issuperset(self.transfers)
