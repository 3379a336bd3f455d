"""What a connector's session needs of its engine: facts at start, block tables, held blocks.

To support another engine, implement :class:`EngineAdapter` and fill in a :class:`SessionSetup`;
the session does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention, Group
from kvferry.config import Config
from kvferry.core.keys import KeyChain, Keys
from kvferry.hints import Hints
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import BlockTable, EngineBlocks, Ordered
from kvferry.types import DeviceBlocks


class EngineRequest(Protocol):
    """The engine's own request; the engine updates these numbers while the request lives."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int


class EngineKeys(KeyChain, Protocol):
    """The keys of one of the engine's requests."""

    request: Any
    """The engine's own, for events; None once it has ended and nobody listens."""
    had_blocks: Sequence[Sequence[int]]
    """The device blocks, by group, of a request that has ended."""


class EngineAdapter(EngineBlocks, Protocol):
    """The engine's device blocks and requests, as the scheduler side sees them.

    The engine gives a held block to no request, so a request may end while its blocks are copied.
    """

    hash_tokens: int
    """Tokens that one key of a request's chain covers."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def keeps_free_blocks(self) -> bool:
        """Whether some block is in use only by copies, and so is free once they have ended."""

    def describe(self, request: Any, *, has_tenants: bool) -> tuple[EngineKeys, Hints | None, str]:
        """Return a request's keys; its hints, with its tenant if asked for; why any are ignored."""

    def conversation(self, request: Any) -> str:
        """Return the client's name for the request's conversation; empty if it has none."""

    def table(self, ids: Sequence[int]) -> BlockTable:
        """Return the engine's block table with NO_BLOCK for blocks that a request does not have."""

    def hold(self, mentions: Iterable[DeviceBlocks | Ordered]) -> None:
        """Hold these blocks, once for each mention."""

    def release(self, mentions: Iterable[DeviceBlocks]) -> None:
        """End one hold for each mention."""

    def release_all(self) -> None:
        """End every hold. Call it only when no rank copies any more."""


KeysOfTokens = Callable[[list[int], str], Keys]
"""Maps token ids and a salt to the keys of a request with these tokens."""


@dataclass(frozen=True)
class SessionSetup:
    """Facts about a server that are known before its ranks report.

    ``refusal`` says why the model is not served, ``overlap_refusal`` why no request may run before
    its load has landed. A failed load is reported by the first group's blocks; ``fails_by_block``
    says that the engine can recover from that. ``engine_here`` numbers the engines of a
    data-parallel server on this host.

    A server that ``stores`` without loading hands prompts to others through a shared store; one
    that ``loads`` without storing takes them. ``lookahead_tokens``: a draft model's layers computed
    a block's KV with so many tokens after the block. ``verifies_drafts``: drafts of any origin are
    used, which the engine may reject a step later. The engine recomputes hits of up to
    ``replayed_tokens``. ``goes_alone``: the last token of a hit can be computed by itself.
    """

    config: Config
    groups: tuple[Group, ...]
    num_ranks: int
    refusal: str = ""
    fails_by_block: bool = True
    loads: bool = True
    stores: bool = True
    verifies_drafts: bool = False
    lookahead_tokens: int = 0
    replayed_tokens: int = 0
    goes_alone: bool = True
    engine_here: int = 0
    overlap_refusal: str = ""
    make_events: Callable[[Pool, Sequence[LowerTier], int], Any] | None = None
    """Makes events for routers, given the pool, the tiers and a key's tokens; None if unused."""
    keys_of_tokens: Callable[[int], KeysOfTokens] | None = None
    """Makes a map from tokens to keys, given the number of tokens per key; None if impossible."""
    find_waker: Callable[[], Callable[[], None]] = lambda: lambda: None
    """Returns the function that wakes an idle engine; called on the engine's thread."""
    log_name: str = "kvferry"
    """Name of the logger that announces kvferry in service, or why it is idle."""

    @property
    def is_full(self) -> bool:
        """Whether every group is full attention, which keeps all blocks of a running request."""
        return all(isinstance(group, FullAttention) for group in self.groups)
