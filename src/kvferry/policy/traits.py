"""What is known of a conversation when it was last heard of: a few traits, each one of a few bins.

::

    turn     1 2 3 4, 5-8, 9-16, 17-32, more       how often it has been asked
    answer   unknown, then by doubling from 128 tokens
    gap      none, then by factors of four from a second: how long it stayed away last time
    growth   none, then by doubling from 512 tokens: how much longer it became
    kind     new, goes on, or branched off
    told     nothing, over, goes on, goes on within a second, two, four, ...; what its sender said

What several conversations share is no conversation: it has traits of its own, of how often and how
lately it was passed.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

_WITHIN = 14
_TURN, _ANSWER, _GAP, _GROWTH, _KIND, _TOLD = 8, 5, 8, 5, 3, 3 + _WITHIN
_WAYS, _SHARED_GAP = 5, 8
_SIZES = (_TURN, _ANSWER, _GAP, _GROWTH, _KIND, _TOLD)
NUM_TRAITS = len(_SIZES)
_STARTS = tuple(sum(_SIZES[:at]) for at in range(len(_SIZES) + 1))
NO_BIN = _STARTS[-1]
"""For traits that a shared part does not have: says nothing."""
_FIRST_WAYS = NO_BIN + 1
_FIRST_SHARED_GAP = _FIRST_WAYS + _WAYS
NUM_BINS = _FIRST_SHARED_GAP + _SHARED_GAP

Traits = tuple[int, ...]
"""The bin of each trait; bins of all traits are numbered through."""

UNKNOWN_ANSWER = 0


class TurnKind(IntEnum):
    """How a request is related to what was asked before."""

    NEW = 0
    GOES_ON = 1
    BRANCHES = 2


class Said(IntEnum):
    """What a conversation's sender said of it."""

    NOTHING = 0
    OVER = 1
    GOES_ON = 2


FIRST_WITHIN = _STARTS[5] + len(Said)
DEADLINES = tuple(2.0**at for at in range(_WITHIN))
"""The ages, in seconds, until which those bins say that a conversation goes on."""


def doubling(value: float, first: float, doublings: float, most: int) -> int:
    """0 below ``first``, then a bin more for each so many doublings, up to ``most``."""
    if not value >= first:
        return 0
    return int(min(most, 1 + log2(value / first) / doublings))


def answer_bin(num_tokens: int) -> int:
    return 1 + doubling(num_tokens, 128, 1, 3)


def conversation(
    *, turn: int, gap: float | None, grown: int, kind: TurnKind, answer: int = UNKNOWN_ANSWER
) -> Traits:
    """The traits of a conversation; ``gap`` is None on its first turn."""
    by_turn = turn - 1 if turn < 5 else 3 + doubling(turn - 1, 4, 1, 4)
    by_gap = 0 if gap is None else 1 + doubling(gap, 1.0, 2, 6)
    growth = 0 if gap is None else 1 + doubling(grown, 512, 1, 3)
    a, b, c, d, e, f, _ = _STARTS
    return (a + by_turn, b + answer, c + by_gap, d + growth, e + kind, f)


def shared(*, ways: int, gap: float) -> Traits:
    """The traits of what several conversations share, passed so often and so long ago before."""
    by_ways = _FIRST_WAYS + min(_WAYS - 1, max(0, ways.bit_length() - 1))
    by_gap = _FIRST_SHARED_GAP + doubling(gap, 1.0, 2, 7)
    return (by_ways, NO_BIN, by_gap, NO_BIN, NO_BIN, NO_BIN)


def with_answer(traits: Traits, num_tokens: int) -> Traits:
    """The same, once its answer is known."""
    return (traits[0], _STARTS[1] + answer_bin(num_tokens), *traits[2:])


def with_said(traits: Traits, said: Said, within: float | None = None) -> Traits:
    """The same, once something was said of it; ``within`` is the age until which it goes on."""
    told = _STARTS[5] + int(said)
    if said is Said.GOES_ON and within is not None:
        told = FIRST_WITHIN + min(_WITHIN - 1, bisect_left(DEADLINES, within))
    return (*traits[:-1], told)


NUM_BASES = 1 + _WAYS


def base_of(traits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row of traits, which base it has: conversations 0, others by how many share them."""
    return np.maximum(traits[:, 0] - _FIRST_WAYS + 1, 0)


def prior() -> npt.NDArray[np.float64]:
    """What each bin adds to the chance before anything is learned, as a logit."""
    weights: npt.NDArray[Any] = np.zeros(NUM_BINS)
    told = _STARTS[5]
    weights[told + Said.OVER] = -5.0
    weights[told + Said.GOES_ON] = 2.0
    return weights
