"""The engine's contract on a real card: exact bytes, the order of things, a caller never held.

Needs a CUDA driver and no torch; the kernel paths also need Triton.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import util

import numpy as np
import pytest
from tests.gpu.card import Bytes, Card
from tests.gpu.slow_kernel import SlowFill

from kvferry.transfer.driver import BatchForm, Driver
from kvferry.transfer.job import Direction
from kvferry.transfer.kernels.launch import CudaLauncher
from kvferry.transfer.layout import GroupLayout, LayerParts, TensorView, describe
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.paths.direct import DmaPath
from kvferry.transfer.paths.opening import open_paths

pytestmark = pytest.mark.gpu

PATHS = ["one by one", "dma", "dma-12080", "kernels"]
NUM_BLOCKS = 24
MiB = 1 << 20

Make = Callable[[int], GroupLayout]


class LeakyDriver(Driver):
    """Keeps every promise until told to drop the waits of one stream."""

    deaf_stream: int | None = None

    def stream_wait_event(self, stream: int, event: int) -> None:
        if stream != self.deaf_stream:
            super().stream_wait_event(stream, event)


@pytest.fixture(scope="module")
def driver() -> Iterator[LeakyDriver]:
    opened = LeakyDriver.open()
    yield opened  # type: ignore[misc]
    opened.close()


@pytest.fixture
def make_card(driver: LeakyDriver) -> Iterator[Callable[..., Card]]:
    with ExitStack() as stack:

        def make(path: str, device_bytes: int, layout: Make, num_slots: int = NUM_BLOCKS) -> Card:
            driver.deaf_stream = None
            paths = make_paths(driver, path, stack)
            card = Card(driver, device_bytes, layout, num_slots=num_slots, paths=paths)
            stack.callback(card.close)
            return card

        yield make


def make_paths(driver: Driver, path: str, stack: ExitStack) -> dict[Direction, Path]:
    if path == "dma-12080":
        driver = Driver.open()
        driver._resolve_batch(BatchForm.WITH_FAIL_INDEX)
        stack.callback(driver.close)
    if path != "kernels":
        return dict.fromkeys(Direction, DmaPath(driver, is_pinned=path != "one by one"))
    if util.find_spec("triton") is None:
        pytest.skip("the kernel paths need Triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("other tests of this run chose Triton's interpreter: run tests/gpu by itself")
    launcher = CudaLauncher(driver)
    stack.callback(launcher.close)
    return open_paths(driver, launcher, ring_bytes=64 << 20)


def layers(segment: int, num_layers: int, *, gap: int = 0, offset: int = 0) -> tuple[int, Make]:
    """``num_layers`` tensors of one segment per block, with ``gap`` guard bytes after each."""
    stride = segment + gap
    size = NUM_BLOCKS * stride + gap

    def make(base: int) -> GroupLayout:
        tensors = [
            TensorView(
                f"layer {i}", base + offset + i * size, (NUM_BLOCKS, segment), (stride, 1), 1
            )
            for i in range(num_layers)
        ]
        return describe(tensors, block_axis=0)

    return num_layers * size + offset + 64, make


def mixed() -> tuple[int, Make]:
    pages = [4096, 37, 576, 16]
    total = sum(pages) * NUM_BLOCKS

    def make(base: int) -> GroupLayout:
        tensors, at = [], base
        for page in pages:
            tensors.append(TensorView(f"page {page}", at, (NUM_BLOCKS, page), (page, 1), 1))
            at += NUM_BLOCKS * page
        return describe(tensors, block_axis=0)

    return total + 64, make


def one_run() -> tuple[int, Make]:
    def make(base: int) -> GroupLayout:
        view = TensorView("all", base, (NUM_BLOCKS, 8, 4096), (8 * 4096, 4096, 1), 1)
        return describe([view], block_axis=0)

    return NUM_BLOCKS * 8 * 4096, make


LAYOUTS: dict[str, tuple[int, Make]] = {
    "16 KiB x 8": layers(16384, 8),
    "4 KiB x 16, guards": layers(4096, 16, gap=64),
    "16 B": layers(16, 3, gap=16),
    "8 B aligned": layers(4104, 4, gap=8),
    "odd": layers(4097, 3, gap=3, offset=1),
    "1,234 B": layers(1234, 8),
    "1 B": layers(1, 2, gap=1),
    "mixed pages": mixed(),
    "one run": one_run(),
}


def random_bytes(card: Card, count: int) -> Bytes:
    return card.rng.integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
def test_bytes_arrive_exactly(path: str, layout: str, make_card: Callable[..., Card]) -> None:
    device_bytes, make = LAYOUTS[layout]
    card = make_card(path, device_bytes, make)
    blocks = card.rng.permutation(NUM_BLOCKS)[:13].tolist()
    slots = card.rng.permutation(NUM_BLOCKS)[:13].tolist()
    device, host = random_bytes(card, device_bytes), random_bytes(card, card.host.size)
    card.write(device)
    card.host[...] = host.reshape(card.host.shape)
    expected = card.host.copy()
    for block, slot in zip(blocks, slots, strict=True):
        for here, there in card.ranges(block):
            expected[slot, there] = device[here]
            card.host[slot, there] = 0xEE
    card.store(blocks, slots)
    card.drain()
    assert np.array_equal(card.host, expected)
    assert np.array_equal(card.read(), device)

    for in_parts in (False, True):
        card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
        before = card.host.copy()
        for block, slot in zip(blocks, slots, strict=True):
            for here, there in card.ranges(block):
                device[here] = card.host[slot, there]
        card.load(slots, blocks, in_parts=in_parts)
        card.drain()
        assert np.array_equal(card.read(), device)
        assert np.array_equal(card.host, before)


RACE_BYTES, RACE_LAYOUT = layers(1 * MiB, 8)
OLD, NEW, LOADED = 0x11, 0x22, 0x33
WRITTEN = itertools.cycle(range(0x40, 0x100))
"""Never what the last race wrote: its bytes may still lie in a ring."""


def race_card(path: str, make_card: Callable[..., Card]) -> Card:
    card = make_card(path, RACE_BYTES, RACE_LAYOUT)
    # Kernels are compiled and buffers made before the race starts.
    card.store([0], [0])
    card.load([0], [0])
    card.drain()
    return card


def store_race(card: Card) -> bool:
    """A slow kernel writes the source; the slot must hold what it wrote."""
    written = next(WRITTEN)
    card.write(np.full(RACE_BYTES, OLD, dtype=np.uint8))
    card.host[...] = OLD
    with card.driver.current():
        kernel = SlowFill(card.driver)
        kernel.queue(card.device, RACE_BYTES, written, card.compute, ms=20)
    card.store(range(NUM_BLOCKS), range(NUM_BLOCKS))
    card.drain()
    right = bool(np.all(card.host[:, : card.layout.block_bytes] == written))
    card.read()
    with card.driver.current():
        kernel.close()
    return right


def load_race(card: Card) -> bool:
    """A slow kernel queued before the load writes the destination; the load must come last."""
    card.write(np.full(RACE_BYTES, OLD, dtype=np.uint8))
    card.host[...] = LOADED
    with card.driver.current():
        kernel = SlowFill(card.driver)
        kernel.queue(card.device, RACE_BYTES, NEW, card.compute, ms=20)
    card.load(range(NUM_BLOCKS), range(NUM_BLOCKS))
    card.drain()
    device = card.read()
    with card.driver.current():
        kernel.close()
    return all(
        bool(np.all(device[here] == LOADED))
        for block in range(NUM_BLOCKS)
        for here, _ in card.ranges(block)
    )


def barrier_race(card: Card) -> bool:
    """Compute queued after the barrier must see the whole load."""
    card.write(np.full(RACE_BYTES, OLD, dtype=np.uint8))
    card.host[...] = LOADED
    with card.driver.current():
        side = card.driver.alloc_device(RACE_BYTES)
    card.load(range(NUM_BLOCKS), range(NUM_BLOCKS))
    card.engine.order_compute_after_loads()
    seen = np.zeros(RACE_BYTES, dtype=np.uint8)
    with card.driver.current():
        card.driver.copy_async(side, card.device, RACE_BYTES, card.compute)
        card.driver.synchronize_stream(card.compute)
        card.driver.copy_async(seen.ctypes.data, side, RACE_BYTES, card.compute)
        card.driver.synchronize_stream(card.compute)
    card.drain()
    with card.driver.current():
        card.driver.free_device(side)
    return all(
        bool(np.all(seen[here] == LOADED))
        for block in range(NUM_BLOCKS)
        for here, _ in card.ranges(block)
    )


RACES: dict[str, tuple[Callable[[Card], bool], Callable[[Card], int]]] = {
    "store waits for compute": (store_race, lambda card: card.stream(Direction.STORE)),
    "load waits for compute": (load_race, lambda card: card.stream(Direction.LOAD)),
    "compute waits for load": (barrier_race, lambda card: card.compute),
}


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("path", PATHS)
def test_races_are_won_and_lost_without_the_wait(
    path: str, race: str, make_card: Callable[..., Card], driver: LeakyDriver
) -> None:
    run, deaf = RACES[race]
    card = race_card(path, make_card)
    assert all(run(card) for _ in range(3))
    driver.deaf_stream = deaf(card)
    lost = not all(run(card) for _ in range(3))
    driver.deaf_stream = None
    assert lost, "the race was won without the wait: the test proves nothing"


def layers_read(card: Card) -> bool:
    """Each layer is copied away behind its own part; whether all of them had landed by then."""
    slots = list(range(NUM_BLOCKS))
    card.write(np.full(RACE_BYTES, 0xEE, dtype=np.uint8))
    card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
    parts, seen = LayerParts.of(card.layout), np.empty(RACE_BYTES, dtype=np.uint8)
    wanted: Bytes = np.full(RACE_BYTES, 0xEE, dtype=np.uint8)
    with card.driver.current():  # before the load: it takes longer than that
        card.driver.register_host(seen.ctypes.data, seen.nbytes)
    load = card.load(slots, slots, in_parts=True)
    assert card.engine._queues[Direction.LOAD].flush(30.0)
    with card.driver.current():
        for name in dict.fromkeys(name for name, _, _ in card.layout.spans):
            card.engine.order_compute_after_part([load], parts.last_of(card.layout, [name]))
            start = int(name.split()[1]) * (RACE_BYTES - 64) // 8
            size = (RACE_BYTES - 64) // 8
            at = seen.ctypes.data + start
            card.driver.copy_async(at, card.device + start, size, card.compute)
        card.driver.synchronize_stream(card.compute)
        card.driver.unregister_host(seen.ctypes.data)
    card.drain()
    for block in slots:
        for here, there in card.ranges(block):
            wanted[here] = card.host[block, there]
    return bool(np.array_equal(seen[:-64], wanted[:-64]))


@pytest.mark.parametrize("path", PATHS)
def test_compute_that_waits_for_its_part_reads_it(
    path: str, driver: LeakyDriver, make_card: Callable[..., Card]
) -> None:
    card = make_card(path, RACE_BYTES, RACE_LAYOUT)
    layers_read(card)  # kernels are compiled and buffers made before the race starts
    assert all(layers_read(card) for _ in range(3))
    driver.deaf_stream = card.compute
    assert not all(layers_read(card) for _ in range(3)), "nobody waited, and nobody saw it"
    driver.deaf_stream = None
