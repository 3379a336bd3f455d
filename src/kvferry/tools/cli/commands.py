"""The group of all commands, which prints their errors."""

from __future__ import annotations

from typing import Any

import click

from kvferry.errors import KvferryError
from kvferry.telemetry.catalog import installed_version
from kvferry.tools.cli.config import config, vllm_args
from kvferry.tools.cli.demo import demo
from kvferry.tools.cli.disk import disk
from kvferry.tools.cli.doctor import doctor
from kvferry.tools.cli.explain import control, explain
from kvferry.tools.cli.remote import remote
from kvferry.tools.cli.simulate import simulate_command
from kvferry.tools.cli.top import top


class Commands(click.Group):
    """A command group that prints an expected error as one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Turn kvferry's and the system's errors into click's."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly
        except (KvferryError, OSError) as error:
            raise click.ClickException(str(error)) from error


kvferry = Commands(
    "kvferry",
    commands=[
        *(config, control, demo, disk, doctor, explain, remote, simulate_command, top, vllm_args)
    ],
    help="KV-cache offloading for LLM serving: keep prompt state instead of computing it again.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(installed_version(), message="%(prog)s %(version)s", prog_name="kvferry")(
    kvferry
)
