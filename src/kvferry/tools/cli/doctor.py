"""``kvferry doctor``: whether this machine is fit, line by line, with remedies."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.errors import InputError, UnreachableError
from kvferry.tools.doctor.examine import examine
from kvferry.tools.doctor.finding import Finding, Grade, fail, ok, warn
from kvferry.tools.doctor.machine import Environment, look_at_gpu
from kvferry.tools.top.scrape import base_url
from kvferry.tools.top.view import Watch
from kvferry.tools.words import why_idle

_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}
UNFIT = 1


@click.command()
@click.option("--device", default=0, show_default=True, help="Which GPU.")
@click.option("--url", help="Ask a running server, too: its metrics address, such as vLLM's.")
@click.option("--strict", is_flag=True, help="Let warnings count as failures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, device: int, url: str | None, strict: bool, as_json: bool) -> None:
    """See whether this machine is fit for kvferry, and what to do where it is not.

    Looks at the GPU, its driver and link, host memory and its limits, the disk, the tiers and the
    shared store that are set, and vLLM. Changes nothing; to see what a drive gives it writes and
    reads a file without a name there for two seconds, 256 MiB at most, and to see whether a store
    can be used it writes an object of a few bytes and reads it back. With --url it also asks a
    running server whether kvferry serves there.

    The exit code is 1 where a line says fail (with --strict: or warn), else 0.
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
        click.echo(json.dumps({"fit": is_fit, "findings": [_plain(f) for f in findings]}))
    else:
        _show(findings, counts)
    if not is_fit:
        ctx.exit(UNFIT)


def _running(url: str) -> Finding:
    """Whether kvferry serves in a server that runs."""
    name = "running server"
    try:
        view = Watch(base_url(url)).look()
    except (UnreachableError, InputError) as error:
        return warn(name, str(error), "give the address that serves /metrics; is it running?")
    if not view.idle:
        return ok(name, f"kvferry {view.version} serves there, {view.queries} requests so far")
    remedy = "see the line of its log that begins with 'kvferry is idle', or the error before it"
    return fail(name, f"kvferry is idle there: {why_idle(view.idle)}", remedy)


def _show(findings: list[Finding], counts: Counter[Grade]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        _show_plainly(findings, counts)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        mark = Text(finding.grade.value, style=_STYLES[finding.grade])
        table.add_row(mark, finding.name, Text(finding.words))
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", style="dim"))
    console.print(table)
    console.print(_sum(counts))


def _show_plainly(findings: list[Finding], counts: Counter[Grade]) -> None:
    """For pipes and logs: a line for each finding, however long, and one for its remedy."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.grade.value:<4}  {finding.name:<{width}}  {finding.words}")
        if finding.remedy:
            click.echo(f"      {'':<{width}}  → {finding.remedy}")
    click.echo(_sum(counts))


def _sum(counts: Counter[Grade]) -> str:
    return ", ".join(f"{counts[grade]} {grade.value}" for grade in Grade)


def _plain(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.name,
        "grade": finding.grade.value,
        "words": finding.words,
        "remedy": finding.remedy,
    }
