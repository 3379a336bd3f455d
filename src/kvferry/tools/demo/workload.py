"""Conversations that come back: the traffic that makes a small device cache forget too much."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import InputError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine


@dataclass(frozen=True)
class Chat:
    """Multi-turn conversations, served in rounds.

    Every conversation opens with a text of its own, then asks short questions about it. Lengths
    vary by half around the numbers given. Round t has the t-th turn of each conversation in a
    shuffled order, so that between two turns of one conversation all others come by. At most
    ``num_users`` turns are under way at a time.
    """

    num_conversations: int = 14
    num_turns: int = 5
    opening_tokens: int = 320
    question_tokens: int = 40
    answer_tokens: int = 16
    num_users: int = 3
    vocab: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_conversations",
            "num_turns",
            "opening_tokens",
            "question_tokens",
            "answer_tokens",
            "num_users",
            "vocab",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation after its last turn."""
        return max(self._final_lengths())

    def num_blocks(self, block_tokens: int) -> int:
        """Blocks of all conversations at their longest: the working set."""
        return sum(-(-length // block_tokens) for length in self._final_lengths())

    def rounds(self) -> list[list[int]]:
        """For each round, the order in which the conversations take their turn."""
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
        """Between half and one and a half times ``about`` tokens, always the same in one place."""
        rng = np.random.default_rng((self.seed, *place))
        length = int(rng.integers(-(-about // 2), about + about // 2 + 1))
        tokens: list[int] = rng.integers(0, self.vocab, length).tolist()
        return tokens

    def _final_lengths(self) -> list[int]:
        return [
            len(self.opening(number))
            + sum(
                len(self.question(number, turn)) + self.answer_length(number, turn)
                for turn in range(self.num_turns)
            )
            for number in range(self.num_conversations)
        ]


@dataclass(frozen=True)
class Served:
    """What became of a workload: one request per turn, in the order they finished."""

    requests: list[ServedRequest] = field(repr=False)
    seconds: float

    def answers(self) -> dict[str, list[int]]:
        """Every turn's generated tokens by request id."""
        return {request.id: request.generated for request in self.requests}


def serve(
    engine: Engine,
    chat: Chat,
    on_finish: Callable[[ServedRequest], None] | None = None,
    *,
    rounds: range | None = None,
    histories: list[list[int]] | None = None,
) -> Served:
    """Run all turns through the engine; a turn is asked once its user has the previous answer.

    Only those of ``rounds``, if given; ``histories`` then has what was said before, and takes up
    what is said now.
    """
    if histories is None:
        histories = [chat.opening(number) for number in range(chat.num_conversations)]
    orders = list(enumerate(chat.rounds()))
    orders = orders if rounds is None else [orders[turn] for turn in rounds]
    turns = deque((number, turn) for turn, order in orders for number in order)
    under_way: dict[str, int] = {}
    done: list[ServedRequest] = []
    start = engine.clock()
    while turns or under_way:
        while turns and len(under_way) < chat.num_users and turns[0][0] not in under_way.values():
            number, turn = turns.popleft()
            histories[number] += chat.question(number, turn)
            request = ServedRequest(
                id=f"conversation-{number:03d}-turn-{turn:02d}",
                prompt=tuple(histories[number]),
                max_new_tokens=chat.answer_length(number, turn),
                arrival=engine.clock(),
            )
            engine.submit(request)
            under_way[request.id] = number
        for request in engine.step():
            histories[under_way.pop(request.id)] += request.generated
            done.append(request)
            if on_finish:
                on_finish(request)
    return Served(done, engine.clock() - start)
