"""The same conversations served three ways: the cost of a small device, and the gain of kvferry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.settings.tiers import TierSpec, show_tiers
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.runs import OnTurn, Part, Run, ignore_turn
from kvferry.tools.demo.workload import Chat, serve
from kvferry.tools.words import show_bytes, show_seconds
from kvferry.types import DEVICE, HOST

WAYS = {"kvferry": "Small + kvferry", "small": "Small device", "roomy": "Big device"}
"""A device with room for the working set, one without, and the small one with kvferry."""

ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("Device blocks", lambda run: f"{run.facts['device_blocks']:,}"),
    ("First token p50", lambda run: show_seconds(run.first_token_seconds())),
    ("First token p95", lambda run: show_seconds(run.first_token_seconds(95))),
    ("Tokens per second", lambda run: f"{run.generated_tokens / run.seconds:,.0f}"),
    ("Prefill tokens computed", lambda run: f"{run.tokens('prefilled'):,}"),
    ("Hit rate, device", lambda run: f"{run.hit_rate('device'):.0%}"),
    ("Hit rate, host", lambda run: f"{run.hit_rate('host'):.0%}"),
    ("Moved device → host", lambda run: show_bytes(run.moved["device->host"])),
    ("Moved host → device", lambda run: show_bytes(run.moved["host->device"])),
    ("Preemptions", lambda run: f"{run.facts['preemptions']:,}"),
    ("Run time", lambda run: f"{run.seconds:.1f} s"),
)


@dataclass(frozen=True)
class Scenario:
    """The workload and the sizes that all three ways share."""

    chat: Chat
    shape: ModelShape
    device_blocks: int
    host_bytes: int
    block_tokens: int = 16
    tiers: tuple[TierSpec, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        longest = self.chat.longest
        if longest > self.shape.max_tokens:
            raise InputError(
                f"a conversation grows to {longest} tokens, the model ends at "
                f"{self.shape.max_tokens}; make it shorter"
            )
        needed = -(-longest // self.block_tokens)
        if self.device_blocks < needed:
            raise InputError(
                f"a conversation grows to {longest} tokens, that is {needed} blocks; "
                f"{self.device_blocks} device blocks cannot hold even one"
            )
        if self.device_blocks >= self.working_set:
            raise InputError(
                f"{self.device_blocks} device blocks hold the whole working set of "
                f"{self.working_set}, so there is nothing to offload; give fewer"
            )
        if self.host_bytes < self.block_bytes:
            raise InputError(
                f"host memory of {self.host_bytes} bytes holds not even one block of "
                f"{self.block_bytes} bytes"
            )

    @property
    def working_set(self) -> int:
        """Blocks of all conversations at their longest."""
        return self.chat.num_blocks(self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.shape.num_layers * int(np.prod(self.shape.kv_shape(1, self.block_tokens))) * 4

    def to_dict(self) -> dict[str, Any]:
        """The setting as plain data."""
        chat, shape = self.chat, self.shape
        return {
            "conversations": chat.num_conversations,
            "turns": chat.num_turns,
            "opening_tokens": chat.opening_tokens,
            "question_tokens": chat.question_tokens,
            "answer_tokens": chat.answer_tokens,
            "users": chat.num_users,
            "seed": chat.seed,
            "windows": list(shape.windows),
            "layers": shape.num_layers,
            "width": shape.width,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "working_set_blocks": self.working_set,
            "device_blocks": self.device_blocks,
            "host_bytes": self.host_bytes,
            "tiers": show_tiers(self.tiers),
        }


def compare(scenario: Scenario, on_turn: OnTurn = ignore_turn) -> Part:
    """Serve the workload each way."""
    decoder = Decoder(scenario.shape)
    runs = {way: _run(scenario, way, decoder, on_turn) for way in reversed(WAYS)}
    runs = {way: runs[way] for way in WAYS}
    small, ferried = runs["small"], runs["kvferry"]
    prefill_ratio = small.tokens("prefilled") / ferried.tokens("prefilled")
    first_token_ratio = small.first_token_seconds() / ferried.first_token_seconds()
    gain = (
        f"On the same small device kvferry computed {prefill_ratio:.1f}x fewer prefill tokens and "
        f"gave the median first token {first_token_ratio:.1f}x sooner."
    )
    if scenario.tiers:
        gain += (
            f" Below host memory ({show_tiers(scenario.tiers)}): "
            f"{show_bytes(ferried.moved['host->tiers'])} went down, "
            f"{show_bytes(ferried.moved['tiers->host'])} came back."
        )
    facts = {"prefill_ratio": prefill_ratio, "ttft_p50_ratio": first_token_ratio}
    return Part("Three ways", runs, "in the three runs", gain, ROWS, facts)


def _run(scenario: Scenario, way: str, decoder: Decoder, on_turn: OnTurn) -> Run:
    num_blocks = scenario.working_set if way == "roomy" else scenario.device_blocks
    total = scenario.chat.num_conversations * scenario.chat.num_turns

    def finished(request: ServedRequest) -> None:
        on_turn(WAYS[way], total, request.turn())

    with Runner(decoder, num_blocks=num_blocks, block_tokens=scenario.block_tokens) as runner:
        start = partial(Engine, runner, limits=scenario.limits)
        if way != "kvferry":
            return _serve(start(), WAYS[way], scenario.chat, finished)
        config = Config(tiers=scenario.tiers)
        with Offloader(runner, host_bytes=scenario.host_bytes, config=config) as offloader:
            return _serve(start(offloader=offloader), WAYS[way], scenario.chat, finished)


def _serve(
    engine: Engine, title: str, chat: Chat, finished: Callable[[ServedRequest], None]
) -> Run:
    served = serve(engine, chat, finished)
    moved = dict.fromkeys(("device->host", "host->device", "host->tiers", "tiers->host"), 0)
    if engine.offloader:
        engine.drain()
        engine.memory.check_integrity(num_held=0)
        engine.offloader.scheduler.check_integrity()
        for route, num_bytes in engine.offloader.stats().bytes_moved.items():
            src, dst = (name if name in (DEVICE, HOST) else "tiers" for name in route)
            moved[f"{src}->{dst}"] += num_bytes
    facts = {
        "device_blocks": engine.memory.num_blocks,
        "preemptions": engine.counts.num_preemptions,
        "failed_load_tokens": engine.counts.num_failed_load_tokens,
    }
    turns = [request.turn() for request in served.requests]
    return Run(title, turns, served.seconds, moved, facts)
