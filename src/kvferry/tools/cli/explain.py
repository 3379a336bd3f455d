"""``kvferry explain`` and ``kvferry control``: questions and orders to a running server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from kvferry.errors import ConfigError, InputError, KvferryError, UnreachableError
from kvferry.settings.kinds import read_secret
from kvferry.tools.cli.output import as_json_option, grid, put_table, unbroken, url_option
from kvferry.tools.top import scrape
from kvferry.tools.top.scrape import (
    AnswerExplanation,
    Explained,
    Recent,
    base_url,
    post,
    read_as,
    read_json,
)
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
    except KvferryError:
        raise
    except ValueError as error:
        raise scrape.not_explained(url, error) from error


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


TOKEN_ENV = "KVFERRY_CONTROL_TOKEN"
ACTIONS = ("lookup", "hint", "pin", "unpin", "prefetch", "drop")
_DID = {"pin": "pinned", "unpin": "unpinned", "drop": "dropped"}


@click.command()
@click.argument("action", type=click.Choice(ACTIONS), metavar="ACTION")
@click.option("--request", "request_id", help="A request's name, or the id in its answer.")
@click.option("--tokens", type=click.Path(), help="A file of token ids; - is standard input.")
@click.option("--key", "keys", multiple=True, help="A key in hexadecimal, the first block's first.")
@click.option("--salt", default="", help="The salt that goes with --tokens.")
@click.option("--seconds", help="How long to pin, or to keep prefetched blocks, such as 1h.")
@click.option("--hints", help="Hints as JSON, such as '{\"ended\": true}'.")
@url_option
@click.option("--token-file", type=click.Path(), help=f"The file of the token, or {TOKEN_ENV}.")
@as_json_option
def control(action: str, url: str, token_file: str | None, as_json: bool, **given: Any) -> None:
    """Change the blocks of a request: lookup, hint, pin, unpin, prefetch or drop.

    Name the blocks by --request, --tokens or --key. The server must allow it with its settings
    control and control_token. Its setting pin_share bounds the pins, which end with the server.

    The exit code is 1 if there is no answer or the order is refused.
    """
    try:
        order = _order(action, given)
        answer = read_json(post(f"{base_url(url)}/control/{action}", order, _token(token_file)))
    except KvferryError as error:
        if getattr(error, "code", None) != 501:
            raise
        advice = "It takes no orders: start its server with control and control_token set"
        raise UnreachableError(f"{error}. {advice}") from error
    except ValueError as error:
        raise UnreachableError(f"{url} did not answer as expected: {clip(error)}") from error
    if as_json:
        click.echo(json.dumps(answer))
    else:
        _put_answer(action, answer)


def _order(action: str, given: dict[str, Any]) -> dict[str, Any]:
    order: dict[str, Any] = {}
    if given["request_id"]:
        order["request_id"] = given["request_id"]
    if given["tokens"]:
        order["tokens"] = _read_tokens(given["tokens"])
    if given["keys"]:
        order["keys"] = list(given["keys"])
    if len(order) != 1:
        raise InputError("name the blocks by one of --request, --tokens or --key")
    if given["salt"] and not given["tokens"]:
        raise InputError("--salt goes with --tokens: keys and requests have theirs already")
    if action == "hint" and not given["hints"]:
        raise InputError("give the hints by --hints, such as '{\"ended\": true}'")
    order |= {name: given[name] for name in ("salt", "seconds") if given[name]}
    if given["hints"]:
        try:
            order["hints"] = json.loads(given["hints"])
        except ValueError as error:
            raise InputError(f"--hints is no JSON: {error}") from None
    return order


def _read_tokens(name: str) -> list[int]:
    """Read numbers, with commas and brackets or without."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        return [int(word) for word in text.replace(",", " ").strip().strip("[]").split()]
    except OSError as error:
        raise InputError(f"--tokens: cannot read {name!r}: {error.strerror}") from None
    except ValueError:
        raise InputError(f"--tokens: {name!r} is no list of token ids") from None


def _token(file: str | None) -> str:
    given = f"file:{file}" if file else os.environ.get(TOKEN_ENV, "")
    if not given:
        raise ConfigError(
            f"an order needs the server's token: give --token-file or set {TOKEN_ENV}"
        )
    return read_secret("control_token", given)


def _put_answer(action: str, answer: dict[str, Any]) -> None:
    console = unbroken()

    def count(name: str) -> int:
        value = answer.get(name)
        return value if isinstance(value, int) else 0

    names, refused = answer.get("request_ids"), answer.get("refused")
    if isinstance(names, list) and len(names) > 1:
        console.print(f"This answer took {len(names)} requests. The order is for all of them.")
    console.print(
        f"Of {count('tokens')} tokens {count('host_tokens')} are in host memory, "
        f"{count('lower_tokens')} more are on lower tiers."
    )
    if count("unknown_blocks"):
        unknown = counted(count("unknown_blocks"), "block")
        console.print(f"It is unknown whether lower tiers have {unknown}.")
    if action in _DID:
        console.print(f"{counted(count('blocks'), 'block')} {_DID[action]}.")
    if answer.get("is_under_way"):
        console.print("The rest is being promoted.")
    held = count("held_blocks")
    pinned = f"{counted(held, 'block')} of it pinned, on all tiers together."
    console.print(pinned if held else "No block of it is pinned.")
    for words in refused if isinstance(refused, list) else ():
        console.print(f"Not done: {clip(words)}", markup=False)
