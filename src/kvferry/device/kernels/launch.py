"""Launching the copy kernel on a CUDA card.

Triton only compiles here. The launch goes through the same thin driver as every copy, on a raw
stream, so that it needs neither torch nor a C compiler and costs a few microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

from kvferry.device.driver.cuda import CudaDriver
from kvferry.device.kernels.base import ARGUMENTS, CopyArguments, Launch, Variant
from kvferry.errors import DriverError

WARP = 32
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class CudaLauncher:
    """Owns the compiled kernels of one device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._launches: dict[Variant, Launch] = {}
        self._modules: list[int] = []
        # Without a signature: to convert eleven arguments by one takes as long as the call. So what
        # is an address must be a c_void_p, or ctypes cuts it to 32 bits.
        self._call = driver.bind("cuLaunchKernel")

    def prepare(self, variant: Variant) -> Launch:
        with self._lock:
            if variant not in self._launches:
                self._load(variant, *compile_for(variant, self._capability()))
            return self._launches[variant]

    def prepare_all(self, variants: Sequence[Variant]) -> None:
        """The same for several at once: most of a compiler's time is not the interpreter's."""
        with self._lock:
            capability = self._capability()
            first, *others = variants  # alone, because it imports and hashes what all of them use
            self._load(first, *compile_for(first, capability))
            with ThreadPoolExecutor(len(others)) as pool:
                compiled = pool.map(lambda variant: compile_for(variant, capability), others)
                for variant, (image, name) in zip(others, compiled, strict=True):
                    self._load(variant, image, name)

    def close(self) -> None:
        with self._lock, self._driver.current():
            unload = self._driver.bind("cuModuleUnload", c_void_p)
            while self._modules:
                unload(self._modules.pop())
            self._launches.clear()

    def _launch_of(self, function: int, threads: int) -> Launch:
        # A closure, no look-up: what comes before the launch of a small copy is part of its time.
        call, check, kernel = self._call, self._driver.check, c_void_p(function)

        def launch(programs: int, arguments: CopyArguments, stream: int) -> None:
            on, pointers = c_void_p(stream), arguments.pointers
            code = call(kernel, programs, 1, 1, threads, 1, 1, 0, on, pointers, None)
            if code:
                check(code, f"cuLaunchKernel({programs} x {threads} threads)")

        return launch

    def _load(self, variant: Variant, image: bytes, name: bytes) -> None:
        module, function = c_void_p(), c_void_p()
        load = self._driver.bind("cuModuleLoadData", c_void_p, c_char_p)
        self._driver.check(load(byref(module), image), "cuModuleLoadData()")
        self._modules.append(module.value or 0)
        find = self._driver.bind("cuModuleGetFunction", c_void_p, c_void_p, c_char_p)
        self._driver.check(find(byref(function), module, name), f"cuModuleGetFunction({name!r})")
        self._launches[variant] = self._launch_of(function.value or 0, variant.warps * WARP)

    def _capability(self) -> int:
        device, value, version = c_int(), c_int(), 0
        current = self._driver.bind("cuCtxGetDevice", c_void_p)
        self._driver.check(current(byref(device)), "cuCtxGetDevice()")
        ask = self._driver.bind("cuDeviceGetAttribute", c_void_p, c_int, c_int)
        for attribute in (_MAJOR, _MINOR):
            self._driver.check(ask(byref(value), attribute, device), "cuDeviceGetAttribute()")
            version = 10 * version + value.value
        return version


def compile_for(variant: Variant, capability: int) -> tuple[bytes, bytes]:
    """Machine code and entry name of ``variant`` for sm_``capability``."""
    compiled = compile_kernel(variant, capability)
    return compiled.asm["cubin"], compiled.metadata.name.encode()


def compile_kernel(variant: Variant, capability: int) -> Any:
    """What Triton makes of ``variant`` for sm_``capability``; needs no card."""
    # Imported here: Triton is heavy, and only a kernel needs it.
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from kvferry.device.kernels import triton_copy
    except ImportError as error:
        raise DriverError(
            f"copy kernels need Triton ({error}); install kvferry[gpu], or set copy_path to dma",
            unsupported=True,
        ) from error
    constants = variant.constants()
    signature = {**ARGUMENTS, **dict.fromkeys(constants, "constexpr")}
    try:
        return triton.compile(
            ASTSource(triton_copy.copy_rows, signature, constexprs=constants),
            target=GPUTarget("cuda", capability, WARP),
            options={"num_warps": variant.warps, "num_stages": 1},
        )
    except Exception as error:
        raise DriverError(
            f"Triton {triton.__version__} could not compile {variant} for sm_{capability}: {error}",
            unsupported=True,
        ) from error
