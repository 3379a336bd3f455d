"""How far one request is stored, and when it is next worth storing more of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.keys import KeyChain
from kvferry.scheduler.orders import BlockTable, Ordered

if TYPE_CHECKING:
    from kvferry.scheduler.parts import Parts

NEVER = 1 << 60
"""Tokens: more than any request has."""


class Progress:
    """What of one request needs no more storing. Owns that count; the blocks are the engine's.

    ``past`` tokens it had, on the device or with us, when it came. ``since``: from there on count
    the tokens that make storing worth a call (``Rests.step``). One that ``is_outdated`` has device
    blocks from before a reset: nothing of them is stored.
    """

    most_tokens = NEVER  # may be stored; see CappedProgress
    __slots__ = ("_parts", "_stored", "is_outdated", "past", "since", "tokens")

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stored = [0] * len(parts.sizes)  # blocks, by group
        self.tokens = 0
        """Leading tokens that are done with, in every group."""
        self.past = 0
        self.since = 0
        self.is_outdated = False

    def renew(self) -> None:
        """It starts from nothing: what a reset said about its blocks no longer counts."""
        self.since = 0
        if self.is_outdated:
            self.is_outdated = False
            self._stored = [0] * len(self._stored)
            self.tokens = 0

    def go_on(self, other: Progress) -> None:
        """It goes on where another request ended, and stores what that one has left."""
        self._stored = list(other._stored)
        self.tokens = other.tokens
        self.past = other.past
        self.is_outdated |= other.is_outdated
        self.since = self.tokens or self.past

    def storable(self, chain: KeyChain, num_tokens: int) -> int:
        """As many of these tokens as have keys and will not be taken back."""
        parts = self._parts
        return min(num_tokens, len(chain) * parts.matcher.hash_tokens) - parts.spare_tokens

    def is_worth_storing(self, num_tokens: int) -> bool:
        """Whether enough of so many computed tokens is new for a store to be worth its cost."""
        parts, rests = self._parts, self._parts.rests
        step = parts.least_tokens if rests is None else rests.step
        return num_tokens >= self.since + step + parts.spare_tokens

    def unstored_from(self, chain: KeyChain, num_tokens: int) -> int | None:
        """From which token on something of so many storable tokens is to be stored, if it is."""
        parts = self._parts
        if self.is_outdated or parts.stores.is_lazy:
            return None
        if self.past and not self.tokens:
            self._skip_past(chain, num_tokens)
        return self.tokens if num_tokens >= self.tokens + parts.least_tokens else None

    def store(
        self, request: object, chain: KeyChain, tables: Sequence[BlockTable], num_tokens: int
    ) -> tuple[Ordered, ...]:
        """Order what is new of the first ``num_tokens``, which are storable."""
        if self.is_outdated or self._parts.stores.is_lazy:
            return ()
        if self.past and not self.tokens:
            self._skip_past(chain, num_tokens)
        ordered = self._parts.stores.computed(
            request, self._stored, chain.keys(), tables, num_tokens
        )
        self._note()
        return ordered

    def _skip_past(self, chain: KeyChain, num_tokens: int) -> None:
        """What was loaded, or never left, needs no look at its blocks."""
        past = min(self.past, num_tokens)
        self._parts.stores.skip_known(self._stored, chain.keys(), past)
        self._note()

    def _note(self) -> None:
        sizes = self._parts.sizes
        self.tokens = self._stored[0] * sizes[0]
        for count, size in zip(self._stored, sizes, strict=True):
            self.tokens = min(self.tokens, count * size)
        self.since = self.tokens
