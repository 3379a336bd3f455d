"""Agents that wait for their tools while others keep the server busy: what two hints save.

An agent's turn ends in a tool call. Its tool runs for a while, and meanwhile other requests come
and push the agent's blocks out of a small host memory, because they were not used lately. The agent
knows better: it has its blocks *kept*, until when at the latest, and once the tool has answered it
has them *fetched* while it still writes its next prompt.

    turn ──> tool call: "keep for 10 min" ──> the tool answers: prefetch ──> next turn

The same agents are served four times: with host memory alone and with a tier below it, each time
without and with what they know. The tokens are the same every time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from kvferry import Ferry, Hints
from kvferry.tools.demo.engine import Engine, ServedRequest
from kvferry.tools.demo.model import Decoder, ModelShape

SHAPE = ModelShape(vocab=512, width=64, num_layers=2, num_heads=2, num_kv_heads=1, hidden=64)
DEVICE_BLOCKS, HOST_BLOCKS = 32, 48
AGENTS, TURNS, CONTEXT, ANSWER, RESULT = 2, 3, 64, 8, 16
OTHERS, OTHERS_TOKENS = 8, 128


@dataclass
class Agent:
    """One agent's conversation so far."""

    name: str
    tokens: list[int]
    said: list[int] = field(default_factory=list)


class Serving:
    """An engine with a small host memory, and what its agents' turns cost."""

    def __init__(self, *, hints: bool, tiers: str) -> None:
        settings = {
            "host": f"{HOST_BLOCKS * SHAPE.block_bytes}B",
            "load_policy": "always",
            "tiers": tiers,
        }
        self.engine = Engine(Decoder(SHAPE), DEVICE_BLOCKS, settings)
        self.hints = hints
        self.rng = np.random.default_rng(5)
        self.num_prefilled = 0
        self.first_token_seconds: list[float] = []

    @property
    def ferry(self) -> Ferry:
        assert self.engine.ferry is not None
        return self.engine.ferry

    def serve(self, name: str, tokens: list[int]) -> ServedRequest:
        request = ServedRequest(name, list(tokens), ANSWER)
        self.engine.submit(request)
        self.engine.run()
        return request

    def take_turn(self, agent: Agent) -> None:
        """The agent's prompt is answered; the answer is a call of its tool."""
        name = f"{agent.name}-{len(agent.said)}"
        request = self.serve(name, agent.tokens)
        turn = request.turn()
        if agent.said:  # the first turn is new to everybody
            self.num_prefilled += turn.computed_tokens
            self.first_token_seconds.append(turn.first_token_seconds)
        agent.said += turn.answer
        agent.tokens = list(request.tokens)
        if self.hints:  # its tool runs now: it will be back within that time
            self.ferry.hint(self.engine.keys(agent.tokens[:-1]), Hints(pin_seconds=600.0))

    def tool_answers(self, agent: Agent) -> None:
        """The tool is done. Its result is added to the prompt; meanwhile the blocks may come up."""
        if self.hints:
            self.ferry.prefetch(self.engine.keys(agent.tokens), keep=60.0)
            self.ferry.poll(0.05)  # in a server this is the time the client takes
        agent.tokens += self.rng.integers(0, SHAPE.vocab, RESULT).tolist()

    def run(self) -> list[list[int]]:
        agents = [
            Agent(f"agent{n}", self.rng.integers(0, SHAPE.vocab, CONTEXT).tolist())
            for n in range(AGENTS)
        ]
        for turn in range(TURNS):
            for agent in agents:
                if turn:
                    self.tool_answers(agent)
                self.take_turn(agent)
            for number in range(OTHERS):
                prompt = self.rng.integers(0, SHAPE.vocab, OTHERS_TOKENS).tolist()
                self.serve(f"other-{turn}-{number}", prompt)
        return [agent.said for agent in agents]


def main() -> None:
    began, answers, cost = time.monotonic(), [], {}
    print(f"{AGENTS} agents of {TURNS} turns, {OTHERS} other requests during each tool call\n")
    print(f"{'Served from':<46}{'agents prefill':>15}{'first token':>14}")
    for words, tiers in (("host memory alone", "none"), ("a tier below it", "memory:64MiB")):
        for hints in (False, True):
            serving = Serving(hints=hints, tiers=tiers)
            try:
                answers.append(serving.run())
            finally:
                serving.engine.close()
            cost[tiers, hints] = serving.num_prefilled
            first = float(np.median(serving.first_token_seconds)) * 1000
            known = "with hints" if hints else "without hints"
            row = f"{words}, {known}"
            print(f"{row:<46}{serving.num_prefilled:>8} tokens{first:>11.1f} ms")
    assert all(answer == answers[0] for answer in answers), "a hint changed an answer"
    assert cost["none", True] * 2 <= cost["none", False], "the hints saved nothing"
    assert cost["memory:64MiB", True] <= cost["memory:64MiB", False]
    saved = cost["none", False] - cost["none", True]
    print(f"\nThe same answers each time; the hints saved {saved} tokens of prefill", end="")
    print(f" ({time.monotonic() - began:.1f} s in all).")


if __name__ == "__main__":
    main()
