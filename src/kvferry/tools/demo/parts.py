"""The parts of the demo: three ways to serve, a restart, and a fleet that shares a store.

::

    three ways   a big device, a small one, and the small one with kvferry
    restart      before: serves with a disk, then its process ends
                 warm: a new process with the same disk; cold: a new process without one
    fleet        conversations ──> random router ──> servers ──> one store, or none
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

from kvferry.core.quantities import MiB
from kvferry.errors import InputError
from kvferry.tools.demo.model import BLOCK_TOKENS, ModelShape
from kvferry.tools.demo.mooncake_master import MooncakeMaster
from kvferry.tools.demo.report import (
    COMPUTED,
    FIRST_TOKEN,
    HITS,
    OnTurn,
    Part,
    Row,
    Run,
    hit_rate,
)
from kvferry.tools.demo.servers import ServerSetup, run_servers
from kvferry.tools.demo.workload import Chat, Dialogue
from kvferry.tools.words import counted, show_bytes, show_seconds, show_share

_CONVERSATIONS, _TURNS = 8, 4
"""Size of the chats of a restart and a fleet. It shows their effect in a few seconds."""

_SEGMENT_UNIT = 16 * MiB


@dataclass(frozen=True)
class Scenario:
    """The workload and the sizes that all parts share."""

    chat: Chat
    shape: ModelShape

    def __post_init__(self) -> None:
        longest = max(self.chat.lengths)
        if longest > self.shape.max_tokens:
            raise InputError(
                f"a conversation grows to {longest} tokens, the model ends at "
                f"{self.shape.max_tokens}; make it shorter"
            )
        if self.chat.num_conversations < 2:
            raise InputError("one conversation alone leaves nothing to offload; serve several")

    @property
    def device_blocks(self) -> int:
        """Blocks of the small device: a quarter of all, at least those of one conversation."""
        quarter = self.chat.num_blocks(BLOCK_TOKENS) // 4
        return max(-(-max(self.chat.lengths) // BLOCK_TOKENS), quarter)

    @property
    def short_chat(self) -> Chat:
        """The chat with fewer conversations and turns, for a restart or a fleet."""
        conversations = min(_CONVERSATIONS, self.chat.num_conversations)
        turns = max(2, min(_TURNS, self.chat.num_turns))
        return replace(self.chat, num_conversations=conversations, num_turns=turns)

    def server(self, **settings: Any) -> ServerSetup:
        """The setup of a server process with kvferry."""
        # Always load: measured against so small and fast a model, computing would often win.
        kept = {"host": "256MiB", "load_policy": "always", **settings}
        return ServerSetup(self.shape, self.device_blocks, kept)

    def describe(self, chat: Chat) -> str:
        """Describe a chat, the device and the model in words."""
        return (
            f"{chat.num_conversations} conversations of {chat.num_turns} turns, {chat.num_users} "
            f"at a time. Together they need {chat.num_blocks(BLOCK_TOKENS):,} KV blocks of "
            f"{BLOCK_TOKENS} tokens. A small device has {self.device_blocks:,}. The model is a "
            "numpy decoder with fixed random weights on this machine's CPU."
        )


WAYS = {"kvferry": "Small + kvferry", "small": "Small device", "roomy": "Big device"}
"""A small device with kvferry, without, and a device with room for the working set."""


def compare(scenario: Scenario, on_turn: OnTurn | None = None) -> Part:
    """Serve the workload each way."""
    alone = replace(scenario.server(), settings=None)
    roomy = replace(alone, device_blocks=scenario.chat.num_blocks(BLOCK_TOKENS))
    setups = {"roomy": roomy, "small": alone, "kvferry": scenario.server()}
    runs = {
        way: run_servers(WAYS[way], setup, Dialogue(scenario.chat), on_turn)
        for way, setup in setups.items()
    }
    runs = {way: runs[way] for way in WAYS}
    small, ferried = runs["small"], runs["kvferry"]
    fewer = small.tokens("computed") / ferried.tokens("computed")
    cards = (
        (f"{fewer:.1f}×", "fewer prompt tokens computed", _change(COMPUTED, small, ferried)),
        _sooner(small, ferried),
        (
            show_share(ferried.tokens("host") / ferried.tokens("prompt")),
            "of prompt tokens loaded from host memory",
            f"{show_bytes(ferried.bytes_moved['host->device'])} loaded",
        ),
    )
    rows = (
        ("Device blocks", lambda run: f"{run.device_blocks:,}"),
        FIRST_TOKEN,
        ("First token p95", lambda run: show_seconds(run.first_token_seconds(95))),
        ("Tokens per second", lambda run: f"{run.generated_tokens / run.seconds:,.0f}"),
        COMPUTED,
        HITS,
        ("Stored in host memory", lambda run: show_bytes(run.bytes_moved["device->host"])),
        ("Loaded from it", lambda run: show_bytes(run.bytes_moved["host->device"])),
        ("Run time", lambda run: f"{run.seconds:.1f} s"),
    )
    return Part("Three ways", runs, "in the three runs", cards, rows)


def _change(row: Row, before: Run, after: Run) -> str:
    return f"{row[1](before)} → {row[1](after)}"


def _sooner(before: Run, after: Run) -> tuple[str, str, str]:
    ratio = before.first_token_seconds() / after.first_token_seconds()
    return f"{ratio:.1f}×", "sooner median first token", _change(FIRST_TOKEN, before, after)


def run_restart(scenario: Scenario, on_turn: OnTurn | None = None) -> Part:
    """Serve, stop, and serve again, with a disk in a temporary directory and without.

    Raises:
        TransferError: A server could not serve.
    """
    chat = scenario.short_chat
    first, last = range(chat.num_turns - 1), range(chat.num_turns - 1, chat.num_turns)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        with_disk = scenario.server(disk=folder, disk_size=256 * MiB, disk_keep_free=0)
        dialogue = Dialogue(chat, first)
        run_servers("Before the restart", with_disk, dialogue, on_turn)
        again = [Dialogue(chat, last, dialogue.histories) for _ in range(2)]
        warm = run_servers("Restarted, with disk", with_disk, again[0], on_turn)
        cold = run_servers("Restarted, no disk", scenario.server(), again[1], on_turn)
    found = warm.tokens("host") / warm.tokens("prompt")
    cards = (
        (
            show_share(found),
            "hit rate of the first turns",
            f"{warm.restored_blocks:,} blocks found on disk",
        ),
        _sooner(cold, warm),
    )
    rows = (
        FIRST_TOKEN,
        COMPUTED,
        HITS,
        ("Blocks found at start", lambda run: f"{run.restored_blocks:,}"),
        ("Read from disk", lambda run: show_bytes(run.bytes_moved["tiers->host"])),
    )
    where = "after the restart, with the disk and without"
    return Part("After a restart", {"warm": warm, "cold": cold}, where, cards, rows)


def run_fleet(
    scenario: Scenario, num_servers: int, *, kill: bool = False, on_turn: OnTurn | None = None
) -> Part:
    """Serve with a shared store, which lives during this call, then without.

    With ``kill``, one server is killed at half of the turns of each run.
    """
    chat = scenario.short_chat
    total = chat.num_blocks(BLOCK_TOKENS) * scenario.shape.block_bytes
    # Twice the working set: objects lie on random segments, and a killed server loses its segment.
    segment = max(4, -(-2 * total // (num_servers * _SEGMENT_UNIT))) * _SEGMENT_UNIT

    def run(title: str, setup: ServerSetup) -> Run:
        return run_servers(
            title, setup, Dialogue(chat), on_turn, num_servers=num_servers, kill=kill
        )

    with MooncakeMaster() as master:
        address = f"mooncake://{master.place}?segment={segment}"
        sharing = scenario.server(remote=address, tier_write="through")
        shared = run("One store for all", sharing)
    return fleet_part(num_servers, shared, run("Each for itself", scenario.server()))


def fleet_part(num_servers: int, shared: Run, alone: Run) -> Part:
    """Compare the runs with and without the store, and put the saving in words."""
    cards, note = [(HITS[1](shared), "hit rate", f"{HITS[1](alone)} without the store")], ""
    if shared.bytes_moved["tiers->host"]:  # else nothing was shared, and any difference is chance
        saved = show_share(1 - shared.tokens("computed") / alone.tokens("computed"))
        change = _change(COMPUTED, alone, shared)
        cards.append((saved, "of the computation saved by sharing", change))
    rows = [
        FIRST_TOKEN,
        COMPUTED,
        HITS,
        ("Read from the store", lambda run: show_bytes(run.bytes_moved["tiers->host"])),
        ("Turns by server", lambda run: _turns_by_server(run, num_servers)),
    ]
    if shared.killed_server is not None:
        rows[3:3] = [
            ("Hit rate before the kill", lambda run: hit_rate(run.turns[: run.turns_before_kill])),
            ("Hit rate after the kill", lambda run: hit_rate(run.turns[run.turns_before_kill :])),
        ]
        before, after = rows[3][1](shared), rows[4][1](shared)
        note = (
            f"Server {shared.killed_server} (†) was killed at half of the turns. Other servers "
            f"answered {counted(len(shared.resent_turns), 'turn')} that it had in progress."
        )
        cards.append((after, "hit rate after the kill", f"{before} before"))
    where = f"on {num_servers} servers, with the store and without"
    runs = {"shared": shared, "alone": alone}
    return Part(f"{num_servers} servers, one store", runs, where, cards, rows, note)


def _turns_by_server(run: Run, num_servers: int) -> str:
    marks = ("†" if number == run.killed_server else "" for number in range(num_servers))
    return " + ".join(f"{run.turns_by_server[n]}{mark}" for n, mark in enumerate(marks))
