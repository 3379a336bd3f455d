"""``kvferry explain``: why a request hit or missed, and the path of its copies."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.text import Text

from kvferry.errors import KvferryError
from kvferry.tools.cli.output import as_json_option, grid, put_table, unbroken, url_option
from kvferry.tools.top import scrape
from kvferry.tools.top.answers import AnswerExplanation, Explained, Recent, read_as
from kvferry.tools.words import clean, clip, counted, show_bytes, show_seconds

_MOST_NAME = 500

REASONS = {
    "nothing_missed": "All tokens were on the device or in host memory.",
    "evicted": "It was stored and evicted later. More host memory would have kept it longer.",
    "never_stored": "No request stored it before, or it found no room.",
    "below_threshold": "Too few requests asked for it to be stored (store_threshold).",
    "in_flight": "Its transfer to host memory had not ended.",
    "other_namespace": "It was stored before a reset or a change of weights.",
    "not_promoted": "It was on a lower tier and was not promoted in time.",
    "tier_unavailable": "It was on a tier that could not be used at that time.",
    "load_slower": "It was stored, but computing it was expected to be faster than loading it.",
    "hint": "A hint of the request forbade loads.",
}
VERDICTS = {
    "load_always": "load: load_policy says always",
    "compute_always": "compute: load_policy says never",
    "load_unmeasured": "load: there is no measurement yet",
    "load_to_measure": "load: the last measurement of the link is too old",
    "load_faster": "load: expected to be faster",
    "compute_faster": "compute: expected to be faster",
}


@click.command()
@click.argument("request_id", metavar="[REQUEST]", required=False)
@url_option
@as_json_option
def explain(request_id: str | None, url: str, as_json: bool) -> None:
    """Say why a request hit or missed, and the path of each of its copies.

    REQUEST is the engine's name for it, the id in the server's answer, or its X-Request-Id. Without
    REQUEST it lists the latest requests. An engine remembers about a thousand.

    The exit code is 1 if there is no answer, or the request is not remembered.
    """
    try:
        answer = scrape.explain(url, request_id)
        if as_json:
            click.echo(json.dumps(answer))
        elif request_id is None:
            put_recent(read_as(Recent, answer), unbroken())
        else:
            put_explained(read_as(Explained, answer), unbroken())
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.ClickException(str(scrape.not_explained(url, error))) from error


def put_recent(recent: Recent, console: Console) -> None:
    """Print the latest requests."""
    if not recent.requests:
        console.print("There is no request yet.")
        return
    table = grid("Request", "Asked", "From host", "First miss", left=["First miss"])
    lines = []
    for row in recent.requests:
        name, reason = clip(row.request_id, _MOST_NAME), clip(row.reason or "–").replace("_", " ")
        asked, found = _count(row.asked_tokens), _count(row.host_tokens)
        table.add_row(Text(name), asked, found, Text(reason))
        lines.append((name, f"{asked} asked, {found} from host; first miss: {reason}"))
    put_table(table, lines, console)


def put_explained(explained: Explained, console: Console) -> None:
    """Print the explanation of one request."""

    def put(words: str, style: str = "") -> None:
        console.print(Text(clip(words, _MOST_NAME), style=style))

    put(f"Request {explained.request_id}", "bold")
    if explained.explanation is None:
        put("It had no lookup: it only stored, or was prefetched.")
    else:
        _put_explanation(explained.explanation, console)
    if explained.hints:
        put(f"Hints: {json.dumps(explained.hints)}")
    for words in explained.refused:
        put(f"Not done: {words}", "yellow")
    if explained.overlap:
        put(f"Load and forward pass: {explained.overlap}.")
    if explained.others:
        put(f"Also of that name: {', '.join(explained.others)}", "dim")
    if not explained.copies:
        put("Nothing was copied for it yet.")
        return
    table = grid("Copy", "Blocks", "Bytes", "Time", "Speed", "Path", "", left=["Path", ""])
    lines = []
    for copy in explained.copies:
        route = clip(f"{copy.src} → {copy.dst}", _MOST_NAME)
        size, seconds = show_bytes(copy.num_bytes), show_seconds(copy.seconds)
        speed = f"{show_bytes(copy.num_bytes / copy.seconds)}/s" if copy.seconds else "–"
        path = clip(", ".join(copy.paths) or "–")
        failed = clip(copy.reason and f"failed: {copy.reason}")
        cells = (f"{copy.num_blocks}", size, seconds, speed, Text(path), Text(failed))
        table.add_row(Text(route), *cells)
        words = (
            f"{counted(copy.num_blocks, 'block')}, {size} in {seconds}, {speed}, {path} {failed}"
        )
        lines.append((route, words.rstrip()))
    put_table(table, lines, console)
    for words in dict.fromkeys(copy.why for copy in explained.copies if copy.why):
        for line in words.splitlines():
            console.print(Text(clean(line), style="dim"))


def _put_explanation(why: AnswerExplanation, console: Console) -> None:
    lower = f", {why.lower_tokens} were on lower tiers" if why.lower_tokens else ""
    neither = max(0, why.asked_tokens - why.device_tokens - why.host_tokens)
    console.print(
        f"Asked for {why.asked_tokens} tokens: {why.device_tokens} were on the device, "
        f"{why.host_tokens} in host memory, {neither} in neither{lower}."
    )
    at = f"First missing: token {why.first_missing}. " if why.first_missing is not None else ""
    words = f"{REASONS[why.reason]} " if why.reason in REASONS else ""
    console.print(Text(f"{at}{words}({clip(why.reason)})"))
    if why.asked_blocks:
        console.print(f"Tiers were asked for {counted(why.asked_blocks, 'block')}.")
    for tier in why.tiers_away:
        console.print(Text(f"Away: {clip(tier, _MOST_NAME)}", style="red"))
    decision = why.decision
    if decision.verdict:
        words = VERDICTS.get(decision.verdict, clip(decision.verdict))
        if decision.load_seconds is not None and decision.compute_seconds is not None:
            load, compute = map(show_seconds, (decision.load_seconds, decision.compute_seconds))
            words += f", {load} to load against {compute} to compute"
        console.print(Text(f"Decision: {words}."))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
