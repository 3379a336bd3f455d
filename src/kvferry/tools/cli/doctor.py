"""``kvferry doctor``: check whether this machine is fit for kvferry."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import click
from rich.table import Table
from rich.text import Text

from kvferry.errors import InputError, UnreachableError
from kvferry.tools.cli.output import as_json_option, endpoint_url, plain_console
from kvferry.tools.doctor.checks import (
    Environment,
    Finding,
    Grade,
    examine,
    fail,
    inspect_gpu,
    ok,
    warn,
)
from kvferry.tools.top.view import Watch
from kvferry.tools.words import clip, counted

_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}
UNFIT = 1


@click.command()
@click.option("--device", default=0, show_default=True, help="The number of the GPU.")
@click.option(
    "--url",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Also check a running server, without ADDRESS at the usual addresses.",
)
@click.option("--strict", is_flag=True, help="Let warnings count as failures.")
@as_json_option
@click.pass_context
def doctor(ctx: click.Context, device: int, url: str | None, strict: bool, as_json: bool) -> None:
    """Check whether this machine is fit.

    It names a remedy for each problem and changes no setting. It checks the GPU, its driver and
    link, host memory and its limits, the disk, the other tiers, and vLLM.

    To measure a drive, it writes and reads an unnamed file for two seconds, 256 MiB at most. To
    test a shared store, it writes a small object and reads it back.

    The exit code is 1 if a line says fail, or with --strict if one says warn.
    """
    env = ctx.obj if isinstance(ctx.obj, Environment) else Environment()
    if device:
        env = replace(env, gpu=lambda: inspect_gpu(device))
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
    """Check whether kvferry is active in the server at ``url``."""
    name = "running server"
    try:
        view = Watch(endpoint_url(url or None)).look()
    except (UnreachableError, InputError) as error:
        return warn(name, str(error), "give the address that serves /metrics")
    if view.idle:
        remedy = "see the log line that begins with 'kvferry is idle', or the error before it"
        return fail(name, f"kvferry is idle at {view.url}: {clip(view.idle, 300)}", remedy)
    if not view.queries:
        return ok(name, f"kvferry is loaded at {view.url}, no request yet")
    return ok(name, f"kvferry serves at {view.url}, {counted(view.queries, 'request')}")


def _show(findings: list[Finding]) -> None:
    made = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        made.add_row(
            Text(finding.grade.value, style=_STYLES[finding.grade], no_wrap=True),
            Text(finding.name, no_wrap=True),
            Text(finding.words),
        )
        if finding.remedy:
            made.add_row("", "", Text(f"→ {finding.remedy}", style="dim"))
    plain_console().print(made)
