"""``kvferry completion``: the lines that make a shell complete our commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

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
