"""Finding the card for a command, or saying what is missing and what to do about it."""

from __future__ import annotations

from importlib.util import find_spec

import click

from kvferry.device.driver.cuda import CudaDriver
from kvferry.errors import DriverError


def open_card(command: str, device: int) -> CudaDriver:
    """The CUDA driver on ``device``; a click error names what ``command`` lacks."""
    try:
        driver = CudaDriver.open(device)
    except (OSError, DriverError) as error:
        raise click.ClickException(
            f"{command} needs an NVIDIA GPU and its driver, and found none: {error}.\n"
            "Run it on the machine that serves the model. To see kvferry work without a GPU, "
            "try: kvferry demo"
        ) from error
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"{command} needs {' and '.join(missing)} for its kernels and its loads: "
            "pip install 'kvferry[gpu]'"
        )
    return driver
