"""``kvferry control``: look up, pin, unpin, prefetch and drop blocks of a running server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from kvferry.errors import ConfigError, InputError, KvferryError, UnreachableError
from kvferry.settings.files import read_secret
from kvferry.tools.cli.output import unbroken
from kvferry.tools.top.scrape import DEFAULT_URL, base_url, post
from kvferry.tools.top.told import read_json
from kvferry.tools.words import counted, said

TOKEN_ENV = "KVFERRY_CONTROL_TOKEN"
ACTIONS = ("lookup", "hint", "pin", "unpin", "prefetch", "drop")
_DID = {"pin": "pinned", "unpin": "let go", "drop": "dropped"}


@click.command()
@click.argument("action", type=click.Choice(ACTIONS), metavar="ACTION")
@click.option("--request", "request_id", help="A request's name, or the id in its answer.")
@click.option("--tokens", type=click.Path(), help="A file of token ids; - reads them from here.")
@click.option("--key", "keys", multiple=True, help="A key in hexadecimal, the first block's first.")
@click.option("--salt", default="", help="The salt that goes with --tokens.")
@click.option("--seconds", help="How long to pin, or to keep what was prefetched, such as 1h.")
@click.option("--hints", help="Hints as JSON, such as '{\"over\": true}'.")
@click.option(
    "--url", default=DEFAULT_URL, show_default=True, help="The engine's kvferry endpoint."
)
@click.option("--token-file", type=click.Path(), help=f"The file of the token, or {TOKEN_ENV}.")
@click.option("--json", "as_json", is_flag=True, help="Print what the endpoint answered.")
def control(action: str, url: str, token_file: str | None, as_json: bool, **given: Any) -> None:
    """Do something with the blocks of a request: lookup, hint, pin, unpin, prefetch or drop.

    Say which blocks by --request, --tokens or --key. The server must let you: its settings control
    and control_token. Pins and keeps are bounded by its pin_share, and forgotten when it ends.

    The exit code is 1 where nothing answers or the order is refused.
    """
    try:
        order = _order(action, given)
        token = _token(token_file)
        answer = read_json(post(f"{base_url(url)}/control/{action}", order, token))
    except UnreachableError as error:
        raise click.ClickException(f"{error}{_advice(error)}") from error
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.ClickException(f"{url} answered something else: {said(error)}") from error
    if as_json:
        click.echo(json.dumps(answer))
    else:
        _tell(action, answer)


def _order(action: str, given: dict[str, Any]) -> dict[str, Any]:
    order: dict[str, Any] = {}
    if given["request_id"]:
        order["request_id"] = given["request_id"]
    if given["tokens"]:
        order["tokens"] = _read_tokens(given["tokens"])
        if given["salt"]:
            order["salt"] = given["salt"]
    if given["keys"]:
        order["keys"] = list(given["keys"])
    if len(order.keys() - {"salt"}) != 1:
        raise InputError("say which blocks by one of --request, --tokens or --key")
    if given["salt"] and not given["tokens"]:
        raise InputError("--salt goes with --tokens: keys and requests have theirs already")
    if action == "hint" and not given["hints"]:
        raise InputError("say what by --hints, such as '{\"over\": true}'")
    if given["seconds"]:
        order["seconds"] = given["seconds"]
    if given["hints"]:
        try:
            order["hints"] = json.loads(given["hints"])
        except ValueError as error:
            raise InputError(f"--hints is no JSON: {error}") from None
    return order


def _read_tokens(name: str) -> list[int]:
    """Numbers, with commas and brackets or without."""
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


def _advice(error: Exception) -> str:
    code = getattr(error, "code", None)
    if code == 501:
        return ". It takes no orders: set control and control_token where the server is started"
    return ""


def _tell(action: str, answer: dict[str, Any]) -> None:
    console = unbroken()
    names = answer.get("request_ids")
    if isinstance(names, list) and len(names) > 1:
        console.print(f"This answer took {len(names)} requests; all of them are meant.")
    tokens, host, lower = (_count(answer, n) for n in ("tokens", "host_tokens", "lower_tokens"))
    console.print(f"Of {tokens} tokens {host} are in host memory, {lower} more lie below it.")
    unknown, held = _count(answer, "unknown_blocks"), _count(answer, "held_blocks")
    if unknown:
        console.print(f"Tiers would have to be asked for {counted(unknown, 'block')}.")
    if action in _DID:
        console.print(f"{counted(_count(answer, 'blocks'), 'block')} {_DID[action]}.")
    if answer.get("is_under_way"):
        console.print("The rest is on its way up.")
    words = f"{counted(held, 'block')} of it held, on all tiers together."
    console.print(words if held else "Nothing of it is held.")
    refused = answer.get("refused")
    for words in refused if isinstance(refused, list) else ():
        console.print(f"Not done: {said(words)}", markup=False)


def _count(answer: dict[str, Any], name: str) -> int:
    value = answer.get(name)
    return value if isinstance(value, int) else 0
