"""The commands by name. Each is imported only when it is run, so that a broken one breaks alone."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import click
from click.shell_completion import get_completion_class

from kvferry import __version__


@dataclass(frozen=True)
class CommandEntry:
    """Where a command lives and what it does in half a line."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is asked for it."""

    def __init__(self, name: str, entries: Mapping[str, CommandEntry], help: str) -> None:
        settings = {"help_option_names": ["-h", "--help"]}  # of the commands below it, too
        super().__init__(name=name, help=help, context_settings=settings)
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is meant; one that is not there is answered with the nearest."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0][:40].lower(), known, n=1)
            mean = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}.{mean}")
        return super().resolve_command(ctx, args)

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
        "demo": CommandEntry(
            "kvferry.tools.cli.demo", "demo", "See KV blocks leave a small device and come back."
        ),
        "calibrate": CommandEntry(
            "kvferry.tools.cli.calibrate", "calibrate", "Time the copy paths on this machine."
        ),
        "disk": CommandEntry(
            "kvferry.tools.cli.disk", "disk", "Look after what is kept on disk: ls, verify, purge."
        ),
        "doctor": CommandEntry(
            "kvferry.tools.cli.doctor", "doctor", "See whether this machine is fit."
        ),
        "top": CommandEntry(
            "kvferry.tools.cli.top", "top", "See what a running kvferry does, now."
        ),
        "explain": CommandEntry(
            "kvferry.tools.cli.explain", "explain", "Say why a request hit or missed."
        ),
        "control": CommandEntry(
            "kvferry.tools.cli.control",
            "control",
            "Pin, prefetch and drop blocks of a running server.",
        ),
        "simulate": CommandEntry(
            "kvferry.tools.cli.simulate",
            "simulate_command",
            "See what a policy or a size would hit.",
        ),
        "config": CommandEntry(
            "kvferry.tools.cli.settings", "config", "Show every setting and its source."
        ),
        "completion": CommandEntry(
            "kvferry.tools.cli.commands", "completion", "Make your shell complete commands."
        ),
    },
    help="KV-cache offloading for LLM serving: keep prompt state instead of computing it again.",
)


click.version_option(__version__, message="%(prog)s %(version)s", prog_name="kvferry")(kvferry)


@kvferry.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version."""
    click.echo(json.dumps({"version": __version__}) if as_json else f"kvferry {__version__}")


# ------------------------------------------------------------------------------------------------
# ``kvferry completion``: the lines that make a shell complete our commands and options.

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog="Then open a new shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete kvferry's commands and options.

    \b
    bash:  eval "$(kvferry completion bash)"    in ~/.bashrc
    zsh:   eval "$(kvferry completion zsh)"    in ~/.zshrc
    fish:  kvferry completion fish > ~/.config/fish/completions/kvferry.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "kvferry", "_KVFERRY_COMPLETE").source())
