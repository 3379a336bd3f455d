"""``kvferry calibrate``: time the copy paths on this machine and keep the profile."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

import click
import numpy as np
from rich.console import Console

from kvferry.config import Config
from kvferry.core.quantities import KiB, MiB
from kvferry.errors import DriverError, install
from kvferry.tools.cli.output import as_json_option
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import open_paths
from kvferry.transfer.planner.choose import Planner
from kvferry.transfer.planner.measure import SEGMENTS_PER_BLOCK
from kvferry.transfer.planner.measure import calibrate as measure
from kvferry.transfer.planner.profile import load_profile, profile_file, save_profile

EXAMPLES = ((16 * KiB, 1), (16 * KiB, 64), (2 * MiB, 1))
"""Segment size and blocks of the transfers whose choice is explained."""


def open_card(command: str, device: int) -> Driver:
    """The CUDA driver of a device. Raises a click error that names what ``command`` lacks."""
    try:
        driver = Driver.open(device)
    except DriverError as error:
        raise click.ClickException(
            f"{command} needs an NVIDIA GPU: {error}.\n"
            "Run it on the machine that serves the model. To see kvferry work without a GPU, "
            "try: kvferry demo"
        ) from error
    if find_spec("triton") is None:
        raise click.ClickException(
            f"{command} compares copy kernels, which need triton: {install('gpu')}"
        )
    return driver


@click.command("calibrate")
@click.option("--device", default=0, show_default=True, help="The number of the GPU.")
@click.option("--force", is_flag=True, help="Measure again even if there is a profile.")
@as_json_option
def calibrate(device: int, force: bool, as_json: bool) -> None:
    """Time the copy paths on this machine. It takes a second and is kept for later runs."""
    driver = open_card("kvferry calibrate", device)
    path_set = open_paths(driver, ring_bytes=Config().staging_ring)
    file = profile_file(driver.identity())
    try:
        profile = None if force else load_profile(file, path_set.paths)
        if profile is None:
            began = time.perf_counter()
            with Console(stderr=True).status("") as shown:
                profile = measure(driver, path_set.paths, progress=shown.update)
            save_profile(profile, file)
            click.echo(f"Measured in {time.perf_counter() - began:.1f} s.", err=as_json)
        if as_json:
            click.echo(json.dumps({"file": str(file), "profile": profile.to_json()}))
            return
        click.echo(f"Profile: {file}")
        for key, value in profile.provenance.items():
            click.echo(f"  {key}: {value}")
        _explain(Planner(profile, path_set.paths))
    finally:
        path_set.close()
        driver.close()


def _explain(planner: Planner) -> None:
    for segment_bytes, num_blocks in EXAMPLES:
        sizes = np.full(SEGMENTS_PER_BLOCK, segment_bytes)
        layout = GroupLayout(sizes, sizes, sizes, num_blocks)  # only its sizes are looked at
        for direction in Direction:
            for busy in (False, True):
                click.echo(planner.explain(direction, layout, num_blocks, busy))
