"""The binding, on a library made of Python functions: which form is asked for, what is passed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ClosedError, DriverError
from kvferry.transfer.driver import (
    BATCH_WITH_FAIL_INDEX,
    BATCH_WITHOUT_FAIL_INDEX,
    BatchForm,
    Driver,
    Priority,
)

NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 801: b"CUDA_ERROR_NOT_SUPPORTED"}


def put(out: Any, value: Any) -> int:
    out._obj.value = value
    return 0


class FakeLibcuda:
    """libcuda of a given version: enough functions to open it, and a log of what was called."""

    def __init__(self, version: int, *, with_look_up: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        self.version = version
        self._with_fail_index = BATCH_WITH_FAIL_INDEX(self._batch_12080)
        self._without = BATCH_WITHOUT_FAIL_INDEX(self._batch_13000)
        self._functions: dict[str, Any] = {
            "cuDriverGetVersion": lambda out: put(out, self.version),
            "cuDeviceGet": put,
            "cuDevicePrimaryCtxRetain": lambda out, device: put(out, 0xC0),
            "cuCtxGetStreamPriorityRange": lambda least, most: put(least, 0) or put(most, -5),
            "cuStreamCreateWithPriority": self._create_stream,
            "cuEventCreate": lambda out, flags: put(out, 0xE0 + flags),
            "cuEventQuery": lambda event: self.codes.get("cuEventQuery", 0),
            "cuEventElapsedTime": lambda out, start, end: put(out, 2.5),
            "cuMemAlloc_v2": lambda out, size: put(out, 0xD000),
            "cuMemHostAlloc": lambda out, size, flags: put(out, 0xF000),
            "cuGetErrorName": lambda code, out: put(out, NAMES.get(code)),
            "cuGetErrorString": lambda code, out: put(out, b"words for it"),
            "cuDeviceGetName": lambda buffer, size, device: self._text(buffer, b"Card"),
            "cuDeviceGetPCIBusId": lambda buffer, size, device: self._text(buffer, b"0000:AB:00.0"),
        }
        if with_look_up:
            self._functions["cuGetProcAddress_v2"] = self._look_up

    def __getattr__(self, name: str) -> Any:
        if name == "cuGetProcAddress_v2" and name not in self._functions:
            raise AttributeError(name)

        def function(*args: Any) -> int:
            self.log.append((name, *args))
            if name in self._functions:
                return int(self._functions[name](*args))
            return self.codes.get(name, 0)

        return SimpleFunction(function)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]

    def _text(self, buffer: Any, text: bytes) -> int:
        buffer.value = text
        return 0

    def _create_stream(self, out: Any, flags: int, priority: int) -> int:
        return put(out, 0x500)

    def _look_up(self, name: bytes, out: Any, version: int, flags: int, status: Any) -> int:
        # As the real one: the newest form that is no newer than what was asked for or what it has.
        newest = min(version, self.version)
        form = None
        if newest >= 12080:
            form = self._with_fail_index
        if newest >= 13000:
            form = self._without
        return put(out, ctypes.cast(form, ctypes.c_void_p).value if form else None)

    def _batch_12080(self, *args: Any) -> int:
        self.log.append(
            ("batch 12080", *args[:4], ctypes.c_int.from_address(args[4]).value, args[6], args[8])
        )
        return self.codes.get("batch", 0)

    def _batch_13000(self, *args: Any) -> int:
        self.log.append(
            ("batch 13000", *args[:4], ctypes.c_int.from_address(args[4]).value, args[6], args[7])
        )
        return self.codes.get("batch", 0)


class SimpleFunction:
    """Takes ``argtypes`` and ``restype`` as a ctypes function does."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: Any) -> Any:
        assert self.argtypes is not None
        assert len(args) == len(self.argtypes)
        return self.function(*args)


ARRAYS = (
    np.array([64, 128], dtype=np.uint64),
    np.array([256, 512], dtype=np.uint64),
    np.array([8, 16], dtype=np.uint64),
)


@pytest.mark.parametrize(
    ("version", "form", "logged"),
    [
        (13000, BatchForm.WITHOUT_FAIL_INDEX, "batch 13000"),
        (13010, BatchForm.WITHOUT_FAIL_INDEX, "batch 13000"),
        (12080, BatchForm.WITH_FAIL_INDEX, "batch 12080"),
        (12090, BatchForm.WITH_FAIL_INDEX, "batch 12080"),
        (12040, BatchForm.ABSENT, None),
    ],
)
def test_the_form_follows_the_driver_not_a_header(
    version: int, form: BatchForm, logged: str | None
) -> None:
    library = FakeLibcuda(version)
    driver = Driver(library)
    assert driver.batch_form is form
    if logged is None:
        with pytest.raises(DriverError) as caught:
            driver.copy_batch_async(*ARRAYS, 0x500)
        assert caught.value.unsupported
        return
    driver.copy_batch_async(*ARRAYS, 0x500)
    dsts, srcs, sizes = (array.ctypes.data for array in ARRAYS)
    assert library.called(logged) == [
        (dsts, srcs, sizes, 2, 1, 1, 0x500),
    ]


