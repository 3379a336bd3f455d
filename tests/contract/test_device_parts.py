"""Loads that land layer after layer: the bytes, their order, and who may read which of them when.

As in the ordering proof, a mutant drops one promise and must be caught: compute that does not wait
for its part, compute that waits for the part before, a mark that comes before its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.contract.test_device_ordering import Mutant, compute_does_not_wait
from tests.fakes.kv import LAYOUTS, Kv, make_kv
from tests.fakes.rig import INTERPRETED, LONG, PATHS, Rig

from kvferry.cache.slots import as_slots
from kvferry.transfer.engine.copy_queue import CopyQueue, PendingCopy
from kvferry.transfer.engine.cpu import CpuEngine, Stream
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.types import DEVICE, HOST, Outcome, Transfer, TransferId

SEEDS = range(12)
ALL = (*PATHS, *INTERPRETED)
SLOTS = {
    "neighbours": [2, 3, 4, 5, 6, 7],
    "scattered": [7, 1, 4, 8, 0, 5],
    "in two stretches": [5, 6, 7, 8, 1, 2, 3],
}


def names_of(layout: GroupLayout) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in layout.spans))


def bytes_of(layout: GroupLayout, name: str, block: bytes) -> bytes:
    """What a tensor has of a block."""
    return b"".join(block[start:end] for owner, start, end in layout.spans if owner == name)


@pytest.mark.parametrize("num_parts", [1, 2, 4, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_the_block_and_never_cut_a_tensor(layout: str, num_parts: int) -> None:
    whole = make_kv(layout, page=48).layout
    parts = LayerParts.of(whole, num_parts)
    assert 1 <= len(parts) <= num_parts
    assert parts.parts[0].start == 0
    ends = [part.start + part.layout.block_bytes for part in parts.parts]
    assert ends[-1] == whole.block_bytes
    assert [part.start for part in parts.parts[1:]] == ends[:-1]
    for name, _, end in whole.spans:
        landed = parts.last_of(whole, [name])
        assert end <= ends[landed]
    assert parts.last_of(whole, names_of(whole)) == len(parts) - 1
    assert parts.last_of(whole, ["nobody's"]) == len(parts) - 1


def test_the_last_part_is_the_shortest() -> None:
    tensors = 28
    spans = tuple((f"layer{n}", 10 * n, 10 * n + 10) for n in range(tensors))
    sizes = np.full(tensors, 10)
    layout = GroupLayout(np.arange(tensors) * 1000, sizes, sizes, 3, spans=spans)
    assert [part.layout.num_segments for part in LayerParts.of(layout, 4).parts] == [8, 8, 8, 4]
    assert [part.layout.num_segments for part in LayerParts.of(layout, 3).parts] == [11, 11, 6]


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ALL)
def test_a_load_in_parts_brings_the_same_bytes(path: str, layout: str, slots: list[int]) -> None:
    rig = Rig(make_kv(layout, page=513, seed=3), path=path, seed=3)
    host, blocks = rig.host.copy(), list(range(len(slots)))[::-1]
    for slot, block in zip(slots, blocks, strict=True):
        rig.kv.set_block(block, rig.slot(slot))
    expected = rig.kv.snapshot()
    for block in blocks:
        rig.kv.set_block(block, b"\xee" * rig.kv.layout.block_bytes)  # poison
    rig.load(slots, blocks, in_parts=True)
    rig.drain_ok()
    assert rig.kv.snapshot() == expected
    assert np.array_equal(rig.host, host)


Order = Callable[[Rig, TransferId, int], None]


def in_order(rig: Rig, load: TransferId, part: int) -> None:
    rig.engine.order_compute_after_part([load], part)


def for_the_part_before(rig: Rig, load: TransferId, part: int) -> None:
    rig.engine.order_compute_after_part([load], max(0, part - 1))


def layers_read(rig: Rig, order: Order) -> bool:
    """Compute reads layer after layer, each behind its own part; returns whether all were right."""
    layout, blocks = rig.kv.layout, list(range(6))
    parts = LayerParts.of(layout)
    late = {rig.stream(Direction.LOAD)}
    rig.driver.timeline.frozen = rig.driver.timeline.late = late
    for block in blocks:
        rig.kv.set_block(block, b"\xee" * layout.block_bytes)
    load = rig.load([block + 2 for block in blocks], blocks, in_parts=True)
    rig.wait_until_queued()
    assert rig.engine.num_landed(load) is not None
    seen: dict[str, list[bytes]] = {}

    def read(name: str) -> None:
        seen[name] = [bytes_of(layout, name, rig.kv.block(block)) for block in blocks]

    for name in names_of(layout):
        order(rig, load, parts.last_of(layout, [name]))
        rig.launch(lambda name=name: read(name))  # type: ignore[misc]
    rig.driver.timeline.run_all()  # everything that does not wait for the load
    rig.driver.timeline.frozen = set()
    rig.driver.timeline.run_all()  # the load, and what waits for a part of it as soon as it may
    rig.drain()
    return all(
        seen[name] == [bytes_of(layout, name, rig.slot(block + 2)) for block in blocks]
        for name in names_of(layout)
    )


def outcomes(
    path: str,
    order: Order = in_order,
    mutate: Callable[[Rig, Mutant], None] = lambda rig, driver: None,
) -> list[bool]:
    found = []
    for seed in SEEDS:
        driver = Mutant(seed=seed)
        rig = Rig(make_kv("layers", page=200, seed=seed), path=path, driver=driver, seed=seed)
        mutate(rig, driver)
        found.append(layers_read(rig, order))
        rig.close()
        assert driver.leaks() == {}
    return found


@pytest.mark.parametrize("path", PATHS)
def test_compute_that_waits_for_its_part_reads_it_and_no_other_does(path: str) -> None:
    assert all(outcomes(path))
    assert not all(outcomes(path, mutate=compute_does_not_wait))
    assert not all(outcomes(path, order=for_the_part_before))


@pytest.mark.parametrize("path", PATHS)
def test_a_mark_before_its_part_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(queue: CopyQueue, copy: PendingCopy) -> None:
        assert copy.ready is not None
        queue._driver.stream_wait_event(queue.stream, copy.ready)
        for part in copy.job.parts():
            copy.marks.append(queue._order_events.take())
            queue._driver.record_event(copy.marks[-1], queue.stream)
            queue.path.enqueue(part, queue.stream, copy.ready)

    monkeypatch.setattr(CopyQueue, "_enqueue", hasty)
    assert not all(outcomes(path))


@pytest.mark.parametrize("path", PATHS)
def test_the_first_layer_does_not_wait_for_the_last(path: str) -> None:
    """That is what it is for: somewhere the first layer is read before all of it has landed."""
    left = []
    for seed in SEEDS:
        rig = Rig(make_kv("layers", page=200, seed=seed), path=path, seed=seed)
        timeline = rig.driver.timeline
        timeline.frozen = timeline.late = {rig.stream(Direction.LOAD)}
        load = rig.load([2, 3, 4, 5], [0, 1, 2, 3], in_parts=True)
        rig.wait_until_queued()
        rig.engine.order_compute_after_part([load], 0)
        seen: list[int | None] = []
        rig.launch(lambda: seen.append(1))  # noqa: B023
        timeline.frozen = set()
        timeline.run_until(lambda: bool(seen))  # noqa: B023
        landed = rig.engine.num_landed(load)
        left.append(landed is not None and landed < len(LayerParts.of(rig.kv.layout)))
        rig.drain_ok()
        rig.close()
    assert any(left)


@pytest.mark.parametrize("path", PATHS)
def test_a_load_counts_as_landing_only_when_all_of_it_is_queued(path: str) -> None:
    """Whatever is refused while it is queued: it never looks as if it would land."""
    for nth in range(1, 40):
        rig = Rig(make_kv("layers", page=200, seed=nth), path=path, seed=nth)
        rig.driver.fail_at(len(rig.driver.calls) + nth)
        load = rig.load([2, 3, 4, 5], [0, 1, 2, 3], in_parts=True)
        rig.wait_until_queued()
        rig.driver._fail_at.clear()
        landed = rig.engine.num_landed(load)
        receipt = rig.drain()[load]
        if landed is not None:
            assert receipt.outcome is Outcome.OK, receipt.reason
        assert rig.engine.num_landed(load) is None
        rig.close()


def test_a_driver_that_will_not_say_is_not_counted_on() -> None:
    rig = Rig(path="dma")
    load = rig.load([4], [2], in_parts=True)
    rig.wait_until_queued()
    rig.driver.fail("event_is_done")
    assert rig.engine.num_landed(load) is None
    assert rig.engine.num_landed(load) is not None
    rig.drain_ok()


def test_a_load_that_is_over_delays_no_compute() -> None:
    rig = Rig(path="dma")
    load = rig.load([4], [2], in_parts=True)
    rig.drain_ok()
    before = rig.driver.calls.count("stream_wait_event")
    rig.engine.order_compute_after_part([load, TransferId(99)], 0)
    assert rig.driver.calls.count("stream_wait_event") == before


def cpu_engine(kv: Kv, compute: Stream | None) -> tuple[CpuEngine, Any]:
    host = np.random.default_rng(5).integers(0, 256, (9, kv.layout.block_bytes), dtype=np.uint8)
    return CpuEngine([kv.layout], host, compute=compute), host


def cpu_load(engine: CpuEngine, slots: Sequence[int], blocks: Sequence[int]) -> TransferId:
    load = TransferId(7)
    engine.submit(Transfer(load, HOST, DEVICE, as_slots(slots), as_slots(blocks), in_parts=True))
    return load


@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_cpu_each_layer_is_there_when_its_part_is(layout: str, has_stream: bool) -> None:
    kv = make_kv(layout, page=64, seed=6)
    compute = Stream("compute") if has_stream else None
    engine, host = cpu_engine(kv, compute)
    for block in range(6):
        kv.set_block(block, b"\xee" * kv.layout.block_bytes)
    load = cpu_load(engine, [2, 3, 4, 8, 0, 5], range(6))
    assert engine.num_landed(load) is not None
    parts, seen = LayerParts.of(kv.layout), {}
    for name in names_of(kv.layout):
        engine.order_compute_after_part([load], parts.last_of(kv.layout, [name]))

        def read(name: str = name) -> None:
            seen[name] = [bytes_of(kv.layout, name, kv.block(block)) for block in range(6)]

        compute.run(read) if compute is not None else read()
    if compute is not None:
        compute.synchronize()
    (receipt,) = engine.drain(LONG)
    assert receipt.outcome is Outcome.OK
    assert receipt.num_bytes == 6 * kv.layout.block_bytes
    slots = [host[slot].tobytes() for slot in (2, 3, 4, 8, 0, 5)]
    for name, found in seen.items():
        assert found == [bytes_of(kv.layout, name, slot) for slot in slots]
    assert engine.num_landed(load) is None
    engine.close()
    if compute is not None:
        compute.close()


def test_on_a_cpu_what_cannot_be_loaded_fails_at_once() -> None:
    engine, _ = cpu_engine(make_kv("layers"), None)
    load = cpu_load(engine, [20], [0])
    assert engine.num_landed(load) is None
    (receipt,) = engine.poll()
    assert receipt.outcome is Outcome.FAILED
    assert "host slot" in receipt.reason
    engine.close()
