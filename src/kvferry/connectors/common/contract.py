"""What a connector's session needs of its engine: facts at start, block tables, holds, events.

A second engine implements :class:`EngineAdapter` and fills in a :class:`SessionSetup`; the
session does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention, Group
from kvferry.config import Config
from kvferry.core.keys import KeyChain, Keys
from kvferry.hints import Hints
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import BlockTable, EngineBlocks, Ordered
from kvferry.types import DeviceBlocks


class EngineRequest(Protocol):
    """The engine's own request; these numbers change while it lives."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int


class EngineKeys(KeyChain, Protocol):
    """The keys of one of the engine's requests."""

    had_blocks: Sequence[Sequence[int]]
    """The device blocks, by group, of a request that has ended."""


class Step(NamedTuple):
    """One step of the engine: how many tokens each request computes in it.

    ``new`` requests run for the first time; ``preempted`` ones lose their device blocks.
    """

    scheduled: Mapping[str, int]
    num_tokens: int
    new: Sequence[str] = ()
    preempted: Collection[str] = ()


class EngineAdapter(EngineBlocks, Protocol):
    """The engine's device blocks and requests, as the scheduler side sees them.

    A held block is given to no request, so a request may end while its blocks are copied.
    """

    hash_tokens: int
    """Tokens that one key of a request's chain covers."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def keeps_free_blocks(self) -> bool:
        """Whether some block is held by copies alone, and so is free once they have ended."""

    def describe(self, request: Any, *, has_tenants: bool) -> tuple[EngineKeys, Hints | None, str]:
        """A request's keys; its hints, with its tenant where any are told apart; what is wrong."""

    def conversation(self, request: Any) -> str:
        """The name that its client gave the conversation; empty if it has none."""

    def table(self, ids: Sequence[int]) -> BlockTable:
        """The engine's block table with NO_BLOCK for blocks that a request does not have."""

    def hold(self, mentions: Iterable[DeviceBlocks | Ordered]) -> None:
        """Hold these blocks, once for each mention."""

    def release(self, mentions: Iterable[DeviceBlocks]) -> None:
        """End one hold for each mention."""

    def release_all(self) -> None:
        """End every hold. Call it only once no rank copies."""


KeysOfTokens = Callable[[list[int], str], Keys]
"""From token ids and a salt to the keys of a request with these tokens."""


@dataclass(frozen=True)
class SessionSetup:
    """What is known of a server before its ranks are heard.

    A failed load is reported by the first group's blocks; ``fails_by_block`` says that this is
    enough for the engine to recover. ``engine_here`` counts the engines of a data-parallel server
    on this host. ``refusal`` says why the model is not served, ``overlap_refusal`` why no request
    may run before its load has landed.

    A server that ``stores`` and does not load hands its prompts to others, by a store they share;
    one that ``loads`` and does not store takes them. With ``lookahead_tokens`` some layers are a
    draft model's: their KV was computed with so many tokens more than a block has.
    ``verifies_drafts`` covers drafts of any origin, which the engine may refuse a step later. A hit
    of no more than ``replayed_tokens`` is computed again; ``goes_alone`` says that the last token
    of a hit can be computed by itself.
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
    """Makes events for routers, given the tokens of a key; None without listeners."""
    keys_of_tokens: Callable[[int], KeysOfTokens] | None = None
    """Makes what names blocks by tokens, given the tokens of a key; None where nothing can."""
    find_waker: Callable[[], Callable[[], None]] = lambda: lambda: None
    """Finds what wakes an idle engine; called on the engine's thread."""
    log_name: str = "kvferry"
    """Logger of the line that says what is in service."""

    @property
    def is_full(self) -> bool:
        """Whether no block is given up while its request runs."""
        return all(isinstance(group, FullAttention) for group in self.groups)
