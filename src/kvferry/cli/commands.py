"""The commands by name. Each is imported only when it is run, so that a broken one breaks alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import click

from kvferry import __version__


@dataclass(frozen=True)
class Entry:
    """Where a command lives and what it does in half a line."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is asked for it."""

    def __init__(self, name: str, entries: Mapping[str, Entry], help: str) -> None:
        super().__init__(name=name, help=help)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._entries, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        try:
            command = getattr(import_module(entry.module), entry.attribute)
        except (ImportError, AttributeError) as error:
            raise click.ClickException(
                f"{ctx.command_path} {cmd_name} is not available here: {error}"
            ) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the summaries without importing a command."""
        rows = [(name, self._entries[name].summary) for name in self._entries]
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            assert command is not None
            rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


kvferry = LazyGroup(
    "kvferry",
    {
        "demo": Entry(
            "kvferry.cli.demo", "demo", "See KV blocks leave a small device and come back."
        ),
        "calibrate": Entry(
            "kvferry.cli.calibrate", "calibrate", "Time the copy paths on this machine."
        ),
        "doctor": Entry("kvferry.cli.doctor", "doctor", "See whether this machine is fit."),
        "top": Entry("kvferry.cli.top", "top", "See what a running kvferry does, now."),
        "explain": Entry("kvferry.cli.explain", "explain", "Say why a request hit or missed."),
        "config": Entry("kvferry.cli.settings", "config", "Show every setting and its source."),
        "completion": Entry(
            "kvferry.cli.completion", "completion", "Make your shell complete commands."
        ),
    },
    help="KV-cache offloading for LLM serving: keep prompt state instead of computing it again.",
)


@kvferry.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version."""
    click.echo(json.dumps({"version": __version__}) if as_json else f"kvferry {__version__}")


kvferry.add_command(
    LazyGroup(
        "bench",
        {
            "copy": Entry(
                "kvferry.cli.bench_copy", "bench_copy", "Copy blocks each way, by every path."
            ),
        },
        help="Measure what this machine can do.",
    )
)
