"""The CUDA launcher without a card: what is compiled, in which order, and loaded how often."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import CFUNCTYPE, POINTER, c_int, c_int32, c_int64, c_uint, c_void_p
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver

from kvferry.errors import DriverError
from kvferry.transfer.kernels import launch
from kvferry.transfer.kernels.launch import ARGUMENTS, CopyArguments, CudaLauncher, Variant
from kvferry.transfer.paths import opening
from kvferry.transfer.paths.kernel import KernelPath
from kvferry.transfer.paths.opening import open_launcher, open_paths
from kvferry.transfer.paths.staged import StagedPath


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


def test_kernels_are_compiled_once_and_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Variant] = []

    def compile_for(variant: Variant, capability: int) -> tuple[bytes, bytes]:
        compiled.append(variant)
        return repr(variant).encode(), b"copy_rows"

    monkeypatch.setattr(launch, "compile_for", compile_for)
    library: Any = Library()
    launcher = CudaLauncher(library)
    common = [KernelPath.COMMON, StagedPath.COMMON]
    launches = {launcher.prepare(variant) for variant in 2 * common}
    assert compiled == common
    assert len(launches) == 2
    assert library.loaded == [repr(variant).encode() for variant in common]
    launcher.close()
    assert sorted(library.unloaded) == [1, 2]


LAUNCH_KERNEL = CFUNCTYPE(
    c_int, c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)
)


class Launching(Library):
    """Its launch is a C function, called as the library's would be, and says what reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._launch = LAUNCH_KERNEL(self._see)

    def bind(self, name: str, *types: Any) -> Callable[..., int]:
        if name != "cuLaunchKernel":
            return super().bind(name, *types)
        return CFUNCTYPE(c_int, *types)(ctypes.cast(self._launch, c_void_p).value or 0)

    def cuModuleGetFunction(self, function: Any, module: c_void_p, name: bytes) -> int:  # noqa: N802
        function._obj.value = 0x7F00_1234_5678
        return 0

    def _see(self, function: int, *rest: Any) -> int:
        *grid, stream, pointers, extra = rest
        kinds = [c_int64 if kind == "i64" else c_int32 for kind in ARGUMENTS.values()]
        values = [kind.from_address(pointers[i]).value for i, kind in enumerate(kinds)]
        self.seen = [function, grid, stream, values, bool(extra)]
        return 0


def test_a_launch_passes_every_address_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_for", lambda *_: (b"image", b"copy_rows"))
    library: Any = Launching()
    launcher = CudaLauncher(library)
    values = {
        name: (0x7FFF_0000_0000 if kind == "i64" else 0x7000_0000) + at
        for at, (name, kind) in enumerate(ARGUMENTS.items())
    }
    arguments = CopyArguments(**values)
    stream = 0x5555_0123_4560
    launcher.prepare(KernelPath.COMMON)(66, arguments, stream)
    threads = 32 * KernelPath.COMMON.warps
    grid = [66, 1, 1, threads, 1, 1, 0]
    assert library.seen == [0x7F00_1234_5678, grid, stream, list(values.values()), False]
    launcher.close()


@pytest.mark.parametrize("can_compile", [True, False])
def test_the_driver_copies_where_kernels_cannot_be_compiled(
    can_compile: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Launcher:
        def __init__(self, driver: object) -> None:
            pass

        def prepare(self, variant: object) -> None:
            if not can_compile:
                raise DriverError("no compiler for this card", unsupported=True)

        def close(self) -> None:
            pass

    monkeypatch.setattr(opening, "CudaLauncher", Launcher)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    driver = FakeDriver()
    launcher = open_launcher(driver)
    paths = open_paths(driver, launcher, ring_bytes=1 << 20).values()
    assert {path.name for path in paths} == ({"kernel", "staged"} if can_compile else {"dma"})
    assert ("no compiler for this card" in caplog.text) is not can_compile
    unpinned = open_paths(driver, launcher, ring_bytes=1 << 20, is_pinned=False)
    assert {path.name for path in unpinned.values()} == {"dma"}
