"""Memory that blocks cannot be copied from and to is refused, by the tensor's name, at the door."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.errors import LayoutError

BLOCKS, TOKENS = 6, 4


def layer(dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.zeros((BLOCKS, 2, TOKENS, 8), dtype)


def attach(kv: Any, **more: Any) -> kvferry.Ferry:
    given = {"model": "m", "block_tokens": TOKENS, "host": "64KiB", **more}
    return kvferry.attach(kv, **given)


def read_only() -> Any:
    array = layer()
    array.setflags(write=False)
    return array


def over_bytes() -> Any:
    return np.frombuffer(bytes(BLOCKS * 64), np.uint8).reshape(BLOCKS, 64)


def over_a_read_only_map() -> Any:
    mapped = mmap.mmap(-1, BLOCKS * 4096, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, np.uint8).reshape(BLOCKS, -1)


def objects() -> Any:
    return np.full((BLOCKS, 8), "x", dtype=object)


def records_with_objects() -> Any:
    return np.zeros((BLOCKS, 8), dtype=[("a", "i4"), ("b", "O")])


def masked() -> Any:
    return np.ma.masked_array(layer(), mask=False)


def number() -> Any:
    return np.float32(1.5)


class Passing:
    """What an image library offers: bytes made for the moment, gone with their last reference."""

    shape, strides, itemsize, dtype = (BLOCKS, 8), (8, 1), 1, np.dtype("u1")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (np.zeros(99, "u1").ctypes.data, False), "version": 3}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (read_only, "read-only"),
        (over_bytes, "read-only"),
        (over_a_read_only_map, "read-only"),
        (objects, "object"),
        (records_with_objects, "object"),
        (masked, "masked"),
        (number, "float32"),
        (Passing, "Passing"),
        (lambda: np.zeros((BLOCKS, 0), "u1"), "holds no bytes"),
        (lambda: np.zeros((0, 8), "u1"), "has 0 blocks"),
        (lambda: np.zeros((), "u1"), "no axis 0"),
        (lambda: layer()[::-1], "reverses"),
        (lambda: [layer()], "list"),
        (lambda: None, "NoneType"),
        (lambda: b"bytes", "bytes"),
        (lambda: np.array(["a"] * BLOCKS), "text"),
    ],
)
def test_such_a_tensor_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(LayoutError, match=f"model.layers.1.*{words}"):
        attach({"model.layers.0": layer(), "model.layers.1": make()})
    with pytest.raises(LayoutError, match=f"tensor 1.*{words}"):
        attach([layer(), make()])


@pytest.mark.parametrize(
    "kv",
    [
        np.zeros((3, BLOCKS, 8), np.float32),
        np.zeros(BLOCKS, np.uint8),
        "kv",
        b"kv",
        5,
        None,
        {layer},
        iter([layer()]),
        kvferry.Keys.empty(),
    ],
    ids=lambda kv: type(kv).__name__,
)
def test_what_is_no_collection_of_tensors_is_refused(kv: Any) -> None:
    """A bare array's blocks were read as layers."""
    with pytest.raises(LayoutError, match=r"give .* \[tensor\]|by name or in a list"):
        attach(kv)


def test_tensors_that_share_bytes_are_both_named() -> None:
    one = layer()
    with pytest.raises(LayoutError, match=r"layers\.1.*layers\.0|layers\.0.*layers\.1"):
        attach({"layers.0": one, "layers.1": one})
    many = np.zeros(BLOCKS * 8 + 8, np.uint8)
    with pytest.raises(LayoutError, match=r"a and b|b and a"):
        attach({"a": many[:-8].reshape(BLOCKS, 8), "b": many[8:].reshape(BLOCKS, 8)})
    tight = np.lib.stride_tricks.as_strided(many, (BLOCKS, 8), (4, 1))
    with pytest.raises(LayoutError, match="tight"):
        attach({"tight": tight})


def test_a_map_that_is_private_and_writable_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "kv"
    file.write_bytes(bytes(BLOCKS * 4096))
    with pytest.raises(LayoutError, match=r"tensor 0.*read-only"):
        attach([np.memmap(file, np.uint8, mode="r", shape=(BLOCKS, 4096))])
    kv = np.memmap(file, np.uint8, mode="c", shape=(BLOCKS, 4096))
    with attach([kv]) as ferry:
        keys = ferry.keys(range(TOKENS))
        kv[2] = 7
        ferry.wait(ferry.store(keys, [2]))
        ferry.wait(ferry.load(ferry.match(keys), [3]))
    assert (kv[3] == 7).all()


def torch_cases() -> dict[str, Callable[[Any], Any]]:
    return {
        "meta": lambda torch: torch.zeros(BLOCKS, 8, device="meta"),
        "sparse": lambda torch: torch.zeros(BLOCKS, 8).to_sparse(),
        "sparse_csr": lambda torch: torch.zeros(BLOCKS, 8).to_sparse_csr(),
        "nested": lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "repeats": lambda torch: torch.zeros(BLOCKS, 1).expand(BLOCKS, 8),
        "holds no bytes": lambda torch: torch.zeros(BLOCKS, 0),
        "read-only": lambda torch: torch.from_numpy(over_a_read_only_map()),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("words", torch_cases())
def test_such_a_torch_tensor_is_refused_by_name(words: str) -> None:
    torch = pytest.importorskip("torch")
    bad = torch_cases()[words](torch)
    with pytest.raises(LayoutError, match=rf"layers.1.*{words.split('_')[0]}"):
        attach({"layers.0": torch.zeros(BLOCKS, 8), "layers.1": bad})
    with pytest.raises(LayoutError, match=words.split("_")[0]):
        attach({"layers.0": bad})


class OnGpu:
    """What we ask of a tensor before anything touches its device."""

    def __init__(self, kind: str, index: int | None) -> None:
        self.device = type("device", (), {"type": kind, "index": index})()
        self.is_cuda = kind == "cuda"
        self.array = layer()
        self.shape, self.dtype = self.array.shape, "float32"

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def test_tensors_of_several_devices_are_refused() -> None:
    for kv in (
        {"a": OnGpu("cuda", 0), "b": layer()},
        {"a": layer(), "b": OnGpu("cuda", 0)},
        {"a": OnGpu("cuda", 0), "b": OnGpu("cuda", 1)},
    ):
        with pytest.raises(LayoutError, match=r"b is on .*, a on "):
            attach(kv)
    with pytest.raises(LayoutError, match="a is on xpu"):
        attach({"a": OnGpu("xpu", 0)})
