"""``kvferry explain``: why a request hit or missed, and how its blocks travelled."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvferry.errors import KvferryError
from kvferry.scheduler.journal import Reason
from kvferry.tools.cli.output import TerminalRoom, unbroken
from kvferry.tools.top import scrape
from kvferry.tools.top.scrape import DEFAULT_URL
from kvferry.tools.top.told import Copied, RecentRequest, Told, Why, read_rows, read_told
from kvferry.tools.words import clean, counted, said, show_bytes, show_seconds

_MOST_NAME = 500

REASONS: dict[str, str] = {
    Reason.NOTHING_MISSED.value: "Everything asked for was on the device or in host memory.",
    Reason.EVICTED.value: "It was stored, and dropped later because the room was needed. More host "
    "memory would have kept it longer.",
    Reason.NEVER_STORED.value: "Nobody computed and stored this before, or it found no room.",
    Reason.BELOW_THRESHOLD.value: "Too few requests asked for it to be stored (store_threshold).",
    Reason.IN_FLIGHT.value: "Its bytes were still on their way in.",
    Reason.OTHER_NAMESPACE.value: "It was stored before a reset or a change of weights.",
    Reason.NOT_PROMOTED.value: "It lay below the host and was not brought up in time.",
    Reason.TIER_UNAVAILABLE.value: "It lay on a tier that could not be used at that time.",
    Reason.LOAD_SLOWER.value: "It was there, in host memory or below, but computing it was judged "
    "faster than loading it.",
    Reason.HINT.value: "A hint said that nothing is to be loaded for this request.",
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
    "--url", default=DEFAULT_URL, show_default=True, help="The engine's kvferry endpoint."
)
@click.option("--json", "as_json", is_flag=True, help="Print what the endpoint answered.")
def explain(request_id: str | None, url: str, as_json: bool) -> None:
    """Say why a request hit or missed, and by which path each of its copies went, and why.

    REQUEST is the engine's name for it, the id in the server's answer, or the X-Request-Id that was
    sent with it. Without REQUEST it lists the latest requests. An engine remembers about a thousand
    of them.

    The exit code is 1 where nothing answers, or the request is not remembered.
    """
    try:
        answer = scrape.explain(url, request_id)
        if as_json:
            click.echo(json.dumps(answer))
        elif request_id is None:
            _list(read_rows(answer), unbroken())
        else:
            _tell(read_told(answer), unbroken())
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.ClickException(str(scrape.not_explained(url, error))) from error


def _list(rows: list[RecentRequest], console: Console) -> None:
    if not rows:
        console.print("No request has come by yet.")
        return
    table = _table("Request", "Asked", "From host", "First thing missing")
    lines = []
    for row in rows:
        name, reason = said(row.request_id, _MOST_NAME), said(row.reason or "–").replace("_", " ")
        asked, found = _count(row.asked_tokens), _count(row.host_tokens)
        table.add_row(Text(name), asked, found, Text(reason))
        lines.append((name, f"{asked} asked, {found} from host; first missing: {reason}"))
    _print(table, lines, console)


def _tell(told: Told, console: Console) -> None:
    console.print(Text(f"Request {said(told.request_id, _MOST_NAME)}", style="bold"))
    if told.why is None:
        console.print("It was never looked up; it only stored, or was fetched ahead.")
    else:
        _tell_why(told.why, console)
    if told.hints not in ("", "{}"):
        console.print(Text(f"Hints: {said(told.hints, _MOST_NAME)}"))
    for words in told.refused:
        console.print(Text(f"Not done: {said(words, _MOST_NAME)}", style="yellow"))
    if told.overlap:
        console.print(Text(f"Load and forward pass: {said(told.overlap, _MOST_NAME)}."))
    if told.others:
        names = ", ".join(said(name, _MOST_NAME) for name in told.others)
        console.print(Text(f"Also of that name: {names}", style="dim"))
    if not told.copies:
        console.print("Nothing was copied for it yet.")
        return
    table = _table("Copy", "Blocks", "Bytes", "Time", "Speed", "Path", "")
    lines = []
    for copy in told.copies:
        route, blocks, size, time, speed, path, failed = _copy(copy)
        table.add_row(Text(route), blocks, size, time, speed, Text(path), Text(failed))
        moved = f"{counted(copy.num_blocks, 'block')}, {size} in {time}, {speed}, {path} {failed}"
        lines.append((route, moved.rstrip()))
    _print(table, lines, console)
    for words in dict.fromkeys(copy.why for copy in told.copies if copy.why):
        for line in words.splitlines():
            console.print(Text(clean(line), style="dim"))


def _tell_why(why: Why, console: Console) -> None:
    lower = f", {why.lower_tokens} lay below the host" if why.lower_tokens else ""
    computed = why.asked_tokens - why.device_tokens - why.host_tokens
    console.print(
        f"Asked for {why.asked_tokens} tokens: {why.device_tokens} were on the device, "
        f"{why.host_tokens} in host memory, {max(0, computed)} in neither{lower}.",
    )
    missing = why.first_missing
    at = f"First missing: token {missing}. " if missing is not None else ""
    words = f"{REASONS[why.reason]} " if why.reason in REASONS else ""
    console.print(Text(f"{at}{words}({said(why.reason)})"))
    if why.asked_blocks:
        console.print(f"Tiers were asked for {counted(why.asked_blocks, 'block')}.")
    for tier in why.tiers_away:
        console.print(Text(f"Away: {said(tier, _MOST_NAME)}", style="red"))
    if why.verdict:
        verdict = VERDICTS.get(why.verdict, said(why.verdict))
        console.print(Text(f"Decision: {verdict}{_times(why)}."))


def _times(why: Why) -> str:
    if why.load_seconds is None or why.compute_seconds is None:
        return ""
    load, compute = show_seconds(why.load_seconds), show_seconds(why.compute_seconds)
    return f", {load} to load against {compute} to compute"


def _copy(copy: Copied) -> tuple[str, ...]:
    speed = f"{show_bytes(copy.num_bytes / copy.seconds)}/s" if copy.seconds else "–"
    return (
        said(f"{copy.src} → {copy.dst}", _MOST_NAME),
        f"{copy.num_blocks}",
        show_bytes(copy.num_bytes),
        show_seconds(copy.seconds),
        speed,
        said(", ".join(copy.paths) or "–"),
        said(f"failed: {copy.reason}") if copy.reason else "",
    )


def _print(table: Table, lines: list[tuple[str, str]], console: Console) -> None:
    """The table, or the same in lines where it is too wide: a number is never cut."""
    if TerminalRoom(console, console.options).beside(table) >= 0:
        console.print(table)
        return
    for name, words in lines:
        console.print(Text(name))
        console.print(Padding(Text(words), (0, 0, 0, 2)))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        is_word = name in ("", "Path", "First thing missing")
        table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
    return table
