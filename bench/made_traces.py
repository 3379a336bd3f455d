"""Makes traces of kinds that the public one is not: to see that a policy is not tuned to it.

::

    agents    sessions with tool calls: gaps of seconds, many turns, a few system prompts, fan-out
    api       one question each, behind one of some hundred templates
    batch     chats, and every ten minutes a job that reads thousands of documents once
    diurnal   chats whose number follows the day; some go on the next morning
    rag       questions behind a few of some thousand documents, whose popularity follows Zipf
    scans     chats, and beside them a steady stream of documents that are read once
    load      chats; every ten minutes the load and the pauses between turns change
    tenants   forty tenants, each with a prompt, a pace and a habit to return of its own
    chance    texts that are asked for again at times that nothing foretells
    regime    halfway, short chats that returned become one-off and long ones begin to return

In the Mooncake format, so anything that reads that one reads these. The same seed makes the same
trace. ``python bench/made_traces.py agents --block-tokens 16 > agents.jsonl``
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

DAY = 86_400.0


@dataclass
class Blocks:
    """Numbers for the blocks of texts that grow: a text that goes on keeps its whole blocks."""

    block_tokens: int
    numbers: Iterator[int] = field(default_factory=count)

    def grow(self, text: Text, tokens: int) -> Text:
        """The text and as many tokens more. Only whole blocks of it are shared."""
        whole = text.tokens // self.block_tokens
        total = text.tokens + tokens
        needed = -(-total // self.block_tokens)
        return Text(
            total, [*text.ids[:whole], *(next(self.numbers) for _ in range(needed - whole))]
        )


@dataclass
class Text:
    """So many tokens, and the numbers of their blocks."""

    tokens: int = 0
    ids: list[int] = field(default_factory=list)


Event = tuple[float, Text, int]  # when, the prompt, the answer's tokens


class Maker:
    """Draws requests in order of time. Owns the chance and the numbers."""

    def __init__(self, seed: int, block_tokens: int, scale: float) -> None:
        self.rng = Random(seed)
        self.blocks = Blocks(block_tokens)
        self.scale = scale  # of all arrival rates

    def lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(self.rng.gauss(0, sigma))

    def tokens(self, median: float, sigma: float = 0.8) -> int:
        return max(1, int(self.lognormal(median, sigma)))

    def arrivals(self, seconds: float, rate: float) -> Iterator[float]:
        at = self.rng.expovariate(rate * self.scale)
        while at < seconds:
            yield at
            at += self.rng.expovariate(rate * self.scale)

    def chat(self, at: float, text: Text, stay: float, gap: float, sigma: float) -> list[Event]:
        """Turns until somebody has had enough, each a while after the answer to the last."""
        events = []
        while True:
            text = self.blocks.grow(text, self.tokens(400, 1.2))
            answer = self.tokens(300)
            events.append((at, text, answer))
            if self.rng.random() > stay:
                return events
            text = self.blocks.grow(text, answer)
            at += answer / 50 + self.lognormal(gap, sigma)

    # -- the kinds ------------------------------------------------------------------------------

    def agents(self) -> Iterator[Event]:
        prompts = [self.blocks.grow(Text(), self.tokens(6000, 0.4)) for _ in range(6)]
        for start in self.arrivals(3600, 0.12):
            system = self.rng.choices(prompts, weights=[8, 4, 2, 1, 1, 1])[0]
            yield from self.session(start, self.blocks.grow(system, self.tokens(1500)), 40, 0)

    def session(self, at: float, text: Text, most: int, depth: int) -> Iterator[Event]:
        """Tool after tool; sometimes several helpers begin with all that was said so far."""
        for _ in range(1 + min(int(self.rng.expovariate(1 / 15)), most)):
            answer = self.tokens(150)
            yield at, text, answer
            slow = self.rng.random() < 0.1  # a person is asked, or tests run
            at += answer / 60 + (self.lognormal(60, 1.0) if slow else self.lognormal(2.5, 0.9))
            if depth == 0 and self.rng.random() < 0.05:
                for _ in range(self.rng.randint(2, 5)):
                    helper = self.blocks.grow(text, self.tokens(300))
                    yield from self.session(at + self.rng.random(), helper, 8, 1)
                at += self.lognormal(40, 0.5)
            text = self.blocks.grow(text, answer + self.tokens(700, 1.0))

    def api(self) -> Iterator[Event]:
        templates = [self.blocks.grow(Text(), self.tokens(3000, 1.0)) for _ in range(300)]
        weights = [1 / (rank + 1) for rank in range(len(templates))]
        for at in self.arrivals(3600, 4.0):
            template = self.rng.choices(templates, weights=weights)[0]
            yield at, self.blocks.grow(template, self.tokens(1200, 1.0)), self.tokens(100)

    def batch(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 2000)
        for start in self.arrivals(3600, 0.8):
            yield from self.chat(start, system, 0.7, 60, 1.0)
        task = self.blocks.grow(Text(), 1000)
        for begin in range(300, 3600, 600):
            at = float(begin)
            for _ in range(int(800 * self.scale)):
                at += self.rng.expovariate(8.0)
                yield at, self.blocks.grow(task, self.tokens(6000, 0.5)), self.tokens(50)

    def diurnal(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 1200)
        for start in self.arrivals(2 * DAY, 0.1):
            if self.rng.random() > 0.55 - 0.45 * math.cos(2 * math.pi * start / DAY):
                continue
            events = self.chat(start, system, 0.65, 90, 1.1)
            yield from events
            if self.rng.random() < 0.1:
                _, text, answer = events[-1]
                later = start + DAY * (0.8 + 0.4 * self.rng.random())
                yield from self.chat(later, self.blocks.grow(text, answer), 0.65, 90, 1.1)

    def rag(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 800)
        rank = [1 / (at + 1) ** 0.9 for at in range(3000)]
        sizes = [self.tokens(2500, 0.6) for _ in rank]
        first: dict[tuple[int, ...], Text] = {}
        for start in self.arrivals(3600, 1.5):
            picked = self.rng.choices(range(len(rank)), weights=rank, k=self.rng.randint(1, 3))
            text, chosen = system, tuple[int, ...]()
            for document in dict.fromkeys(picked):
                chosen = (*chosen, document)
                if chosen not in first:
                    first[chosen] = self.blocks.grow(text, sizes[document])
                text = first[chosen]
            yield from self.chat(start, text, 0.35, 40, 1.0)

    def scans(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 1500)
        for start in self.arrivals(3600, 0.5):
            yield from self.chat(start, system, 0.75, 45, 0.9)
        for at in self.arrivals(3600, 1.2):
            yield at, self.blocks.grow(Text(), self.tokens(9000, 0.5)), self.tokens(80)

    def load(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 1000)
        for start in self.arrivals(7200, 1.6):
            phase = int(start // 600) % 4
            if self.rng.random() < (0.25, 1.0, 0.5, 0.75)[phase]:
                yield from self.chat(start, system, 0.7, (120, 15, 60, 240)[phase], 0.8)

    def tenants(self) -> Iterator[Event]:
        rng = self.rng
        tenants = [
            (
                self.blocks.grow(Text(), self.tokens(2000, 0.8)),
                rng.random() * 0.9,
                self.lognormal(40, 1.5),
                rng.expovariate(1.0),
            )
            for _ in range(40)
        ]
        weights = [weight for *_, weight in tenants]
        for start in self.arrivals(3600, 1.2):
            system, stay, gap, _ = rng.choices(tenants, weights=weights)[0]
            yield from self.chat(start, system, stay, gap, 0.8)

    def chance(self) -> Iterator[Event]:
        """A Poisson process for every text: how long ago it was asked for says nothing."""
        for _ in range(900):
            text = self.blocks.grow(Text(), self.tokens(4000, 0.7))
            for at in self.arrivals(3600, 1 / 400):
                yield at, text, self.tokens(100)
        for at in self.arrivals(3600, 0.8):
            yield at, self.blocks.grow(Text(), self.tokens(4000, 0.7)), self.tokens(100)

    def regime(self) -> Iterator[Event]:
        system = self.blocks.grow(Text(), 1000)
        for start in self.arrivals(7200, 1.4):
            is_long, is_late = self.rng.random() < 0.5, start >= 3600
            text = self.blocks.grow(system, self.tokens(6000 if is_long else 900, 0.4))
            if is_long != is_late:
                yield start, text, self.tokens(200)
            else:
                yield from self.chat(start, text, 0.8, 50 if is_late else 25, 0.7)


KINDS = ("agents", "api", "batch", "diurnal", "rag", "scans", "load", "tenants", "chance", "regime")


def made(kind: str, *, seed: int = 1, block_tokens: int = 512, scale: float = 1.0) -> list[Any]:
    """The requests of a trace, in order of time, as the Mooncake format has them."""
    maker = Maker(seed, block_tokens, scale)
    heap: list[tuple[float, int, Event]] = []
    for number, event in enumerate(getattr(maker, kind)()):
        heapq.heappush(heap, (event[0], number, event))
    lines = []
    while heap:
        at, _, (_, text, answer) = heapq.heappop(heap)
        lines.append(
            {
                "timestamp": round(at * 1000),
                "input_length": text.tokens,
                "output_length": answer,
                "hash_ids": text.ids,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--scale", type=float, default=1.0, help="of all arrival rates")
    asked = parser.parse_args()
    for line in made(
        asked.kind, seed=asked.seed, block_tokens=asked.block_tokens, scale=asked.scale
    ):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
