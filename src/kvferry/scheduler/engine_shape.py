"""What a scheduler is told of its engine: its groups, its sizes, how it shares and loads blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import InputError
from kvferry.reach import Group


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """As :class:`Scheduler` is asked for: checked when it is made, and the same from then on.

    ``block_bytes`` are those of one device block, by group; zeros where nobody said.
    """

    groups: tuple[Group, ...]
    num_ranks: int
    hash_block_tokens: int | None
    num_device_blocks: int | None
    block_bytes: tuple[int, ...]
    spare_tokens: int
    joins_loads: bool
    loads_early: bool

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"num_ranks must be at least 1, got {self.num_ranks}")
        if not self.groups:
            raise InputError("no groups given; a model has at least one")
        if len(self.block_bytes) != len(self.groups):
            raise InputError(
                f"got {len(self.block_bytes)} block sizes for {len(self.groups)} groups"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tokens of a block, by group."""
        return tuple(group.block_tokens for group in self.groups)

    @property
    def hash_tokens(self) -> int:
        """What one key of a request's chain covers."""
        return self.hash_block_tokens or min(self.sizes)

    @property
    def slot_bytes(self) -> int:
        """What a host slot must hold."""
        return max(self.block_bytes)

    def bound(self, given: int | None, share: float) -> int | None:
        """A bound as given, or this share of the device's blocks; None where neither is known."""
        if given is not None or self.num_device_blocks is None:
            return given
        return max(1, int(self.num_device_blocks * share))
