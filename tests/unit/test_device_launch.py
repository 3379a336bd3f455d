"""The CUDA launcher without a card: what is compiled, in which order, and loaded how often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import c_void_p
from typing import Any

import pytest

from kvferry.device import launch
from kvferry.device.launch import CudaLauncher, Variant
from kvferry.device.toolbox import COMMON
from kvferry.errors import DriverError


class Library:
    """As much of the driver as a launcher asks for; every module has a handle of its own."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.unloaded: list[int] = []

    def bind(self, name: str, *_: Any) -> Callable[..., int]:
        return getattr(self, name, lambda *_: 0)

    def check(self, code: int, asked: str) -> None:
        assert code == 0, asked

    def current(self) -> Any:
        return nullcontext()

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        self.loaded.append(image)
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleGetFunction(self, function: Any, module: c_void_p, name: bytes) -> int:  # noqa: N802
        function._obj.value = 0x100 + (module.value or 0)
        return 0

    def cuModuleUnload(self, module: int) -> int:  # noqa: N802
        self.unloaded.append(module)
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What was compiled, in order. None of several at once ends before the others have begun."""
    begun: list[Variant] = []
    together = threading.Barrier(len(COMMON) - 1)

    def compile_for(variant: Variant, capability: int) -> tuple[bytes, bytes]:
        begun.append(variant)
        if len(begun) > 1:
            together.wait(60.0)
        return repr(variant).encode(), b"copy_rows"

    monkeypatch.setattr(launch, "compile_for", compile_for)
    return begun


def test_what_most_engines_need_is_compiled_side_by_side_after_the_first(
    compiled: list[Variant],
) -> None:
    library: Any = Library()
    launcher = CudaLauncher(library)
    launcher.prepare_all(COMMON)
    assert compiled[0] == COMMON[0]
    assert set(compiled) == set(COMMON)
    assert sorted(library.loaded) == sorted(repr(variant).encode() for variant in COMMON)
    launches = {launcher.prepare(variant) for variant in COMMON}
    assert len(launches) == len(library.loaded) == len(compiled) == len(COMMON)
    launcher.close()
    assert sorted(library.unloaded) == list(range(1, len(COMMON) + 1))


def test_one_that_cannot_be_compiled_is_an_error_and_leaves_nothing_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_for(variant: Variant, capability: int) -> tuple[bytes, bytes]:
        if variant == COMMON[3]:
            raise DriverError("no compiler for this card", unsupported=True)
        return b"image", b"copy_rows"

    monkeypatch.setattr(launch, "compile_for", compile_for)
    library: Any = Library()
    launcher = CudaLauncher(library)
    with pytest.raises(DriverError, match="no compiler"):
        launcher.prepare_all(COMMON)
    launcher.close()
    assert sorted(library.unloaded) == list(range(1, len(library.loaded) + 1))
