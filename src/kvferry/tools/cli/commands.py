"""The commands by name. Each is imported only when it runs, so that a broken one breaks alone."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

import click

from kvferry.errors import KvferryError

VERSION: str = import_module("kvferry").__version__

COMMANDS = {
    "demo": ("demo:demo", "See KV blocks leave a small device and come back."),
    "disk": ("disk:disk", "List, verify and remove the stores on disk."),
    "remote": ("remote:remote", "List and remove what is kept in a shared bucket."),
    "doctor": ("doctor:doctor", "Check whether this machine is fit."),
    "top": ("top:top", "Watch a running kvferry."),
    "explain": ("explain:explain", "Say why a request hit or missed."),
    "control": ("explain:control", "Pin, prefetch and drop blocks of a running server."),
    "simulate": ("simulate:simulate_command", "Predict the hits of a policy or a size."),
    "config": ("config:config", "Show the settings and their sources."),
    "vllm-args": ("config:vllm_args", "Print vLLM's arguments for kvferry."),
}
"""Module and function of each command, and its summary."""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(import_module(f"kvferry.tools.cli.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise click.ClickException(
                f"{ctx.command_path} {cmd_name} is not available here: {error}"
            ) from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. The error for an unknown one names the nearest."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0][:40].lower(), known, n=1)
            mean = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}.{mean}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error that says what to do becomes one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly
        except (KvferryError, OSError) as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the summaries without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted((name, summary) for name, (_, summary) in COMMANDS.items()))


kvferry = LazyGroup(
    "kvferry",
    help="KV-cache offloading for LLM serving: keep prompt state instead of computing it again.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(VERSION, message="%(prog)s %(version)s", prog_name="kvferry")(kvferry)
