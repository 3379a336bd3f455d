"""``kvferry config``: every setting as it would be used here, and its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.config import CONFIG_FILE_ENV, Config, describe, show, variables
from kvferry.errors import ConfigError
from kvferry.tools.cli.output import as_json_option


@click.command("config")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="A TOML or JSON file to read instead of the one that KVFERRY_CONFIG names.",
)
@click.option("--changed", is_flag=True, help="Show only settings that are not the default.")
@as_json_option
def config(file: Path | None, changed: bool, as_json: bool) -> None:
    """Show every setting as an engine started here would have it, and its source.

    The exit code is 1 if a value in a file or a variable is refused.
    """
    try:
        rows = _rows(file, os.environ)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if changed:
        rows = [row for row in rows if row["source"] != "default"]
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in rows}))
        return
    console = Console(highlight=False)
    if not rows:
        console.print("Every setting has its default.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("Setting", "Value", "From", "What it does"):
        table.add_column(name, no_wrap=name == "Setting", overflow="fold")
    for row in rows:
        style = "cyan" if row["source"] != "default" else None
        cells = (escape(row[key]) for key in ("name", "value", "source", "help"))
        table.add_row(*cells, style=style)
    console.print(table)


def _rows(file: Path | None, env: Mapping[str, str]) -> list[dict[str, str]]:
    loaded = Config.load(file, env)
    path = str(file) if file is not None else env.get(CONFIG_FILE_ENV, "")
    in_file = Config.from_file(path) if path else Config()
    in_env, defaults = variables(env), Config()
    rows = []
    for setting in describe():
        name = setting.name
        is_in_file = getattr(in_file, name) != getattr(defaults, name)
        source = in_env.get(name, path if is_in_file else "default")
        row = {key: getattr(setting, key) for key in ("name", "default", "accepts", "env", "help")}
        rows.append(row | {"value": show(name, getattr(loaded, name)), "source": source})
    return rows
