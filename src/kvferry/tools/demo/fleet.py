"""Servers behind a random router: the work each computes alone, and the work that sharing saves.

::

    conversations ──> random router ──> server 0 ─┐
                                    ──> server 1 ─┼── one store, or none
                                    ──> server 2 ─┘
"""

from __future__ import annotations

from dataclasses import replace

from kvferry.core.quantities import MiB
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.demo.compare import Scenario
from kvferry.tools.demo.mooncake_master import MooncakeMaster
from kvferry.tools.demo.runs import OnTurn, Part, Run, ignore_turn
from kvferry.tools.demo.server import ServerSetup
from kvferry.tools.demo.servers import Router, ServerProcesses
from kvferry.tools.demo.workload import Chat, Dialogue
from kvferry.tools.words import show_bytes, show_seconds

_CONVERSATIONS, _TURNS = 8, 4
"""Enough to see the effect. Each run takes some seconds."""

_SEGMENT_UNIT = 16 * MiB

TITLES = {"shared": "One store for all", "alone": "Each for itself"}


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
    chat = replace(
        scenario.chat,
        num_conversations=min(_CONVERSATIONS, scenario.chat.num_conversations),
        num_turns=max(2, min(_TURNS, scenario.chat.num_turns)),
    )
    sizes = (scenario.shape, scenario.device_blocks, scenario.host_bytes, scenario.block_tokens)
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
        shared = _serve("shared", ServerSetup(*sizes, settings), chat, num_servers, kill, on_turn)
    alone = _serve("alone", ServerSetup(*sizes), chat, num_servers, kill, on_turn)
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


def _serve(
    name: str, setup: ServerSetup, chat: Chat, num_servers: int, kill: bool, on_turn: OnTurn
) -> Run:
    dialogue = Dialogue(chat)

    def answered(turn: Turn) -> None:
        on_turn(TITLES[name], dialogue.num_turns, turn)

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
    return Run(TITLES[name], router.turns, facts=facts)
