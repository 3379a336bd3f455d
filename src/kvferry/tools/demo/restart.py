"""A server that stops and starts again: the blocks its next process finds on disk.

::

    before   serves the first rounds of the conversations with a disk, then its process ends
    warm     a new process with the same disk serves the next round
    cold     a new process without a disk serves the same round and computes it
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

from kvferry.core.quantities import MiB
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.demo.compare import Scenario
from kvferry.tools.demo.runs import OnTurn, Part, Run, ignore_turn
from kvferry.tools.demo.server import ServerSetup
from kvferry.tools.demo.servers import Router, ServerProcesses
from kvferry.tools.demo.workload import Dialogue
from kvferry.tools.words import show_bytes, show_seconds

_CONVERSATIONS = 8
"""Enough to see the effect. The whole part takes a few seconds."""

TITLES = {
    "before": "Before the restart",
    "warm": "Restarted, with disk",
    "cold": "Restarted, no disk",
}


def run_restart(scenario: Scenario, on_turn: OnTurn = ignore_turn) -> Part:
    """Serve, stop, and serve again. The disk is a temporary directory.

    Raises:
        TransferError: A server could not serve.
    """
    chat = replace(
        scenario.chat,
        num_conversations=min(_CONVERSATIONS, scenario.chat.num_conversations),
        num_turns=max(2, min(3, scenario.chat.num_turns)),
    )
    first, last = range(chat.num_turns - 1), range(chat.num_turns - 1, chat.num_turns)
    sizes = (scenario.shape, scenario.device_blocks, scenario.host_bytes, scenario.block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        with_disk = ServerSetup(
            *sizes,
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
        cold = _live("cold", ServerSetup(*sizes), again[1], on_turn)
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
        on_turn(TITLES[name], dialogue.num_turns, turn)

    with ServerProcesses(setup, 1) as servers:
        router = Router(servers, dialogue, answered)
        router.run()
        router.finish()
    names = ("restored_blocks", "read_bytes", "written_bytes")
    return Run(TITLES[name], router.turns, facts={name: router.total(name) for name in names})
