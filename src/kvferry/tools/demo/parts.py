"""The parts of the demo: three ways to serve, a restart, and a fleet that shares a store.

::

    three ways   a big device, a small one, and the small one with kvferry
    restart      before: serves with a disk, then its process ends
                 warm: a new process with the same disk; cold: a new process without one
    fleet        conversations ──> random router ──> servers ──> one store, or none
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.core.quantities import MiB
from kvferry.errors import InputError
from kvferry.settings.tiers import TierSpec, show_tiers
from kvferry.tools.demo.blocks import ServedRequest, Turn
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, ServerSetup
from kvferry.tools.demo.mooncake_master import MooncakeMaster
from kvferry.tools.demo.runs import OnTurn, Part, Run, ignore_turn
from kvferry.tools.demo.servers import Router, ServerProcesses
from kvferry.tools.demo.workload import Chat, Dialogue, serve
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

    def server(self, settings: dict[str, Any] | None = None) -> ServerSetup:
        """The setup of a server process of these sizes."""
        sizes = (self.shape, self.device_blocks, self.host_bytes, self.block_tokens)
        return ServerSetup(*sizes, settings or {})

    def describe(self) -> str:
        """The setting in words."""
        chat, shape = self.chat, self.shape
        windows = [window for window in shape.windows if window is not None]
        layers = f"{shape.num_layers} layers"
        if windows:
            layers += f", {len(windows)} of them with a sliding window of {windows[0]} tokens"
        return (
            f"{chat.num_conversations} conversations of {chat.num_turns} turns, {chat.num_users} "
            f"answered at a time. Each opens with about {chat.opening_tokens} tokens. A turn adds "
            f"about {chat.question_tokens} of question and {chat.answer_tokens} of answer. "
            f"Together they need {self.working_set:,} blocks of {self.block_tokens} tokens. The "
            f"small device has {self.device_blocks:,}. The model is a numpy decoder "
            f"({layers}, width {shape.width}) with fixed random weights on this machine's CPU."
        )

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
    runs = {way: _run_way(scenario, way, decoder, on_turn) for way in reversed(WAYS)}
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


def _run_way(scenario: Scenario, way: str, decoder: Decoder, on_turn: OnTurn) -> Run:
    num_blocks = scenario.working_set if way == "roomy" else scenario.device_blocks
    total = scenario.chat.num_conversations * scenario.chat.num_turns

    def finished(request: ServedRequest) -> None:
        on_turn(WAYS[way], total, request.turn())

    with Runner(decoder, num_blocks=num_blocks, block_tokens=scenario.block_tokens) as runner:
        if way != "kvferry":
            return _serve_chat(Engine(runner), WAYS[way], scenario.chat, finished)
        config = Config(tiers=scenario.tiers)
        with Offloader(runner, host_bytes=scenario.host_bytes, config=config) as offloader:
            return _serve_chat(
                Engine(runner, offloader=offloader), WAYS[way], scenario.chat, finished
            )


def _serve_chat(
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


_CONVERSATIONS, _TURNS = 8, 4
"""Enough to see the effect of a restart or a fleet in a few seconds."""

LIVES = {
    "before": "Before the restart",
    "warm": "Restarted, with disk",
    "cold": "Restarted, no disk",
}


def run_restart(scenario: Scenario, on_turn: OnTurn = ignore_turn) -> Part:
    """Serve, stop, and serve again. The disk is a temporary directory.

    Raises:
        TransferError: A server could not serve.
    """
    chat = _short(scenario.chat, 3)
    first, last = range(chat.num_turns - 1), range(chat.num_turns - 1, chat.num_turns)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        with_disk = scenario.server(
            {
                "disk": folder,
                "disk_size": 256 * MiB,
                "disk_keep_free": 0,
                "tier_write": "through",
                # Copies may lag behind. A store without room would be lost, and with a window's
                # last block all of its turn.
                "max_storing_blocks": scenario.device_blocks * len(scenario.shape.group_windows),
                # The small model computes faster than a real one. Loads are shown nevertheless.
                "load_policy": "always",
            },
        )
        dialogue = Dialogue(chat, first)
        before = _live("before", with_disk, dialogue, on_turn)
        again = [Dialogue(chat, last, dialogue.histories) for _ in range(2)]
        warm = _live("warm", with_disk, again[0], on_turn)
        cold = _live("cold", scenario.server(), again[1], on_turn)
    hit_rate = warm.tokens("host") / warm.tokens("prompt")
    ratio = cold.first_token_seconds() / warm.first_token_seconds()
    gain = (
        f"The server stopped, and a new process found {warm.facts['restored_blocks']:,} blocks on "
        f"disk. Its first turns hit {hit_rate:.0%} of their prompts. The median first token came "
        f"{ratio:.1f}x sooner than in a process that computed everything."
    )
    rows = (
        ("First token p50", lambda run: show_seconds(run.first_token_seconds())),
        ("Prefill tokens computed", lambda run: f"{run.tokens('prefilled'):,}"),
        ("Blocks found at the start", lambda run: f"{run.facts['restored_blocks']:,}"),
        ("Read from disk", lambda run: show_bytes(run.facts["read_bytes"])),
    )
    facts = {"hit_rate": hit_rate, "written_bytes": before.facts["written_bytes"]}
    where = "after the restart, with the disk and without"
    return Part("After a restart", {"warm": warm, "cold": cold}, where, gain, rows, facts)


def _live(name: str, setup: ServerSetup, dialogue: Dialogue, on_turn: OnTurn) -> Run:
    """Serve the dialogue in a process that ends with this call."""

    def answered(turn: Turn) -> None:
        on_turn(LIVES[name], dialogue.num_turns, turn)

    with ServerProcesses(setup, 1) as servers:
        router = Router(servers, dialogue, answered)
        router.run()
        router.finish()
    names = ("restored_blocks", "read_bytes", "written_bytes")
    return Run(LIVES[name], router.turns, facts={name: router.total(name) for name in names})


def _short(chat: Chat, num_turns: int) -> Chat:
    return replace(
        chat,
        num_conversations=min(_CONVERSATIONS, chat.num_conversations),
        num_turns=max(2, min(num_turns, chat.num_turns)),
    )


_SEGMENT_UNIT = 16 * MiB

FLEETS = {"shared": "One store for all", "alone": "Each for itself"}


def run_fleet(
    scenario: Scenario, num_servers: int, *, kill: bool = False, on_turn: OnTurn = ignore_turn
) -> Part:
    """Serve with a shared store, which starts and ends here, then without.

    Args:
        scenario: The workload and the sizes of each server.
        num_servers: The number of servers.
        kill: Kill one server at half of the turns of each run.
        on_turn: Receives every answered turn.
    """
    chat = _short(scenario.chat, _TURNS)
    total = chat.num_blocks(scenario.block_tokens) * scenario.block_bytes
    # Room for everything twice: objects lie on random segments, and one segment may be lost.
    segment = -(-2 * total // (num_servers * _SEGMENT_UNIT)) * _SEGMENT_UNIT
    with MooncakeMaster() as master:
        settings = {
            "remote": f"mooncake://{master.place}?segment={max(segment, 4 * _SEGMENT_UNIT)}",
            "tier_write": "through",
            # The small model computes faster than a real one. Loads are shown nevertheless.
            "load_policy": "always",
        }
        shared = _serve_fleet("shared", scenario.server(settings), chat, num_servers, kill, on_turn)
    alone = _serve_fleet("alone", scenario.server(), chat, num_servers, kill, on_turn)
    return fleet_part(num_servers, shared, alone)


def fleet_part(num_servers: int, shared: Run, alone: Run) -> Part:
    """The two runs beside each other, with the saving in words."""
    words = [f"Every turn went to one of {num_servers} servers at random."]
    saved = None
    if shared.facts["read_bytes"]:  # else any difference is chance: turns met other turns
        saved = 1 - shared.tokens("prefilled") / alone.tokens("prefilled")
        words.append(
            f"With one store for all they computed {shared.tokens('prefilled'):,} prefill tokens "
            f"instead of {alone.tokens('prefilled'):,}: sharing saved {saved:.0%}."
        )
    else:
        words.append("Nothing was read from the store, so no saving can be shown.")
    if shared.facts["killed_server"] is not None:
        words.append(
            f"Server {shared.facts['killed_server']} was killed at half of the turns. The others "
            f"answered its turns under way ({len(shared.facts['resent_turns'])}) with the shared "
            "blocks that the store still has."
        )
    if shared.facts["store_ailment"]:
        words.append(f"The store was away for a while: {shared.facts['store_ailment']}.")
    rows = (
        ("First token p50", lambda run: show_seconds(run.first_token_seconds())),
        ("Prefill tokens computed", lambda run: f"{run.tokens('prefilled'):,}"),
        ("Read from the store", lambda run: show_bytes(run.facts["read_bytes"])),
        ("Turns by server", _turns_by_server),
    )
    runs = {"shared": shared, "alone": alone}
    facts = {"servers": num_servers, "prefill_saved_share": saved}
    where = f"on {num_servers} servers, with the store and without"
    return Part(f"{num_servers} servers, one store", runs, where, " ".join(words), rows, facts)


def _turns_by_server(run: Run) -> str:
    killed = run.facts["killed_server"]
    counts = enumerate(run.facts["turns_by_server"])
    return " + ".join(f"{count}†" if number == killed else f"{count}" for number, count in counts)


def _serve_fleet(
    name: str, setup: ServerSetup, chat: Chat, num_servers: int, kill: bool, on_turn: OnTurn
) -> Run:
    dialogue = Dialogue(chat)

    def answered(turn: Turn) -> None:
        on_turn(FLEETS[name], dialogue.num_turns, turn)

    with ServerProcesses(setup, num_servers) as servers:
        router = Router(servers, dialogue, answered, kill=kill)
        router.run()
    facts = {
        "turns_by_server": [router.answered_by[number] for number in range(num_servers)],
        "read_bytes": router.total("read_bytes"),
        "killed_server": router.killed,
        "resent_turns": router.resent,
        "store_ailment": router.ailment,
    }
    return Run(FLEETS[name], router.turns, facts=facts)
