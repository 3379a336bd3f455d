"""``--json`` of the commands that measure: figures on standard output, or in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

STDOUT = Path("-")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` alone prints the figures and nothing else; ``--json FILE`` writes them too."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=str(STDOUT),
        default=None,
        show_default=False,
        metavar="[FILE]",
        type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
        help="Print all figures as JSON; what is for people goes to standard error. With FILE, "
        "write them there instead.",
    )(command)


def is_stdout(json_file: Path | None) -> bool:
    """Whether standard output belongs to the figures."""
    return json_file == STDOUT


def put(data: object, json_file: Path | None, *, indent: int = 2) -> None:
    """Write the figures to where they were asked for, if they were."""
    if json_file is None:
        return
    text = json.dumps(data, indent=indent)
    if is_stdout(json_file):
        click.echo(text)
    else:
        json_file.write_text(f"{text}\n", encoding="utf-8")
