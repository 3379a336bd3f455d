"""``kvferry explain``: why a request hit or missed, and how its blocks travelled."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.errors import KvferryError
from kvferry.scheduler.why import Reason
from kvferry.watch import scrape
from kvferry.watch.words import clean, show_bytes, show_seconds

REASONS = {
    Reason.NOTHING_MISSED: "Everything asked for was on the device or in host memory.",
    Reason.EVICTED: "It was stored, and dropped later because the room was needed. More host "
    "memory would have kept it longer.",
    Reason.NEVER_STORED: "Nobody computed and stored this before, or it found no room.",
    Reason.BELOW_THRESHOLD: "It was not asked for often enough to be stored (store_after).",
    Reason.IN_FLIGHT: "Its bytes were still on their way in.",
    Reason.OTHER_NAMESPACE: "It was stored before a reset or a change of weights.",
    Reason.STILL_BELOW: "It lay below the host and was not brought up in time.",
    Reason.LOAD_SLOWER: "It was there, but computing it was judged faster than loading it.",
}

VERDICTS = {
    "load_always": "load: load_policy says always",
    "compute_always": "compute: load_policy says never",
    "load_unmeasured": "load: nothing is measured yet, and loading is the better bet",
    "load_to_measure": "load: the link was last measured long ago, so it is tried again",
    "load_faster": "load: expected to be faster",
    "compute_faster": "compute: expected to be faster",
}


@click.command()
@click.argument("request_id", metavar="[REQUEST]", required=False)
@click.option(
    "--url", default=scrape.DEFAULT_URL, show_default=True, help="The engine's kvferry endpoint."
)
@click.option("--json", "as_json", is_flag=True, help="Print what the endpoint answered.")
def explain(request_id: str | None, url: str, as_json: bool) -> None:
    """Say why a request hit or missed, and by which path each of its copies went, and why.

    REQUEST is the engine's name for it, or the id in the server's answer: vLLM's own names have
    that in them. Without REQUEST it lists the latest requests. An engine remembers about a
    thousand of them.

    The exit code is 1 where nothing answers, or the request is not remembered.
    """
    try:
        answer = scrape.explain(url, request_id)
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(answer))
    elif request_id is None:
        _list(answer.get("requests", []), console)
    else:
        _tell(answer, console)


def _list(requests: list[dict[str, Any]], console: Console) -> None:
    if not requests:
        console.print("No request has come by yet.")
        return
    table = _table("Request", "Asked", "From host", "First thing missing")
    for row in requests:
        reason = clean(row.get("reason") or "–").replace("_", " ")
        table.add_row(
            escape(clean(row.get("request_id"))),
            _count(row.get("asked_tokens")),
            _count(row.get("host_tokens")),
            escape(reason),
        )
    console.print(table)


def _tell(answer: dict[str, Any], console: Console) -> None:
    console.print(Text(f"Request {clean(answer.get('request_id'))}", style="bold"))
    why = answer.get("explanation")
    if why is None:
        console.print("It was never looked up; it only stored.")
    else:
        _tell_why(why, console)
    others = answer.get("others", [])
    if others:
        console.print(Text(f"Also of that name: {', '.join(map(clean, others))}", style="dim"))
    copies = answer.get("copies", [])
    if not copies:
        console.print("Nothing was copied for it yet.")
        return
    table = _table("Copy", "Blocks", "Bytes", "Time", "Speed", "Path", "")
    for copy in copies:
        table.add_row(*_copy(copy))
    console.print(table)
    for words in dict.fromkeys(str(copy["why"]) for copy in copies if copy.get("why")):
        for line in words.splitlines():
            console.print(Text(clean(line), style="dim"))


def _tell_why(why: dict[str, Any], console: Console) -> None:
    lower = f", {why['lower_tokens']} lay below the host" if why.get("lower_tokens") else ""
    computed = why["asked_tokens"] - why["device_tokens"] - why["host_tokens"]
    console.print(
        f"Asked for {why['asked_tokens']} tokens: {why['device_tokens']} were on the device, "
        f"{why['host_tokens']} in host memory, {max(0, computed)} in neither{lower}.",
        soft_wrap=True,
    )
    words = REASONS[Reason(why["reason"])]
    missing = why.get("first_missing")
    at = f"First missing: token {missing}. " if missing is not None else ""
    console.print(f"{at}{words} ({why['reason']})", soft_wrap=True)
    decision = why.get("decision")
    if decision:
        verdict = VERDICTS.get(decision["verdict"], decision["verdict"])
        console.print(f"Decision: {verdict}{_times(decision)}.", soft_wrap=True)


def _times(decision: dict[str, Any]) -> str:
    load, compute = decision.get("load_seconds"), decision.get("compute_seconds")
    if load is None or compute is None:
        return ""
    return f", {show_seconds(load)} to load against {show_seconds(compute)} to compute"


def _copy(copy: dict[str, Any]) -> tuple[str, ...]:
    seconds, num_bytes = copy["seconds"], copy["num_bytes"]
    speed = f"{show_bytes(num_bytes / seconds)}/s" if seconds else "–"
    return (
        escape(clean(f"{copy['src']} → {copy['dst']}")),
        f"{copy['num_blocks']}",
        show_bytes(num_bytes),
        show_seconds(seconds),
        speed,
        escape(clean(", ".join(copy["paths"]) or "–")),
        escape(clean(f"failed: {copy['reason']}") if copy["reason"] else ""),
    )


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for name in others:
        is_word = name in ("", "Path", "First thing missing")
        table.add_column(name, justify="left" if is_word else "right")
    return table
