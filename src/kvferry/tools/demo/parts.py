"""The parts of the demo: three ways to serve, a restart, and a fleet that shares a store.

::

    three ways   a big device, a small one, and the small one with kvferry
    restart      before: serves with a disk, then its process ends
                 warm: a new process with the same disk; cold: a new process without one
    fleet        conversations ──> random router ──> servers ──> one store, or none
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvferry.core.quantities import MiB
from kvferry.errors import InputError
from kvferry.settings.tiers import TierSpec, show_tiers
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.demo.model import BLOCK_TOKENS, ModelShape
from kvferry.tools.demo.mooncake_master import MooncakeMaster
from kvferry.tools.demo.report import (
    FIRST_TOKEN,
    PREFILL,
    OnTurn,
    Part,
    Row,
    Run,
    hit_rate,
    ignore_turn,
)
from kvferry.tools.demo.servers import ServerSetup, run_servers
from kvferry.tools.demo.workload import Chat, Dialogue
from kvferry.tools.words import counted, show_bytes, show_seconds, show_share

_CONVERSATIONS, _TURNS = 8, 4
"""Enough to see the effect of a restart or a fleet in a few seconds."""

_SEGMENT_UNIT = 16 * MiB


@dataclass(frozen=True)
class Scenario:
    """The workload and the sizes that all parts share."""

    chat: Chat
    shape: ModelShape
    device_blocks: int
    host_bytes: int
    tiers: tuple[TierSpec, ...] = ()

    def __post_init__(self) -> None:
        longest = self.chat.longest
        if longest > self.shape.max_tokens:
            raise InputError(
                f"a conversation grows to {longest} tokens, the model ends at "
                f"{self.shape.max_tokens}; make it shorter"
            )
        needed = -(-longest // BLOCK_TOKENS)
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
        return self.chat.num_blocks(BLOCK_TOKENS)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.shape.num_layers * int(np.prod(self.shape.kv_shape(1, BLOCK_TOKENS))) * 4

    @property
    def short_chat(self) -> Chat:
        """A part of the chat."""
        conversations = min(_CONVERSATIONS, self.chat.num_conversations)
        turns = max(2, min(_TURNS, self.chat.num_turns))
        return replace(self.chat, num_conversations=conversations, num_turns=turns)

    def server(self, **settings: Any) -> ServerSetup:
        """The setup of a server process of these sizes."""
        return ServerSetup(self.shape, self.device_blocks, self.host_bytes, settings)

    def describe(self, *, is_fleet: bool = False) -> str:
        """The setting in words."""
        chat, shape = self.short_chat if is_fleet else self.chat, self.shape
        device = "Each server's device" if is_fleet else "The small device"
        windows = [window for window in shape.windows if window is not None]
        layers = f"{shape.num_layers} layers"
        if windows:
            layers += f", {len(windows)} of them with a sliding window of {windows[0]} tokens"
        return (
            f"{chat.num_conversations} conversations of {chat.num_turns} turns, {chat.num_users} "
            f"at a time. Each starts with about {chat.opening_tokens} tokens. Each turn adds about "
            f"{chat.question_tokens} tokens of question and {chat.answer_tokens} of answer. "
            f"Together they need {chat.num_blocks(BLOCK_TOKENS):,} blocks of "
            f"{BLOCK_TOKENS} tokens. {device} has {self.device_blocks:,}. The model is a "
            f"numpy decoder ({layers}, width {shape.width}) with fixed random weights on this "
            "machine's CPU."
        )

    def to_dict(self) -> dict[str, Any]:
        """The setting as plain data."""
        sizes = {"working_set_blocks": self.working_set, "block_bytes": self.block_bytes}
        sizes["block_tokens"] = BLOCK_TOKENS
        return asdict(self) | sizes | {"tiers": show_tiers(self.tiers)}


WAYS = {"kvferry": "Small + kvferry", "small": "Small device", "roomy": "Big device"}
"""A small device with kvferry, without, and a device with room for the working set."""


def compare(scenario: Scenario, on_turn: OnTurn = ignore_turn) -> Part:
    """Serve the workload each way."""
    tiers = {"tiers": show_tiers(scenario.tiers)} if scenario.tiers else {}
    alone = replace(scenario.server(), settings=None)
    roomy = replace(alone, device_blocks=scenario.working_set)
    setups = {"roomy": roomy, "small": alone, "kvferry": scenario.server(**tiers)}
    runs = {
        way: run_servers(WAYS[way], setup, Dialogue(scenario.chat), on_turn)
        for way, setup in setups.items()
    }
    runs = {way: runs[way] for way in WAYS}
    small, ferried = runs["small"], runs["kvferry"]
    fewer = small.tokens("prefilled") / ferried.tokens("prefilled")
    sooner = small.first_token_seconds() / ferried.first_token_seconds()
    moved = ferried.facts["bytes_moved"]
    gain = (
        f"On the same small device kvferry computed {fewer:.1f}x fewer prefill tokens, and the "
        f"median first token came {sooner:.1f}x sooner."
    )
    if scenario.tiers:
        gain += (
            f" Between host memory and {show_tiers(scenario.tiers)}: "
            f"{show_bytes(moved['host->tiers'])} written, {show_bytes(moved['tiers->host'])} read."
        )
    loaded, stored = show_bytes(moved["host->device"]), show_bytes(moved["device->host"])
    cards = (
        (f"{fewer:.1f}×", "fewer prefill tokens", _change(PREFILL, small, ferried)),
        _sooner(small, ferried),
        (
            show_share(hit_rate(ferried.turns, "host")),
            "of prompt tokens loaded from host memory",
            f"{loaded} loaded, {stored} stored",
        ),
    )
    rows = (
        ("Device blocks", lambda run: f"{run.facts['device_blocks']:,}"),
        FIRST_TOKEN,
        ("First token p95", lambda run: show_seconds(run.first_token_seconds(95))),
        ("Tokens per second", lambda run: f"{run.generated_tokens / run.facts['seconds']:,.0f}"),
        PREFILL,
        ("Hit rate, device", lambda run: show_share(hit_rate(run.turns, "device"))),
        ("Hit rate, host", lambda run: show_share(hit_rate(run.turns, "host"))),
        ("Stored in host memory", lambda run: show_bytes(run.facts["bytes_moved"]["device->host"])),
        ("Loaded from it", lambda run: show_bytes(run.facts["bytes_moved"]["host->device"])),
        ("Run time", lambda run: f"{run.facts['seconds']:.1f} s"),
    )
    facts = {"prefill_ratio": fewer, "ttft_p50_ratio": sooner}
    return Part("Three ways", runs, "in the three runs", gain, cards, rows, facts)


def _change(row: Row, before: Run, after: Run) -> str:
    return f"{row[1](before)} → {row[1](after)}"


def _sooner(before: Run, after: Run) -> tuple[str, str, str]:
    ratio = before.first_token_seconds() / after.first_token_seconds()
    return f"{ratio:.1f}×", "sooner first token (median)", _change(FIRST_TOKEN, before, after)


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
    chat = scenario.short_chat
    first, last = range(chat.num_turns - 1), range(chat.num_turns - 1, chat.num_turns)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        with_disk = scenario.server(
            disk=folder,
            disk_size=256 * MiB,
            disk_keep_free=0,
            tier_write="through",
            # Copies may lag behind. A store without room would be lost, and with a window's
            # last block all of its turn.
            max_storing_blocks=scenario.device_blocks * len(scenario.shape.group_windows),
            load_policy="always",  # this small model computes faster than a real one
        )
        dialogue = Dialogue(chat, first)
        before = run_servers(LIVES["before"], with_disk, dialogue, on_turn)
        again = [Dialogue(chat, last, dialogue.histories) for _ in range(2)]
        warm = run_servers(LIVES["warm"], with_disk, again[0], on_turn)
        cold = run_servers(LIVES["cold"], scenario.server(), again[1], on_turn)
    found = warm.tokens("host") / warm.tokens("prompt")
    sooner = cold.first_token_seconds() / warm.first_token_seconds()
    restored = f"{warm.facts['restored_blocks']:,}"
    gain = (
        f"The server stopped, and a new process found {restored} blocks on disk. Its first turns "
        f"found {found:.0%} of their prompts there. The median first token came {sooner:.1f}x "
        "sooner than in a process without the disk."
    )
    cards = (
        (show_share(found), "hit rate of the first turns", f"{restored} blocks found on disk"),
        _sooner(cold, warm),
    )
    rows = (
        FIRST_TOKEN,
        PREFILL,
        ("Blocks found at start", lambda run: f"{run.facts['restored_blocks']:,}"),
        ("Read from disk", lambda run: show_bytes(run.facts["read_bytes"])),
    )
    facts = {"hit_rate": found, "written_bytes": before.facts["written_bytes"]}
    where = "after the restart, with the disk and without"
    runs = {"warm": warm, "cold": cold}
    return Part("After a restart", runs, where, gain, cards, rows, facts)


FLEETS = {"shared": "One store for all", "alone": "Each for itself"}


def run_fleet(
    scenario: Scenario, num_servers: int, *, kill: bool = False, on_turn: OnTurn = ignore_turn
) -> Part:
    """Serve with a shared store, which starts and ends here, then without.

    With ``kill``, one server is killed at half of the turns of each run.
    """
    chat = scenario.short_chat
    total = chat.num_blocks(BLOCK_TOKENS) * scenario.block_bytes
    # Room for everything twice: objects lie on random segments, and one segment may be lost.
    segment = max(4, -(-2 * total // (num_servers * _SEGMENT_UNIT))) * _SEGMENT_UNIT

    def run(name: str, setup: ServerSetup) -> Run:
        return run_servers(
            FLEETS[name], setup, Dialogue(chat), on_turn, num_servers=num_servers, kill=kill
        )

    with MooncakeMaster() as master:
        sharing = scenario.server(
            remote=f"mooncake://{master.place}?segment={segment}",
            tier_write="through",
            load_policy="always",  # this small model computes faster than a real one
        )
        shared = run("shared", sharing)
    return fleet_part(num_servers, shared, run("alone", scenario.server()))


def fleet_part(num_servers: int, shared: Run, alone: Run) -> Part:
    """The two runs beside each other, with the saving in words."""
    saved = None
    cards = [(show_share(_found(shared.turns)), "hit rate", f"{_hits(alone)} without the store")]
    if shared.facts["read_bytes"]:  # else any difference is chance: turns met other turns
        saved = 1 - shared.tokens("prefilled") / alone.tokens("prefilled")
        prefill = _change(PREFILL, alone, shared)
        words = [f"Sharing saved {saved:.0%} of the prefill tokens ({prefill})."]
        cards.append((show_share(saved), "of prefill saved by sharing", prefill))
    else:
        words = ["Nothing was read from the store, so no saving can be shown."]
    rows = [
        FIRST_TOKEN,
        PREFILL,
        ("Hit rate", _hits),
        ("Read from the store", lambda run: show_bytes(run.facts["read_bytes"])),
        ("Turns by server", _turns_by_server),
    ]
    killed = shared.facts["killed_server"]
    if killed is not None:
        rows[3:3] = [
            ("Hit rate before the kill", lambda run: show_share(_found(_before_kill(run)))),
            ("Hit rate after the kill", lambda run: show_share(_found(_after_kill(run)))),
        ]
        rates = [show_share(_found(turns(shared))) for turns in (_before_kill, _after_kill)]
        words.append(
            f"Server {killed} (†) was killed at half of the turns. Other servers answered "
            f"{counted(len(shared.facts['resent_turns']), 'turn')} that it had in progress. The "
            f"hit rate was {rates[0]} before and {rates[1]} after."
        )
        cards.append((rates[1], "hit rate after the kill", f"{rates[0]} before"))
    if shared.facts["store_ailment"]:
        words.append(f"The store was unavailable for a while: {shared.facts['store_ailment']}.")
    runs = {"shared": shared, "alone": alone}
    facts = {"servers": num_servers, "prefill_saved_share": saved}
    where = f"on {num_servers} servers, with the store and without"
    title = f"{num_servers} servers, one store"
    return Part(title, runs, where, " ".join(words), cards, rows, facts)


def _found(turns: Sequence[Turn]) -> float:
    return hit_rate(turns, "device", "host")


def _hits(run: Run) -> str:
    return show_share(_found(run.turns))


def _before_kill(run: Run) -> Sequence[Turn]:
    return run.turns[: run.facts["turns_before_kill"]]


def _after_kill(run: Run) -> Sequence[Turn]:
    return run.turns[run.facts["turns_before_kill"] :]


def _turns_by_server(run: Run) -> str:
    counts = enumerate(run.facts["turns_by_server"])
    killed = run.facts["killed_server"]
    return " + ".join(f"{n}†" if number == killed else f"{n}" for number, n in counts)
