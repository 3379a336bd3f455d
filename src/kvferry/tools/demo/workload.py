"""Multi-turn conversations whose KV does not fit the cache of a small device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Chat:
    """Multi-turn conversations, served in rounds.

    Every conversation opens with its own text and then asks short questions. Lengths vary by half
    around the given numbers. Round t has turn t of every conversation in shuffled order, so other
    conversations run between two turns of one. ``num_users`` bounds the turns in progress.
    """

    num_conversations: int = 14
    num_turns: int = 5
    opening_tokens: int = 320
    question_tokens: int = 40
    answer_tokens: int = 16
    num_users: int = 3
    vocab: int = 1024
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation after its last turn."""
        return [
            len(self.opening(number))
            + sum(
                len(self.question(number, turn)) + self.answer_length(number, turn)
                for turn in range(self.num_turns)
            )
            for number in range(self.num_conversations)
        ]

    def num_blocks(self, block_tokens: int) -> int:
        """Return the blocks of all conversations after their last turn: the working set."""
        return sum(-(-length // block_tokens) for length in self.lengths)

    def rounds(self) -> list[list[int]]:
        """Return the order of the conversations in each round."""
        rng = np.random.default_rng((self.seed, 1))
        everyone = np.arange(self.num_conversations)
        return [rng.permutation(everyone).tolist() for _ in range(self.num_turns)]

    def opening(self, conversation: int) -> list[int]:
        return self._text(self.opening_tokens, 2, conversation)

    def question(self, conversation: int, turn: int) -> list[int]:
        return self._text(self.question_tokens, 3, conversation, turn)

    def answer_length(self, conversation: int, turn: int) -> int:
        return len(self._text(self.answer_tokens, 4, conversation, turn))

    def _text(self, about: int, *place: int) -> list[int]:
        """Return 0.5 to 1.5 times ``about`` random tokens, always the same ones for a ``place``."""
        rng = np.random.default_rng((self.seed, *place))
        length = int(rng.integers(-(-about // 2), about + about // 2 + 1))
        tokens: list[int] = rng.integers(0, self.vocab, length).tolist()
        return tokens


@dataclass(frozen=True)
class Turn:
    """One answered request: its answer, its prompt tokens by source, its time to first token."""

    id: str
    answer: list[int]
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    first_token_seconds: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.host_tokens


TurnRequest = dict[str, Any]
"""A turn to serve, as the arguments of an engine's ``ServedRequest``."""


class Dialogue:
    """Owns the histories of a chat and the order of its turns.

    A turn starts once a user is free and the conversation's previous turn is answered.
    """

    def __init__(
        self, chat: Chat, rounds: range | None = None, histories: list[list[int]] | None = None
    ) -> None:
        """Ask the turns of ``rounds``, by default all. ``histories`` has the tokens before them."""
        numbers = range(chat.num_conversations)
        self.chat = chat
        self.histories = [
            chat.opening(number) if histories is None else list(histories[number])
            for number in numbers
        ]
        orders = chat.rounds()
        self._waiting = deque(
            (number, turn) for turn in rounds or range(chat.num_turns) for number in orders[turn]
        )
        self._under_way: dict[str, int] = {}
        self.num_turns = len(self._waiting)

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._under_way

    def ask(self) -> TurnRequest | None:
        """Return the next question, or None if it must wait for an answer or there is none."""
        if not self._waiting or len(self._under_way) >= self.chat.num_users:
            return None
        number, turn = self._waiting[0]
        if number in self._under_way.values():
            return None
        self._waiting.popleft()
        self.histories[number] += self.chat.question(number, turn)
        name = f"conversation-{number:03d}-turn-{turn:02d}"
        self._under_way[name] = number
        length = self.chat.answer_length(number, turn)
        return {"id": name, "prompt": list(self.histories[number]), "max_new_tokens": length}

    def answered(self, name: str, answer: list[int]) -> None:
        """Append an answer to its conversation."""
        self.histories[self._under_way.pop(name)] += answer
