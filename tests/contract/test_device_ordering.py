"""The ordering proof: with each wait in place bytes are right, with any one dropped they are not.

Each scenario runs on a device that lets one side run as late, or as early, as the rules allow. A
mutant is the same engine on a driver that quietly drops one promise. The right engine must pass
every scenario under every seed; a mutant must be caught, or the scenario proves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import PATHS, Rig

from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.direct import DmaPath

SEEDS = range(12)


class GatedPath(DmaPath):
    """Takes as long to enqueue as the test likes."""

    def __init__(self, driver: Driver, gate: threading.Event) -> None:
        super().__init__(driver)
        self.gate = gate

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        assert self.gate.wait(60.0)
        super().enqueue(job, stream, ready)


class Mutant(FakeDriver):
    """A driver that can be told to drop a promise; by itself it keeps them all."""

    deaf: frozenset[int] = frozenset()
    """Streams that do not wait for what was recorded on the ``ignored`` ones; all, if empty."""
    ignored: frozenset[int] = frozenset()
    hasty = False

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        self.recorded_on[event] = stream

    def stream_wait_event(self, stream: int, event: int) -> None:
        is_deaf = bool(self.deaf | self.ignored)
        if self.deaf and stream not in self.deaf:
            is_deaf = False
        if self.ignored and self.recorded_on.get(event) not in self.ignored:
            is_deaf = False
        if not is_deaf:
            super().stream_wait_event(stream, event)

    @cached_property
    def recorded_on(self) -> dict[int, int]:
        return {}

    def event_is_done(self, event: int) -> bool:
        return self.hasty or super().event_is_done(event)


def right(rig: Rig, driver: Mutant) -> None:
    pass


def store_does_not_wait(rig: Rig, driver: Mutant) -> None:
    driver.deaf = frozenset({rig.stream(Direction.STORE)})


def load_does_not_wait(rig: Rig, driver: Mutant) -> None:
    driver.deaf = frozenset({rig.stream(Direction.LOAD)})


def compute_does_not_wait(rig: Rig, driver: Mutant) -> None:
    driver.deaf = frozenset({rig.compute})


def slot_streams(rig: Rig) -> set[int]:
    """The streams on which gathers run."""
    ring = rig.ring()
    return rig.ring_streams() - {ring.id_stream}


def kernels_do_not_wait_for_compute(rig: Rig, driver: Mutant) -> None:
    driver.deaf = frozenset(slot_streams(rig))
    driver.ignored = frozenset({rig.compute})


def nobody_waits_for_ids(rig: Rig, driver: Mutant) -> None:
    driver.ignored = frozenset({rig.ring().id_stream})


def nobody_waits_for_kernels(rig: Rig, driver: Mutant) -> None:
    driver.ignored = frozenset(slot_streams(rig))


def nobody_waits_for_a_free_slot(rig: Rig, driver: Mutant) -> None:
    path: Any = rig.engine._queues[Direction.STORE].path
    path._wait_until_free = lambda slot: None


def receipts_do_not_wait(rig: Rig, driver: Mutant) -> None:
    driver.hasty = True


def batches_read_early(rig: Rig, driver: Mutant) -> None:
    driver.reads_early = True


def store_after_compute_wrote(rig: Rig) -> bool:
    """Compute queued before the store writes the block; the slot must hold what it wrote."""
    wrote = [rig.fresh(), rig.fresh()]
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: rig.kv.set_block(3, wrote[0]))
    rig.launch(lambda: rig.kv.set_block(1, wrote[1]))
    rig.store([3, 1], [5, 8])
    rig.wait_until_queued()
    rig.driver.timeline.run_all()  # everything that does not wait for compute
    rig.driver.timeline.frozen = set()
    rig.drain()
    return [rig.slot(5), rig.slot(8)] == wrote


def load_after_compute_read(rig: Rig) -> bool:
    """Compute queued before the load still reads the block's old bytes, then clears it."""
    before, seen = rig.kv.block(2), []
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: seen.append(rig.kv.block(2)))
    rig.launch(lambda: rig.kv.set_block(2, bytes(rig.kv.layout.block_bytes)))
    rig.load([4], [2])
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    rig.driver.timeline.frozen = set()
    rig.drain()
    rig.driver.timeline.run_all()
    return seen == [before] and rig.kv.block(2) == rig.slot(4)


def compute_after_load(rig: Rig) -> bool:
    """Compute queued after the barrier reads what the load brought."""
    seen: list[bytes] = []
    rig.driver.timeline.frozen = {rig.stream(Direction.LOAD)}
    rig.load([4], [2])
    rig.engine.order_compute_after_loads()
    rig.launch(lambda: seen.append(rig.kv.block(2)))
    rig.driver.timeline.run_all()
    rig.driver.timeline.frozen = set()
    rig.drain()
    rig.driver.timeline.run_all()
    return seen == [rig.slot(4)]


def receipt_after_bytes(rig: Rig) -> bool:
    """When the receipt is there, so are the bytes, and both sides may be reused at once."""
    wrote = rig.fresh()
    rig.driver.timeline.late = {rig.compute}
    rig.launch(lambda: rig.kv.set_block(3, wrote))
    rig.store([3], [5])
    rig.drain()
    stored = rig.slot(5)
    rig.kv.set_block(3, rig.fresh())  # the block goes to another request
    rig.load([5], [1])
    rig.drain()
    loaded = rig.kv.block(1)
    rig.host[5] = 0  # the slot too
    rig.driver.timeline.run_all()
    return stored == loaded == wrote == rig.kv.block(1)


