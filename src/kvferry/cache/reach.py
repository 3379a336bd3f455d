"""Which blocks of each group a hit reads, and which blocks any hit can ever read. Pure functions.

With a hit of P tokens the engine computes nothing for tokens 0..P-1; its next query is at position
P. The tokens below P that a layer then reads are one interval, ``[first_token(P), P)``::

                        0                                P
    full attention      |################################|   every key
    sliding window w    |                    [###########|   keys P-w+1 .. P-1  (w counts the query)
    chunked local c     |               [################|   from P - P % c; none at a chunk start
    recurrent state     |                               [|   the state after token P-1, and only
                                                             where a slot ends: it has no middle

Later queries read nothing below P that the query at P does not, so this interval is enough.
All lengths are in tokens; they become blocks in one place (``_cut``).

A present block was matched by its key, so *all* its tokens are the request's own, and a hit may
begin or end inside it. Only a hit on recurrent states cannot: a block has one state, at its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
_Tokens = TypeVar("_Tokens", int, IntArray)

_FIRST_LOOK = 64
"""Hit lengths tested at first, the longest ones; each further round tests four times as many."""


@dataclass(frozen=True)
class Group(ABC):
    """Which tokens one group's layers read. Knows lengths in tokens, no blocks.

    ``stops``: hits end at multiples of it, where the state a model keeps outside blocks is empty.
    """

    block_tokens: int
    _: KW_ONLY
    stops: int = 1

    def __post_init__(self) -> None:
        _require("block_tokens", self.block_tokens, 1)
        _require("stops", self.stops, 1)

    @property
    def stop_tokens(self) -> int:
        """Tokens between the lengths at which a hit of this group can end."""
        return self.stops

    @abstractmethod
    def first_token(self, num_tokens: _Tokens) -> _Tokens:
        """Return the first token that a hit of ``num_tokens`` reads; may be negative near 0."""


@dataclass(frozen=True)
class FullAttention(Group):
    """Every query reads every key. Covers MLA and draft layers too: only their bytes differ."""

    def first_token(self, num_tokens: _Tokens) -> _Tokens:
        return num_tokens * 0


@dataclass(frozen=True)
class SlidingWindow(Group):
    """The query at p reads keys p-window+1 .. p: ``window`` keys, including its own."""

    _: KW_ONLY
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("window", self.window, 1)

    def first_token(self, num_tokens: _Tokens) -> _Tokens:
        return num_tokens - (self.window - 1)


@dataclass(frozen=True)
class ChunkedLocal(Group):
    """The query at p reads keys from the start of its chunk of ``chunk`` tokens up to p."""

    _: KW_ONLY
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("chunk", self.chunk, 1)

    def first_token(self, num_tokens: _Tokens) -> _Tokens:
        return num_tokens - num_tokens % self.chunk


@dataclass(frozen=True)
class RecurrentState(Group):
    """Mamba and other linear layers: a block has one state, that after its last token."""

    @property
    def stop_tokens(self) -> int:
        return math.lcm(self.block_tokens, self.stops)

    def first_token(self, num_tokens: _Tokens) -> _Tokens:
        return num_tokens - 1


def needed(group: Group, num_tokens: int, *, computed_tokens: int = 0) -> range:
    """Return the positions in the request's block table that a hit of ``num_tokens`` reads.

    The engine already holds the first ``computed_tokens`` (a hit of its own cache, in all groups),
    so blocks wholly below them are left out. InputError if a hit cannot end at ``num_tokens``.
    """
    _require("num_tokens", num_tokens, 0)
    _require("computed_tokens", computed_tokens, 0)
    if num_tokens % group.stop_tokens:
        raise InputError(
            f"no hit of {num_tokens} tokens: with {type(group).__name__} one can end only every "
            f"{group.stop_tokens} tokens; ask for a multiple of that"
        )
    first_token = max(group.first_token(num_tokens), computed_tokens)
    if first_token >= num_tokens:
        return range(0)
    return range(first_token // group.block_tokens, (num_tokens - 1) // group.block_tokens + 1)


def longest_hit(
    groups: Sequence[Group],
    present: Sequence[BoolArray],
    max_tokens: int,
    *,
    alignment: int | None = None,
    computed_tokens: int = 0,
) -> int:
    """Return the longest hit, in tokens, that *all* groups can serve.

    ``present[g][i]`` says that block i of group g can be read; blocks past its end cannot. The hit
    is a multiple of ``alignment`` (by default of every block size) and at most ``max_tokens``.
    A request must compute at least one token itself to have logits to sample from, so callers pass
    at most ``prompt_len - 1``. The engine holds the first ``computed_tokens`` itself, in all
    groups: blocks below them are not needed, and the result is at least ``computed_tokens``.
    """
    _require_match(groups, present)
    _require("max_tokens", max_tokens, 0)
    _require("computed_tokens", computed_tokens, 0)
    step = _hit_step(groups, alignment)
    others = []
    for group, slots in zip(groups, present, strict=True):
        if isinstance(group, FullAttention):
            max_tokens = min(max_tokens, _prefix_tokens(group, slots, computed_tokens))
        else:
            others.append((group, slots))
    low, high = computed_tokens // step, max_tokens // step
    if not others:
        return max(high * step, computed_tokens)
    width = _FIRST_LOOK
    while high > low:
        start = max(low, high - width)
        lengths = np.arange(start + 1, high + 1, dtype=np.int64) * step
        servable = np.ones(len(lengths), dtype=np.bool_)
        for group, slots in others:
            servable &= _servable(group, slots, lengths, computed_tokens)
        hits = np.flatnonzero(servable)
        if len(hits):
            return int(lengths[hits[-1]])
        high, width = start, width * 4
    return computed_tokens


def can_serve(groups: Sequence[Group], num_tokens: int, *, alignment: int) -> list[BoolArray]:
    """Return, per group, which full blocks of the first ``num_tokens`` any hit can read.

    The masks depend on the model alone, so a prefix of the longest request's masks serves every
    request. A block that no hit reads would take a slot and never be loaded.
    """
    step = _hit_step(groups, alignment)
    # Hits longer than ``end`` need no test: only full attention reads any of these blocks then,
    # and there all such hits read the same ones.
    others = [group for group in groups if not isinstance(group, FullAttention)]
    end = num_tokens + 1
    while any(group.first_token(end) < num_tokens for group in others):
        end *= 2
    lengths = np.arange(1, -(-end // step) + 1, dtype=np.int64) * step
    masks = []
    for group in groups:
        num_slots = num_tokens // group.block_tokens
        first, stop = (np.minimum(edge, num_slots) for edge in _cut(group, lengths, 0))
        masks.append(_covered(first, stop, num_slots))
    return masks


def _cut(group: Group, lengths: IntArray, computed_tokens: int) -> tuple[IntArray, IntArray]:
    """Return, for each hit length, the first block that it reads and the one after the last."""
    first_token = np.maximum(group.first_token(lengths), computed_tokens)
    first = first_token // group.block_tokens
    # A hit that reads nothing must not need the block in which it ends.
    stop = np.where(first_token < lengths, (lengths - 1) // group.block_tokens + 1, first)
    return first, stop


def _prefix_tokens(group: Group, present: BoolArray, computed_tokens: int) -> int:
    """Return where the unbroken run of present blocks after the engine's own tokens ends."""
    first = computed_tokens // group.block_tokens
    rest = present[first:]
    if not len(rest):
        return first * group.block_tokens
    run = int(rest.argmin())
    if rest[run]:
        run = len(rest)
    return (first + run) * group.block_tokens


