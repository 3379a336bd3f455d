"""Eviction policies side by side, under the same conversations that return late or never.

::

    turn 1   lru      returns        each on a server of its own, which begins with empty memory
    turn 2   returns  lru            the other one first: what is slow just now meets both
    turn 3   lru      returns

A turn is asked when the one before it is answered and stored, and the service's clock, which the
policies go by, then shows when it came: nobody waits for the pauses. First tokens are in real
seconds, and in those of the processor: what else the machine does holds up one turn in some, by
more than the policies differ, but is no work of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.core.lifecycle import Closing
from kvferry.errors import InputError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.compare import Arrival, ReturningChat, Turn, turn_of
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.types import DEVICE, HOST

POLICIES_SHOWN = ("lru", "returns")

OnServed = Callable[[int, int], None]
"""Told how many turns all policies have served, and of how many."""


@dataclass(frozen=True)
class PolicyTrial:
    """What all policies are tried with."""

    chat: ReturningChat = field(default_factory=ReturningChat)
    shape: ModelShape = field(
        default_factory=lambda: ModelShape(
            vocab=256, width=128, num_layers=3, num_heads=4, hidden=256
        )
    )
    policies: tuple[str, ...] = POLICIES_SHOWN
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
    """What one policy cost, in the turns that are counted.

    ``processor_seconds`` is, for each turn, how long the processor worked until its first token.
    """

    policy: str
    turns: Sequence[Turn]
    processor_seconds: Sequence[float]

    @property
    def returns(self) -> list[Turn]:
        """Those that are not their conversation's first: which memory can help."""
        return [turn for turn in self.turns if turn.turn]

    def first_token_seconds(self, percentile: float) -> float:
        return float(np.percentile([turn.first_token_seconds for turn in self.turns], percentile))

    @property
    def return_seconds(self) -> float:
        """The processor's time to the first token of those that returned, in the mean.

        Some of them are found, most are computed: so the median says little.
        """
        pairs = zip(self.turns, self.processor_seconds, strict=True)
        return float(np.mean([seconds for turn, seconds in pairs if turn.turn]))

    @property
    def found_rate(self) -> float:
        """Of those that returned, the share for which something was in host memory."""
        returns = self.returns
        return sum(turn.host_tokens > 0 for turn in returns) / len(returns)

    @property
    def prefill_tokens(self) -> int:
        return sum(turn.prefilled_tokens for turn in self.turns)

    @property
    def host_hit_rate(self) -> float:
        return self._share(lambda turn: turn.host_tokens)

    @property
    def device_hit_rate(self) -> float:
        return self._share(lambda turn: turn.device_tokens)

    def _share(self, tokens: Callable[[Turn], int]) -> float:
        return sum(map(tokens, self.turns)) / sum(turn.prompt_tokens for turn in self.turns)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "ttft_p50_seconds": self.first_token_seconds(50),
            "ttft_p95_seconds": self.first_token_seconds(95),
            "ttft_mean_processor_seconds_of_returns": self.return_seconds,
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
    """Answers that are not the same with every policy."""

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
                "new_conversations_per_second": chat.new_per_second,
                "host_blocks": trial.host_blocks,
                "device_blocks": trial.device_blocks,
                "block_tokens": trial.block_tokens,
                "seed": chat.seed,
            },
            "policies": {name: each.to_dict() for name, each in self.figures.items()},
        }


def run_policies(
    trial: PolicyTrial, on_served: OnServed = lambda number, total: None
) -> PoliciesResult:
    """Every turn with every policy, before the next."""
    decoder = Decoder(trial.shape)
    arrivals = trial.chat.arrivals()
    with ExitStack() as opened:
        servers = [
            opened.enter_context(_Server(trial, policy, decoder)) for policy in trial.policies
        ]
        for number, arrival in enumerate(arrivals, start=1):
            for server in servers if number % 2 else servers[::-1]:
                server.serve(arrival)
            on_served(number, len(arrivals))
        for server in servers:
            server.check_integrity()
    num_different = sum(
        any(request.generated != same[0].generated for request in same)
        for same in zip(*(server.done for server in servers), strict=True)
    )
    first = trial.num_uncounted
    figures = {
        server.policy: PolicyFigures(
            server.policy,
            [turn_of(request) for request in server.done[first:]],
            server.processor_seconds[first:],
        )
        for server in servers
    }
    return PoliciesResult(trial, figures, num_different)


class _Server(Closing):
    """One policy's server. Owns its device, its host memory, and the clock that both go by."""

    def __init__(self, trial: PolicyTrial, policy: str, decoder: Decoder) -> None:
        self.policy = policy
        self.done: list[ServedRequest] = []
        self.processor_seconds: list[float] = []
        self._texts = trial.chat.texts
        self._histories: dict[int, list[int]] = {}
        self._now = 0.0
        # Loads are never weighed against computing: that goes by how busy this machine is just
        # now. And nobody asks what other sizes would hit, which is learned in real time.
        config = Config(policy=policy, load_policy="always", memory_curve="off")
        with ExitStack() as opened:
            runner = opened.enter_context(
                Runner(decoder, num_blocks=trial.device_blocks, block_tokens=trial.block_tokens)
            )
            self._offloader = opened.enter_context(
                Offloader(
                    runner, host_bytes=trial.host_bytes, config=config, clock=lambda: self._now
                )
            )
            self._engine = Engine(runner, limits=Limits(), offloader=self._offloader)
            self._opened = opened.pop_all()

    def serve(self, arrival: Arrival) -> None:
        """Answer one turn, and wait until all that it left is stored."""
        self._now, number, turn = arrival
        texts, engine = self._texts, self._engine
        if number not in self._histories:
            self._histories[number] = texts.opening(number)
        history = self._histories[number]
        history += texts.question(number, turn)
        request = ServedRequest(
            id=f"conversation-{number:03d}-turn-{turn:02d}",
            prompt=tuple(history),
            max_new_tokens=texts.answer_length(number, turn),
            arrival=engine.clock(),
        )
        began = time.process_time()
        engine.submit(request)
        while request.first_token_at is None:
            engine.step()
        self.processor_seconds.append(time.process_time() - began)
        engine.run()
        engine.drain()
        history += request.generated
        self.done.append(request)

    def check_integrity(self) -> None:
        self._engine.memory.check_integrity(num_held=0)
        self._offloader.scheduler.check_integrity()

    def close(self) -> None:
        """End the server. Safe to call twice."""
        self._opened.close()