def store_from_an_idle_card(rig: Rig) -> bool:
    """Nothing runs, so nothing but its own steps holds the store's copies back."""
    rig.store([3, 1], [5, 8])
    rig.drain()
    return [rig.slot(5), rig.slot(8)] == [rig.kv.block(3), rig.kv.block(1)]


def stores_behind_each_other(rig: Rig) -> bool:
    """Compute goes on writing between two stores: each must find what was written before it."""
    wrote = [rig.fresh(), rig.fresh()]
    rig.driver.timeline.frozen = {rig.compute}
    for block, slot, content in ((3, 5, wrote[0]), (1, 8, wrote[1])):
        rig.launch(partial(rig.kv.set_block, block, content))
        rig.store([block], [slot])
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    rig.driver.timeline.frozen = set()
    rig.drain()
    return [rig.slot(5), rig.slot(8)] == wrote


def load_of_all(rig: Rig) -> bool:
    """A load so large that it takes many copies: its receipt speaks for all of them."""
    slots = list(range(rig.kv.layout.num_blocks))
    for block in slots:
        rig.kv.set_block(block, b"\xee" * rig.kv.layout.block_bytes)
    rig.load(slots, slots)
    rig.drain()
    return [rig.kv.block(block) for block in slots] == [rig.slot(slot) for slot in slots]


def store_around_the_ring(rig: Rig) -> bool:
    """Copies to host run late: a slot must not be filled again before its bytes have left it."""
    rig.driver.timeline.late = {rig.stream(Direction.STORE)}
    blocks = list(range(rig.kv.layout.num_blocks))
    rig.store(blocks, blocks)
    rig.drain()
    return [rig.slot(slot) for slot in blocks] == [rig.kv.block(block) for block in blocks]


def stores_whose_ids_are_late(rig: Rig) -> bool:
    """Which blocks they take comes by a stream of its own: last time's must not do."""
    half = rig.kv.layout.num_blocks // 2
    for count in (half, 1):  # through many slots of the ring, and through one
        before, now = list(range(count)), list(range(half, half + count))
        rig.store(before, before)
        rig.drain()
        if rig.path == "kernels":
            rig.driver.timeline.frozen = {rig.ring().id_stream}
        rig.store(now, now)
        rig.wait_until_queued()
        rig.driver.timeline.run_all()  # everything that does not wait for the ids
        rig.driver.timeline.frozen = set()
        rig.drain()
        if any(rig.slot(block) != rig.kv.block(block) for block in now):
            return False
    return True


Scenario = Callable[[Rig], bool]
AROUND: tuple[Scenario, ...] = (load_of_all, store_around_the_ring, stores_whose_ids_are_late)
"""Those whose jobs are larger than the ring."""
SCENARIOS: list[Scenario] = [
    store_after_compute_wrote,
    load_after_compute_read,
    compute_after_load,
    receipt_after_bytes,
    store_from_an_idle_card,
    stores_behind_each_other,
    *AROUND,
]
KERNELS = ("kernels",)
CAUGHT: list[tuple[Callable[[Rig, Mutant], None], Scenario, tuple[str, ...]]] = [
    (store_does_not_wait, store_after_compute_wrote, tuple(PATHS)),
    (load_does_not_wait, load_after_compute_read, tuple(PATHS)),
    (compute_does_not_wait, compute_after_load, tuple(PATHS)),
    (receipts_do_not_wait, receipt_after_bytes, tuple(PATHS)),
    (batches_read_early, store_after_compute_wrote, ("dma", "kernels")),
    (kernels_do_not_wait_for_compute, stores_behind_each_other, KERNELS),
    (nobody_waits_for_kernels, store_from_an_idle_card, KERNELS),
    (nobody_waits_for_a_free_slot, store_around_the_ring, KERNELS),
    (nobody_waits_for_ids, stores_whose_ids_are_late, KERNELS),
]


def outcome(
    scenario: Scenario, mutate: Callable[[Rig, Mutant], None], path: str, seed: int
) -> bool:
    driver = Mutant(seed=seed)
    kv = make_kv("split", page=1024 if scenario in AROUND else 48, seed=seed)
    rig = Rig(kv, path=path, driver=driver, seed=seed)
    mutate(rig, driver)
    good = scenario(rig)
    driver.hasty = False
    rig.close()
    assert driver.leaks() == {}
    return good


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_the_engine_is_right_however_late_the_other_side_runs(
    scenario: Scenario, path: str
) -> None:
    assert all(outcome(scenario, right, path, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("mutate", "scenario", "path"),
    [(mutate, scenario, path) for mutate, scenario, paths in CAUGHT for path in paths],
    ids=name_of,
)
def test_dropping_one_promise_corrupts_and_is_seen(
    mutate: Callable[[Rig, Mutant], None], scenario: Scenario, path: str
) -> None:
    assert not all(outcome(scenario, mutate, path, seed) for seed in SEEDS)


def test_a_copy_does_not_wait_for_compute_queued_after_it() -> None:
    """Its place behind compute is fixed at submit, not when the engine's thread gets to it."""
    gate = threading.Event()
    rig = Rig(path=lambda driver: dict.fromkeys(Direction, GatedPath(driver, gate)))
    rig.store([1], [1])
    rig.driver.timeline.run_all()
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: None)  # never runs; a copy ordered behind it would never end
    gate.set()
    rig.drain_ok()
    rig.driver.timeline.frozen = set()
