"""Conversations that come back after a while, or never: as those of a chat service do.

Most people ask once. The more often one has asked, the likelier the next question; it comes after
two minutes in the median, after most of what was asked meanwhile. So memory that holds less than
that is full of conversations of which few return, and then late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.playground.workload import Chat

RETURN_CHANCES = (0.28, 0.41, 0.54, 0.62, 0.68, 0.74, 0.79, 0.83)
"""The chance of one more turn, by how many there were; after the last of these none follows."""

GAP_MEDIAN_SECONDS = 123.0
GAP_TENTH_SECONDS = 39.0
"""A tenth of those who return do so sooner."""

_NORMAL_TENTH = 1.2816  # standard deviations from the median to a tenth


class Arrival(NamedTuple):
    """One turn: when it is asked, in the service's seconds."""

    seconds: float
    conversation: int
    turn: int


@dataclass(frozen=True)
class ReturningChat:
    """The first ``num_turns`` turns of a service where ``new_per_second`` conversations begin.

    Texts and lengths are those of a :class:`Chat` with the same numbers.
    """

    num_turns: int = 700
    new_per_second: float = 0.16
    opening_tokens: int = 96
    question_tokens: int = 40
    answer_tokens: int = 3
    vocab: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.new_per_second < math.inf:
            raise InputError(f"new_per_second must be above 0, got {self.new_per_second}")

    @property
    def texts(self) -> Chat:
        """What is said in which turn."""
        return Chat(
            num_conversations=self.num_turns,
            num_turns=len(RETURN_CHANCES) + 1,
            opening_tokens=self.opening_tokens,
            question_tokens=self.question_tokens,
            answer_tokens=self.answer_tokens,
            num_users=1,
            vocab=self.vocab,
            seed=self.seed,
        )

    @property
    def longest(self) -> int:
        """Tokens that no conversation exceeds."""
        turn = (self.question_tokens, self.answer_tokens)
        parts = (self.opening_tokens, *turn * (len(RETURN_CHANCES) + 1))
        return sum(each + each // 2 for each in parts)

    def arrivals(self) -> list[Arrival]:
        """Every turn, in the order in which they are asked; the same for one seed."""
        rng = np.random.default_rng((self.seed, 5))
        spread = math.log(GAP_MEDIAN_SECONDS / GAP_TENTH_SECONDS) / _NORMAL_TENTH
        found: list[Arrival] = []
        begin = 0.0
        for conversation in range(self.num_turns):  # as many as if nobody returned
            begin += float(rng.exponential(1 / self.new_per_second))
            found.append(Arrival(begin, conversation, 0))
            at = begin
            for turn, chance in enumerate(RETURN_CHANCES, start=1):
                if rng.random() >= chance:
                    break
                at += float(rng.lognormal(math.log(GAP_MEDIAN_SECONDS), spread))
                found.append(Arrival(at, conversation, turn))
        return sorted(found)[: self.num_turns]
