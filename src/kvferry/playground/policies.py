"""Eviction policies in turn, under the same conversations that return late or never.

::

    round 1   lru      returns        each on a server of its own, with empty memory
    round 2   returns  lru            the other way round: what drifts meanwhile meets both

A turn is asked when the one before it is answered and stored, and the service's clock, which the
policy goes by, then shows when it came: nobody waits for the pauses. First tokens are in real
seconds. Rounds of one policy differ by little: by how far a copy is when room is made for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.playground.compare import Answers, Turn, turn_of
from kvferry.playground.engine import Engine, Limits
from kvferry.playground.model import Decoder, ModelShape
from kvferry.playground.offload import Offloader
from kvferry.playground.request import ServedRequest
from kvferry.playground.returning import ReturningChat
from kvferry.playground.runner import Runner
from kvferry.types import DEVICE, HOST

POLICIES_SHOWN = ("lru", "returns")

OnRound = Callable[[str, int, Sequence[Turn]], None]
"""Told of a policy, the round, and the turns that were counted in it."""


@dataclass(frozen=True)
class PolicyTrial:
    """What all policies are tried with."""

    chat: ReturningChat = field(default_factory=ReturningChat)
    shape: ModelShape = field(
        default_factory=lambda: ModelShape(
            vocab=256, width=96, num_layers=2, num_heads=4, head_dim=16, hidden=192
        )
    )
    policies: tuple[str, ...] = POLICIES_SHOWN
    num_rounds: int = 2
    num_uncounted: int = 300
    """Turns from the first on in which memory fills and a policy learns: in no figure."""
    host_blocks: int = 130
    device_blocks: int = 48
    block_tokens: int = 16

    def __post_init__(self) -> None:
        counted = self.chat.arrivals()[self.num_uncounted :]
        if not any(arrival.turn for arrival in counted):
            raise InputError(
                f"of {self.chat.num_turns} turns, {self.num_uncounted} of them not counted, none "
                "is of a conversation that returned; give more turns"
            )

    @property
    def host_bytes(self) -> int:
        shape = self.shape
        block = shape.num_layers * int(np.prod(shape.kv_shape(1, self.block_tokens))) * 4
        return self.host_blocks * block


@dataclass(frozen=True)
class PolicyFigures:
    """What one policy cost, in all of its rounds."""

    policy: str
    rounds: Sequence[Sequence[Turn]]

    @property
    def turns(self) -> list[Turn]:
        return [turn for each in self.rounds for turn in each]

    @property
    def returns(self) -> list[Turn]:
        """Those that are not their conversation's first: which memory can help."""
        return [turn for turn in self.turns if turn.turn]

    def first_token_seconds(self, percentile: float) -> float:
        return float(np.percentile([turn.first_token_seconds for turn in self.turns], percentile))

    @property
    def return_seconds(self) -> float:
        """The mean first token of those that returned: found by some of them, computed by most."""
        return float(np.mean([turn.first_token_seconds for turn in self.returns]))

    @property
    def found_rate(self) -> float:
        """Of those that returned, the share for which something was in host memory."""
        returns = self.returns
        return sum(turn.host_tokens > 0 for turn in returns) / len(returns)

    @property
    def prefill_tokens(self) -> int:
        """Of one round, the mean."""
        return round(sum(turn.prefilled_tokens for turn in self.turns) / len(self.rounds))

    @property
    def host_hit_rate(self) -> float:
        return self._share(lambda turn: turn.host_tokens)

    @property
    def device_hit_rate(self) -> float:
        return self._share(lambda turn: turn.device_tokens)

    def _share(self, tokens: Callable[[Turn], int]) -> float:
        turns = self.turns
        return sum(map(tokens, turns)) / sum(turn.prompt_tokens for turn in turns)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "ttft_p50_seconds": self.first_token_seconds(50),
            "ttft_p95_seconds": self.first_token_seconds(95),
            "ttft_mean_seconds_of_returns": self.return_seconds,
            "returns_found_in_host": self.found_rate,
            "prefill_tokens_computed": self.prefill_tokens,
            "hit_rate": {DEVICE: self.device_hit_rate, HOST: self.host_hit_rate},
        }


@dataclass(frozen=True)
class PoliciesResult:
    """The policies side by side."""

    trial: PolicyTrial
    figures: dict[str, PolicyFigures]
    num_different_turns: int
    """Answers that are not the same in every round of every policy."""

    @property
    def tokens_equal(self) -> bool:
        return self.num_different_turns == 0

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        trial, chat = self.trial, self.trial.chat
        return {
            "tokens_equal": self.tokens_equal,
            "different_turns": self.num_different_turns,
            "setting": {
                "turns": chat.num_turns,
                "uncounted_turns": trial.num_uncounted,
                "rounds": trial.num_rounds,
                "new_conversations_per_second": chat.new_per_second,
                "host_blocks": trial.host_blocks,
                "device_blocks": trial.device_blocks,
                "block_tokens": trial.block_tokens,
                "seed": chat.seed,
            },
            "policies": {name: each.to_dict() for name, each in self.figures.items()},
        }


def run_policies(
    trial: PolicyTrial, on_round: OnRound = lambda policy, number, turns: None
) -> PoliciesResult:
    """Every policy, as many times as there are rounds, in turn."""
    decoder = Decoder(trial.shape)
    rounds: dict[str, list[list[Turn]]] = {policy: [] for policy in trial.policies}
    everything: list[Answers] = []
    for number in range(trial.num_rounds):
        for policy in trial.policies[:: -1 if number % 2 else 1]:
            served = _serve(trial, policy, decoder)
            everything.append({request.id: request.generated for request in served})
            rounds[policy].append([turn_of(request) for request in served[trial.num_uncounted :]])
            on_round(policy, number, rounds[policy][-1])
    num_different = sum(
        any(answers.get(turn) != said for answers in everything)
        for turn, said in everything[0].items()
    )
    figures = {policy: PolicyFigures(policy, each) for policy, each in rounds.items()}
    return PoliciesResult(trial, figures, num_different)


class _ServiceClock:
    """The service's time: stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _serve(trial: PolicyTrial, policy: str, decoder: Decoder) -> list[ServedRequest]:
    """All turns on a server with nothing in memory, one after the other."""
    texts = trial.chat.texts
    clock = _ServiceClock()
    # Loads are never weighed against computing: that goes by how busy this machine is just now. And
    # nobody asks what other sizes would hit, which is learned in real time.
    config = Config(policy=policy, load_policy="always", memory_curve="off")
    histories: dict[int, list[int]] = {}
    done: list[ServedRequest] = []
    with (
        Runner(decoder, num_blocks=trial.device_blocks, block_tokens=trial.block_tokens) as runner,
        Offloader(runner, host_bytes=trial.host_bytes, config=config, clock=clock) as offloader,
    ):
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        for clock.seconds, number, turn in trial.chat.arrivals():
            history = histories.get(number)
            if history is None:
                history = histories[number] = texts.opening(number)
            history += texts.question(number, turn)
            request = ServedRequest(
                id=f"conversation-{number:03d}-turn-{turn:02d}",
                prompt=tuple(history),
                max_new_tokens=texts.answer_length(number, turn),
                arrival=engine.clock(),
            )
            engine.submit(request)
            engine.run()
            engine.drain()
            history += request.generated
            done.append(request)
        engine.memory.check_integrity(num_held=0)
        offloader.scheduler.check_integrity()
    return done
