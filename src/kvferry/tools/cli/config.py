"""``kvferry config`` shows the settings; ``kvferry vllm-args`` prints them as vLLM's arguments."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from kvferry.config import CONFIG_FILE_ENV, Config, describe, show, variables
from kvferry.connectors.vllm import CONNECTOR_NAME
from kvferry.errors import InputError
from kvferry.tools.cli.output import as_json_option, options, table

FILE = {"type": click.Path(dir_okay=False, path_type=Path), "default": None}
FLAG = {"is_flag": True}


@click.command("config")
@options(
    ("--file", FILE, "A TOML or JSON file to read instead of the one that KVFERRY_CONFIG names."),
    ("--all", FLAG | {"default": False}, "Show the advanced settings too."),
)
@as_json_option
def config(file: Path | None, all: bool, as_json: bool) -> None:
    """Show the settings and their sources.

    The values are those that an engine started here would use. The list has the basic settings and
    all that differ from their defaults.

    The exit code is 1 if a value in a file or a variable is refused.
    """
    is_whole = all or as_json
    rows = [r for r in _rows(file) if is_whole or r["basic"] or r["source"] != "default"]
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in rows}))
        return
    console = Console(highlight=False)
    styles = ["cyan" if row["source"] != "default" else "" for row in rows]
    cells = [
        [Text(row[key], style) for key in ("name", "value", "source", "help")]
        for row, style in zip(rows, styles, strict=True)
    ]
    heads = ("Setting", "Value", "From", "What it does")
    console.print(table(heads, cells, left=heads))
    if not all:
        console.print(
            f"{len(describe()) - len(rows)} more settings have their defaults. --all shows them."
        )


def _rows(file: Path | None) -> list[dict[str, Any]]:
    loaded = Config.load(file, os.environ)
    path = str(file) if file is not None else os.environ.get(CONFIG_FILE_ENV, "")
    in_file = Config.load(path, {}) if path else Config()
    in_env, defaults = variables(os.environ), Config()
    keys = ("name", "default", "accepts", "env", "help", "basic")
    rows = []
    for setting in describe():
        name = setting.name
        is_in_file = getattr(in_file, name) != getattr(defaults, name)
        source = in_env.get(name, path if is_in_file else "default")
        row = {key: getattr(setting, key) for key in keys}
        rows.append(row | {"value": show(name, getattr(loaded, name)), "source": source})
    return rows


_CONNECTOR = {"kv_connector": CONNECTOR_NAME, "kv_role": "kv_both"}


@click.command(
    "vllm-args",
    epilog="Every other setting works too, such as --disk-size 1TiB: see kvferry config --all.",
)
@options(
    *(
        (f"--{each.name.replace('_', '-')}", {"hidden": not each.basic, "metavar": ""}, each.help)
        for each in describe()
    ),
    ("--json", FLAG, "Print the JSON form, for values with spaces and for older vLLM."),
)
def vllm_args(json: bool, **given: str | None) -> None:
    """Print vLLM's arguments for kvferry.

    \b
    vllm serve MODEL $(kvferry vllm-args --host 64GiB --disk /mnt/nvme)

    The exit code is 1 if a value is refused.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    Config.from_dict(settings)  # refuses bad values
    click.echo(_in_json(settings) if json else _dotted(settings))


def _in_json(settings: dict[str, str]) -> str:
    extra = {"kv_connector_extra_config": settings} if settings else {}
    return f"--kv-transfer-config {shlex.quote(json.dumps(_CONNECTOR | extra))}"


def _dotted(settings: dict[str, str]) -> str:
    prefix = "--kv-transfer-config."
    odd = [name for name, value in settings.items() if shlex.quote(value) != value]
    if odd:
        raise InputError(f"--{odd[0].replace('_', '-')}: the value needs quotes; use --json")
    extra = {f"kv_connector_extra_config.{name}": value for name, value in settings.items()}
    return " ".join(f"{prefix}{name} {value}" for name, value in (_CONNECTOR | extra).items())
