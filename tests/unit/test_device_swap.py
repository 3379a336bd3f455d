from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fakes.driver import FakeDriver

from kvferry.errors import InputError
from kvferry.transfer.driver.base import Priority, SourceOrder
from kvferry.transfer.paths.direct import DEBUG_VARIABLE, swap_blocks_batch


class Card:
    """A fake driver with one stream and two pieces of memory, ``src`` and ``dst``."""

    def __init__(self, **options: Any) -> None:
        self.driver = FakeDriver(**options)
        rng = np.random.default_rng(0)
        self.src, self.dst = (rng.integers(0, 256, 40_000, dtype=np.uint8) for _ in range(2))
        self.driver.adopt(self.src)
        self.driver.adopt(self.dst)
        with self.driver.current():
            self.stream = self.driver.create_stream(Priority.LOW)

    def swap(self, src: Any, dst: Any, sizes: Any, **options: Any) -> None:
        options.setdefault("stream", self.stream)
        with self.driver.current():
            swap_blocks_batch(src, dst, sizes, driver=self.driver, **options)

    def addresses(self, array: Any, offsets: list[int]) -> Any:
        return np.array(offsets, dtype=np.int64) + array.ctypes.data


def test_copies_what_it_is_told_in_one_call() -> None:
    card = Card()
    sizes = np.array([10, 1, 300], dtype=np.int64)
    expected = card.dst.copy()
    for src, dst, size in ((0, 500, 10), (77, 3, 1), (1000, 1001, 300)):
        expected[dst : dst + size] = card.src[src : src + size]
    card.swap(
        card.addresses(card.src, [0, 77, 1000]), card.addresses(card.dst, [500, 3, 1001]), sizes
    )
    card.driver.timeline.run_all()
    assert np.array_equal(card.dst, expected)
    assert card.driver.batches == [3]
    assert card.driver.orders == [SourceOrder.STREAM]
    one = (card.addresses(card.src, [0]), card.addresses(card.dst, [0]), np.array([8]))
    card.swap(*one, is_src_access_order_any=True)
    assert card.driver.orders == [SourceOrder.STREAM, SourceOrder.ANY], "ANY only when asked"


def test_uint64_lists_of_views_and_torch_like_tensors_are_taken() -> None:
    class Tensor:
        def __init__(self, array: Any) -> None:
            self.array = array

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

        def numpy(self) -> Any:
            return self.array

    card = Card()
    src = card.addresses(card.src, [0, 9, 16, 9])[::2].astype(np.uint64)  # not contiguous before
    card.swap(Tensor(src), card.addresses(card.dst, [0, 16]), np.array([4, 4], dtype=np.uint64))
    card.driver.timeline.run_all()
    assert np.array_equal(card.dst[16:20], card.src[16:20])


def test_a_torch_stream_is_known_by_its_handle() -> None:
    class Stream:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    card = Card()
    one = (card.addresses(card.src, [0]), card.addresses(card.dst, [0]), np.array([8]))
    card.swap(*one, stream=Stream(card.stream))
    assert card.driver.batches == [1]
    with pytest.raises(InputError, match="default stream"):
        card.swap(*one, stream=Stream(0))


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_are_refused(stream: int) -> None:
    card = Card()
    with pytest.raises(InputError, match="default stream"):
        card.swap([], [], [], stream=stream)


def test_nothing_to_copy_is_no_call() -> None:
    card = Card()
    before = len(card.driver.calls)
    empty = np.empty(0, dtype=np.int64)
    card.swap(empty, empty, empty)
    assert card.driver.calls[before:] == ["current"]


def test_batches_beyond_the_drivers_limit_are_split() -> None:
    card = Card(max_batch=8)
    offsets = list(range(0, 20 * 16, 16))
    card.swap(
        card.addresses(card.src, offsets),
        card.addresses(card.dst, offsets),
        np.full(20, 16, dtype=np.int64),
    )
    card.driver.timeline.run_all()
    assert card.driver.batches == [8, 8, 4]
    assert np.array_equal(card.dst[:320], card.src[:320])


REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "lengths": ([64, 80], [64], [8], "2 sources, 1 destinations and 1 sizes"),
    "matrix": ([[64]], [64], [8], "src_ptrs must be a vector"),
    "int32": (np.array([64], np.int32), [64], [8], "src_ptrs must be int64 or uint64, got int32"),
    "float": ([64], [64.0], [8], "dst_ptrs must be int64 or uint64"),
    "zero size": ([64, 80], [64, 80], [8, 0], r"sizes\[1\] is 0"),
    "negative size": ([64], [64], [-8], r"sizes\[0\] is -8"),
    "null source": ([0], [64], [8], r"src_ptrs\[0\] is 0"),
    "wrapped address": (np.array([2**63], np.uint64), [64], [8], r"src_ptrs\[0\] is 9223372"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case: str) -> None:
    src, dst, sizes, words = REFUSED[case]
    card = Card()
    with pytest.raises(InputError, match=words):
        card.swap(src, dst, sizes)
    assert "copy_batch_async" not in card.driver.calls


def test_overlapping_destinations_are_seen_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    pair = (
        card.addresses(card.src, [0, 100]),
        card.addresses(card.dst, [64, 60]),
        np.array([8, 5]),
    )
    card.swap(*pair)
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(InputError, match=r"destinations 1 .* and 0 .* overlap"):
        card.swap(*pair)
    card.swap(pair[0], card.addresses(card.dst, [64, 59]), pair[2])  # neighbours are fine
