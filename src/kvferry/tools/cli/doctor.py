"""``kvferry doctor``: whether this machine is fit; ``kvferry config``: its settings."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.config import CONFIG_FILE_ENV, Config, describe, show, variables
from kvferry.errors import InputError, UnreachableError
from kvferry.tools.cli.output import as_json_option
from kvferry.tools.doctor.checks import examine
from kvferry.tools.doctor.machine import Environment, Finding, Grade, fail, look_at_gpu, ok, warn
from kvferry.tools.top.scrape import base_url
from kvferry.tools.top.view import Watch
from kvferry.tools.words import clip

_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}
UNFIT = 1


@click.command()
@click.option("--device", default=0, show_default=True, help="The number of the GPU.")
@click.option("--url", help="Also check a running server: its metrics address, such as vLLM's.")
@click.option("--strict", is_flag=True, help="Let warnings count as failures.")
@as_json_option
@click.pass_context
def doctor(ctx: click.Context, device: int, url: str | None, strict: bool, as_json: bool) -> None:
    """Check whether this machine is fit for kvferry, and name the remedies.

    It checks the GPU, its driver and link, host memory and its limits, the disk, the other tiers,
    and vLLM. It changes no setting.

    To measure a drive, it writes and reads an unnamed file for two seconds, 256 MiB at most. To
    test a shared store, it writes a small object and reads it back.

    The exit code is 1 if a line says fail (with --strict: or warn), else 0.
    """
    env = ctx.obj if isinstance(ctx.obj, Environment) else Environment()
    if device:
        env = replace(env, gpu=lambda: look_at_gpu(device))
    findings = examine(env)
    if url is not None:
        findings = [*findings, _running(url)]
    counts = Counter(finding.grade for finding in findings)
    is_fit = not counts[Grade.FAIL] and not (strict and counts[Grade.WARN])
    if as_json:
        rows = [asdict(finding) | {"grade": finding.grade.value} for finding in findings]
        click.echo(json.dumps({"fit": is_fit, "findings": rows}))
    else:
        _show(findings)
        click.echo(", ".join(f"{counts[grade]} {grade.value}" for grade in Grade))
    if not is_fit:
        ctx.exit(UNFIT)


def _running(url: str) -> Finding:
    """Whether kvferry serves in a running server."""
    name = "running server"
    try:
        view = Watch(base_url(url)).look()
    except (UnreachableError, InputError) as error:
        return warn(name, str(error), "give the address that serves /metrics; is it running?")
    if not view.idle:
        return ok(name, f"kvferry {view.version} serves there, {view.queries} requests so far")
    remedy = "see the line of its log that begins with 'kvferry is idle', or the error before it"
    return fail(name, f"kvferry is idle there: {clip(view.idle, 300)}", remedy)


def _show(findings: list[Finding]) -> None:
    """Print a table on a terminal, else one line for each finding and one for its remedy."""
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in findings)
    table = Table.grid(padding=(0, 2, 0, 0))
    for is_fixed in (True, True, False):
        table.add_column(no_wrap=is_fixed)
    for finding in findings:
        grade, remedy = finding.grade, f"→ {finding.remedy}"
        if not console.is_terminal:
            click.echo(f"{grade.value:<4}  {finding.name:<{width}}  {finding.words}")
            if finding.remedy:
                click.echo(f"      {'':<{width}}  {remedy}")
            continue
        table.add_row(Text(grade.value, style=_STYLES[grade]), finding.name, Text(finding.words))
        if finding.remedy:
            table.add_row("", "", Text(remedy, style="dim"))
    if console.is_terminal:
        console.print(table)


@click.command("config")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="A TOML or JSON file to read instead of the one that KVFERRY_CONFIG names.",
)
@click.option("--all", "everything", is_flag=True, help="Show the advanced settings too.")
@click.option("--changed", is_flag=True, help="Show only settings that are not the default.")
@as_json_option
def config(file: Path | None, everything: bool, changed: bool, as_json: bool) -> None:
    """Show the settings as an engine started here would have them, and their sources.

    These are the basic settings and those that are not the default; with --all or --json, all of
    them. The exit code is 1 if a value in a file or a variable is refused.
    """
    rows = _rows(file, os.environ)
    basic = {setting.name for setting in describe() if setting.basic}
    shown = [
        row
        for row in rows
        if row["source"] != "default"
        or (not changed and (everything or as_json or row["name"] in basic))
    ]
    if as_json:
        click.echo(json.dumps({row["name"]: row for row in shown}))
        return
    console = Console(highlight=False)
    if not shown:
        console.print("Every setting has its default.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("Setting", "Value", "From", "What it does"):
        table.add_column(name, no_wrap=name == "Setting", overflow="fold")
    for row in shown:
        style = "cyan" if row["source"] != "default" else None
        cells = (escape(row[key]) for key in ("name", "value", "source", "help"))
        table.add_row(*cells, style=style)
    console.print(table)
    if not changed and len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown)} advanced settings have their defaults: --all")


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
