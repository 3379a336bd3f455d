"""What the copy kernel takes, in which forms it is compiled, and what a launcher must offer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

ARGUMENTS: dict[str, str] = {
    "null_address": "i64",
    "ids": "i64",
    "num_blocks": "i32",
    "tables": "i64",
    "num_segments": "i32",
    "segment_bytes": "i64",
    "packed_base": "i64",
    "packed_pitch": "i64",
    "rows_per_block": "i32",
    "rows_per_segment": "i32",
    "first_row": "i32",
    "last_row": "i32",
}
"""The run-time arguments of the copy kernel and their types, in order; the rest are constants."""


class CopyArguments(ctypes.Structure):
    """One launch's arguments. Read during the launch call only, so it may be used again."""

    _fields_ = tuple(
        (name, c_int64 if kind == "i64" else c_int32) for name, kind in ARGUMENTS.items()
    )

    def __init__(self, **values: int) -> None:
        super().__init__(**values)
        addresses = [
            ctypes.addressof(self) + getattr(CopyArguments, name).offset for name in ARGUMENTS
        ]
        # Triton adds up to two scratch pointers of its own; ours are null and never read.
        self._scratch = c_void_p()
        addresses += [ctypes.addressof(self._scratch)] * 2
        self.pointers = (c_void_p * len(addresses))(*addresses)


@dataclass(frozen=True)
class Variant:
    """One compiled form of the copy kernel."""

    to_packed: bool
    linear: bool
    uniform: bool
    width: int
    vector: int
    steps: int
    warps: int
    single: bool = False

    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments. One row per warp: see the kernel."""
        return {
            "TO_PACKED": self.to_packed,
            "LINEAR": self.linear,
            "SINGLE": self.single,
            "UNIFORM": self.uniform,
            "WIDTH": self.width,
            "VECTOR": self.vector,
            "ROWS": self.warps,
            "STEPS": self.steps,
        }


def widest(*, to_packed: bool, warps: int, linear: bool = False, single: bool = False) -> Variant:
    """The variant for equal segments of multiples of 4 KiB: what most engines have."""
    return Variant(to_packed, linear, True, width=8, vector=2, steps=8, warps=warps, single=single)


Launch = Callable[[int, CopyArguments, int], None]
"""Queues so many programs of one kernel, with arguments, on a stream; DriverError on refusal."""


class Launcher(Protocol):
    """Compiles the copy kernel and loads it."""

    def prepare(self, variant: Variant) -> Launch:
        """Compile and load ``variant``; may take a second the first time."""

    def close(self) -> None:
        """Unload what was loaded. Safe to call twice."""
