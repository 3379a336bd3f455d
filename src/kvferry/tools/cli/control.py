"""``kvferry control``: look up, pin, unpin, prefetch and drop blocks of a running server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from kvferry.errors import ConfigError, InputError, KvferryError, UnreachableError
from kvferry.settings.kinds import read_secret
from kvferry.tools.cli.output import as_json_option, unbroken, url_option
from kvferry.tools.top.answers import read_json
from kvferry.tools.top.scrape import base_url, post
from kvferry.tools.words import clip, counted

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
    except UnreachableError as error:
        advice = ""
        if getattr(error, "code", None) == 501:
            advice = ". It takes no orders: start its server with control and control_token set"
        raise click.ClickException(f"{error}{advice}") from error
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.ClickException(f"{url} did not answer as expected: {clip(error)}") from error
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
