"""Progress of a command that measures, on standard error."""

from __future__ import annotations

import sys

import click


def show(line: str) -> None:
    """Each line in place of the last on a terminal, one after another elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}", nl=False, err=True)
    elif line:
        click.echo(line, err=True)