def test_a_refusal_carries_the_drivers_words_and_what_was_asked() -> None:
    library = FakeLibcuda(13000)
    driver = Driver(library)
    library.codes["cuMemcpyAsync"] = 1
    with pytest.raises(DriverError) as caught:
        driver.copy_async(0x40, 0x80, 7, 0x500)
    assert "cuMemcpyAsync(7 bytes from 0x80 to 0x40)" in str(caught.value)
    assert "CUDA_ERROR_INVALID_VALUE (1): words for it" in str(caught.value)
    assert (caught.value.code, caught.value.unsupported) == (1, False)


def test_streams_are_non_blocking_and_urgent_in_the_drivers_own_range() -> None:
    library = FakeLibcuda(13000)
    driver = Driver(library)
    assert driver.create_stream(Priority.HIGH) == 0x500
    driver.create_stream(Priority.LOW)
    assert [call[1:] for call in library.called("cuStreamCreateWithPriority")] == [(1, -5), (1, 0)]


def test_the_rest_of_the_calls_reach_the_library() -> None:
    library = FakeLibcuda(13000)
    driver = Driver(library)
    with driver.current():
        assert driver.alloc_device(100) == 0xD000
        assert driver.alloc_host(100) == 0xF000
        driver.free_device(0xD000)
        driver.free_host(0xF000)
        driver.register_host(0x1000, 4096)
        driver.unregister_host(0x1000)
        driver.record_event(1, 2)
        driver.stream_wait_event(2, 1)
        driver.synchronize_stream(2)
        driver.destroy_event(1)
        driver.destroy_stream(2)
    assert driver.create_event(timing=False) == 0xE2
    assert driver.create_event(timing=True) == 0xE0
    assert driver.elapsed_seconds(1, 2) == pytest.approx(2.5e-3)
    identity = driver.identity()
    assert (identity.name, identity.driver_version) == ("Card", 13000)
    assert identity.pci_bus_id == "0000:ab:00.0"
    assert library.called("cuMemHostRegister_v2") == [(0x1000, 4096, 1)]
    assert library.called("cuStreamWaitEvent") == [(2, 1, 0)]
    pushes, pops = library.called("cuCtxPushCurrent_v2"), library.called("cuCtxPopCurrent_v2")
    assert pushes == 3 * [(0xC0,)]  # once more for each call that pins, from whatever thread
    assert len(pops) == 3
    driver.close()
    driver.close()
    assert len(library.called("cuDevicePrimaryCtxRelease_v2")) == 1
    with pytest.raises(ClosedError), driver.current():
        pass


def test_work_is_done_under_way_or_broken() -> None:
    library = FakeLibcuda(13000)
    driver = Driver(library)
    assert driver.event_is_done(0x500)
    library.codes["cuEventQuery"] = 600
    assert not driver.event_is_done(0x500)
    library.codes["cuEventQuery"] = 1
    with pytest.raises(DriverError, match=r"cuEventQuery\(.* 0x500\)"):
        driver.event_is_done(0x500)


def test_a_machine_without_a_driver_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"no NVIDIA driver .*libcuda\.so\.1"):
        Driver.open()


def test_a_missing_entry_point_is_named() -> None:
    with pytest.raises(DriverError, match="this driver has no cuDriverGetVersion"):
        Driver(SimpleNamespace())


def test_a_driver_without_versioned_look_up_has_no_batch() -> None:
    assert Driver(FakeLibcuda(11040, with_look_up=False)).batch_form is BatchForm.ABSENT


THREAD_LOCAL = 1


class CapturingLibcuda(FakeLibcuda):
    """Pins only in a thread that does not mind another one's capture, as the real one does."""

    def __init__(self) -> None:
        super().__init__(13000)
        self.mode = 0
        self._functions["cuThreadExchangeStreamCaptureMode"] = self._exchange
        self._functions["cuMemHostRegister_v2"] = self._pin
        self._functions["cuMemHostUnregister"] = self._pin

    def _exchange(self, out: Any) -> int:
        out._obj.value, self.mode = self.mode, out._obj.value
        return 0

    def _pin(self, *args: Any) -> int:
        return 0 if self.mode == THREAD_LOCAL else 1


def test_memory_is_pinned_while_another_thread_captures_a_graph() -> None:
    library = CapturingLibcuda()
    driver = Driver(library)
    driver.register_host(4096, 4096)
    driver.unregister_host(4096)
    assert library.mode == 0, "the thread's own mode was not put back"
    library._functions["cuMemHostRegister_v2"] = lambda *args: 1
    with pytest.raises(DriverError):
        driver.register_host(4096, 4096)
    assert library.mode == 0, "a refusal puts it back too"