def _servable(
    group: Group, present: BoolArray, lengths: IntArray, computed_tokens: int
) -> BoolArray:
    """Return, for each hit length (ascending), whether all blocks that it reads are present."""
    first, stop = _cut(group, lengths, computed_tokens)
    base = int(first[0])
    end = (int(lengths[-1]) - 1) // group.block_tokens + 1
    missing = np.ones(end - base, dtype=np.bool_)
    known = present[base:end]
    np.logical_not(known, out=missing[: len(known)])
    before = np.zeros(end - base + 1, dtype=np.int64)
    np.cumsum(missing, out=before[1:])
    complete: BoolArray = before[first - base] == before[stop - base]
    return complete


def _covered(first: IntArray, stop: IntArray, num_slots: int) -> BoolArray:
    """Return which blocks lie in at least one of the ranges ``[first, stop)``."""
    opened = np.bincount(first, minlength=num_slots + 1)
    closed = np.bincount(stop, minlength=num_slots + 1)
    return np.cumsum(opened - closed)[:num_slots] > 0


def _hit_step(groups: Sequence[Group], alignment: int | None) -> int:
    """Return the step between possible hit lengths: aligned, and every group can stop there."""
    if alignment is None:
        alignment = math.lcm(*(group.block_tokens for group in groups))
    _require("alignment", alignment, 1)
    return math.lcm(alignment, *(group.stop_tokens for group in groups))


def _require_match(groups: Sequence[Group], masks: Sequence[BoolArray]) -> None:
    if not groups:
        raise InputError("no groups given; a model has at least one")
    if len(groups) != len(masks):
        raise InputError(f"{len(masks)} slot masks for {len(groups)} groups; give one per group")
    for index, mask in enumerate(masks):
        if mask.dtype != np.bool_ or mask.ndim != 1:
            raise InputError(
                f"the slot mask of group {index} must be a vector of booleans, "
                f"got {mask.dtype} of shape {mask.shape}"
            )


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
