"""Kernels without a GPU: Triton's interpreter, run in stream order by the fake driver.

The interpreter must be chosen before the kernel is defined, so this module sets it; nothing else
in the test process may import the kernels first.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from tests.fakes.driver import FakeDriver
from triton.runtime.interpreter import TensorHandle

from kvferry.transfer.kernels import triton_copy
from kvferry.transfer.kernels.launch import ARGUMENTS, CopyArguments, Launch, Variant


class InterpretedLauncher:
    """Runs the copy kernel on the CPU when the fake stream gets there."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def prepare(self, variant: Variant) -> Launch:
        constants = variant.constants()

        def launch(programs: int, arguments: CopyArguments, stream: int) -> None:
            # The real launch reads its arguments during the call, so a late run needs its own.
            values = [_typed(getattr(arguments, name), kind) for name, kind in ARGUMENTS.items()]

            def run() -> None:
                triton_copy.copy_rows[(programs,)](*values, **constants)

            self._driver.enqueue_host_function(stream, run)

        return launch

    def close(self) -> None:
        pass


def _typed(value: int, kind: str) -> Any:
    """The interpreter makes 32 bits of an address that fits them; the compiler goes by kind."""
    if kind == "i32":
        return value
    return tl.tensor(TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)
