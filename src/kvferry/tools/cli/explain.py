"""``kvferry explain`` and ``kvferry control``: query and control a running server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from kvferry.errors import ConfigError, InputError, KvferryError, UnreachableError
from kvferry.settings.kinds import read_secret
from kvferry.tools.cli.output import as_json_option, endpoint_url, plain_console, table, url_option
from kvferry.tools.top import scrape
from kvferry.tools.top.scrape import post, read_json, read_recent, reading
from kvferry.tools.words import clip, counted, show_bytes, show_seconds, tier_words

_MOST_NAME = 500

REASONS = {
    "nothing_missed": "All tokens were found.",
    "evicted": "It was stored and evicted later. More host memory would have kept it longer.",
    "never_stored": "It was never stored: no request had it before, or there was no room.",
    "below_threshold": "Too few requests asked for it (store_threshold).",
    "in_flight": "It was still being stored.",
    "other_namespace": "It was stored before a reset or a change of weights.",
    "not_promoted": "It was on a lower tier and was not promoted in time.",
    "tier_unavailable": "It was on a tier that was unavailable.",
    "load_slower": "It was stored, but computing it was expected to be faster than loading it.",
    "hint": "A hint of the request forbade loads.",
}
VERDICTS = {
    "load_always": "load (load_policy is always)",
    "load_unmeasured": "load (not measured yet)",
    "load_to_measure": "load (to renew an old measurement of the link)",
    "load_faster": "load (expected to be faster)",
    "compute_faster": "compute (expected to be faster)",
}


@click.command()
@click.argument("request_id", metavar="[REQUEST]", required=False)
@url_option
@as_json_option
def explain(request_id: str | None, url: str | None, as_json: bool) -> None:
    """Say why a request hit or missed.

    REQUEST is the engine's name for it, the id in the server's answer, or its X-Request-Id. Without
    REQUEST it lists the latest requests. An engine remembers about a thousand.

    The exit code is 1 if there is no answer, or the request is not remembered.
    """
    url = endpoint_url(url)
    try:
        answer = scrape.explain(url, request_id)
        if as_json:
            click.echo(json.dumps(answer))
        elif request_id is None:
            print_recent(answer, plain_console())
        else:
            print_explanation(answer, plain_console())
    except KvferryError:
        raise
    except ValueError as error:
        raise scrape.malformed_explanation(url, error) from error


def print_recent(answer: Mapping[str, Any], console: Console) -> None:
    """Print the latest requests."""
    rows = read_recent(answer)
    if not rows:
        console.print("There is no request yet.")
        return
    heads = ("Request", "Tokens", "Found", "Miss reason")
    console.print(table(heads, rows, left=["Found", "Miss reason"]))


def print_explanation(answer: Mapping[str, Any], console: Console) -> None:
    """Print the explanation of one request. Raises ValueError if the answer is malformed."""
    with reading():
        lines = list(_lines(answer))
        rows = [_copy(copy) for copy in answer.get("copies") or ()]
    for words, style in lines:
        console.print(Text(clip(words, _MOST_NAME), style=style))
    if not rows:
        console.print("Nothing was copied for it yet.")
        return
    heads = ("Copy", "Blocks", "Bytes", "Time", "Speed", "Path")
    console.print(table(heads, rows, left=["Path"]))


def _lines(answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield f"Request {answer['request_id']}", "bold"
    why = answer.get("explanation")
    if why is None:
        yield "There was no lookup: the request only stored, or was prefetched.", ""
    else:
        yield from _explanation(why)
    if answer.get("hints"):
        yield f"Hints: {json.dumps(answer['hints'])}", ""
    for words in answer.get("refused") or ():
        yield f"Not done: {words}", "yellow"
    if answer.get("overlaps"):
        yield "The load overlaps with the forward pass.", ""
    if answer.get("others"):
        yield f"Other requests of this name: {', '.join(answer['others'])}", "dim"


def _explanation(why: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    asked, tiers = why["asked_tokens"], why["tier_hit_tokens"]
    computed = max(0, asked - sum(tiers.values()))
    yield f"Tokens: {asked:,} = {tier_words(tiers)}, {computed:,} not found", ""
    if why.get("lower_tokens"):
        yield f"Not promoted: {why['lower_tokens']:,} tokens on lower tiers", ""
    code = why["reason"]
    reason = REASONS.get(code, "") + f" ({code})" * (code != "nothing_missed")
    if why.get("first_missing") is not None:
        reason = f"First missing token: {why['first_missing']:,}. {reason}"
    yield reason, ""
    if why.get("asked_blocks"):
        yield f"Lower tiers were asked for {counted(why['asked_blocks'], 'block')}.", ""
    for tier in why.get("tiers_away") or ():
        yield f"Unavailable: {tier}", "red"
    decision = why.get("decision") or {}
    if decision.get("verdict"):
        words = VERDICTS.get(decision["verdict"], decision["verdict"])
        load, compute = decision.get("load_seconds"), decision.get("compute_seconds")
        if load is not None and compute is not None:
            words += f": {show_seconds(load)} to load, {show_seconds(compute)} to compute"
        yield f"Decision: {words}", ""


def _copy(copy: Mapping[str, Any]) -> list[str]:
    num_bytes, seconds = copy["num_bytes"], copy["seconds"]
    path = clip(", ".join(copy.get("paths") or ()) or "–")
    return [
        clip(f"{copy['src']} → {copy['dst']}", _MOST_NAME),
        f"{copy['num_blocks']:,}",
        show_bytes(num_bytes),
        show_seconds(seconds),
        f"{show_bytes(num_bytes / seconds)}/s" if seconds else "–",
        f"{path}, failed: {clip(copy['reason'])}" if copy.get("reason") else path,
    ]


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
def control(
    action: str, url: str | None, token_file: str | None, as_json: bool, **given: Any
) -> None:
    """Pin, prefetch and drop blocks of a running server.

    ACTION is lookup, hint, pin, unpin, prefetch or drop.

    Name the blocks by --request, --tokens or --key. The server must allow it with its setting
    control_token. Its setting pin_share bounds the pins, which end with the server.

    The exit code is 1 if nothing answers or the server refuses.
    """
    try:
        body, token = _request_body(action, given), _token(token_file)
        url = endpoint_url(url)
        answer = read_json(post(f"{url}/control/{action}", body, token))
        if as_json:
            click.echo(json.dumps(answer))
        else:
            _print_answer(action, answer)
    except KvferryError as error:
        if getattr(error, "code", None) != 501:
            raise
        advice = "Its server serves no control. Start it with control_token set"
        raise UnreachableError(f"{error}. {advice}") from error
    except ValueError as error:
        raise UnreachableError(f"{url} did not answer as expected: {clip(error)}") from error


def _request_body(action: str, given: dict[str, Any]) -> dict[str, Any]:
    """Build the body of a control request. The server refuses options that exclude each other."""
    if action == "hint" and not given["hints"]:
        raise InputError("give the hints by --hints, such as '{\"ended\": true}'")
    body = {name: value for name, value in given.items() if value}
    if "tokens" in body:
        body["tokens"] = _read_tokens(body["tokens"])
    if "hints" in body:
        try:
            body["hints"] = json.loads(body["hints"])
        except ValueError as error:
            raise InputError(f"--hints is no JSON: {error}") from None
    return body


def _read_tokens(name: str) -> list[int]:
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
        raise ConfigError(f"the server asks for its token: give --token-file or set {TOKEN_ENV}")
    return read_secret("control_token", given)


def _print_answer(action: str, answer: dict[str, Any]) -> None:
    console = plain_console()
    with reading():
        if len(answer.get("request_ids") or ()) > 1:
            num_requests = len(answer["request_ids"])
            console.print(f"This answer has {num_requests} requests. The action is for all.")
        console.print(
            f"Tokens: {answer['tokens']:,}, {answer['host_tokens']:,} of them in host memory, "
            f"{answer['lower_tokens']:,} only on lower tiers"
        )
        if answer["unknown_blocks"]:
            unknown = counted(answer["unknown_blocks"], "block")
            console.print(f"Lower tiers have not answered about {unknown}.")
        if action in _DID:
            console.print(f"{counted(answer['blocks'], 'block')} {_DID[action]}.")
        if answer["is_under_way"]:
            console.print("The rest is being promoted.")
        console.print(f"Pinned now: {counted(answer['held_blocks'], 'block')} on all tiers")
        for words in answer["refused"]:
            console.print(f"Not done: {clip(words)}", markup=False)
