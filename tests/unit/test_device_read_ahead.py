"""Bytes of a hit that are on their way before its load is ordered: whose they are, and when not.

Seen red, each by a change of one line: the same slots, though another hit has them now, count as
read, or a load in parts takes them; so do bytes that others have used the ring over since; the
ring's slot looks free while it is written; memory goes before the copy has ended; the time of a
load leaves out what was read ahead, or asks for an event that may not be there yet; hits line up on
the link; events are not given back; a load is under way, or streams are to be tried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.kv import make_kv
from tests.fakes.rig import Rig

from kvferry.transfer.engine import gpu as reading_ahead
from kvferry.transfer.job import Direction
from kvferry.transfer.planning.planner import FixedPlanner
from kvferry.types import DEVICE, HOST, SlotArray, Transfer, TransferId, as_slots

BLOCKS = [4, 1, 3]
SLOTS = [2, 5, 6]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    made = rig_of("staged")
    yield made
    made.close()
    assert made.driver.leaks() == {}


def rig_of(store_path: str, page: int = 200) -> Rig:
    """One that has loaded before, so that kernels and the ring are there."""
    rig = Rig(make_kv("layers", num_blocks=6, page=page, seed=3), path="staged", num_slots=9)
    rig.engine._planner = FixedPlanner(store_path, "staged")
    rig.load([0], [0])
    rig.drain_ok()
    return rig


def pin(rig: Rig, slots: list[int] = SLOTS) -> SlotArray:
    pinned = as_slots(slots)
    rig.engine.read_ahead(0, pinned)
    return pinned


def ahead_of(rig: Rig) -> Any:
    return rig.engine._ahead._newest


def load_and_check(rig: Rig, slots: SlotArray, blocks: list[int] = BLOCKS) -> None:
    for block in blocks:
        rig.kv.set_block(block, rig.fresh())
    rig.load(slots, blocks)
    rig.drain_ok()
    for slot, block in zip(slots.tolist(), blocks, strict=True):
        assert rig.kv.block(block) == rig.slot(slot)


@pytest.mark.parametrize("page", [200, 3000])  # all of it fits the ring; a part of it does
def test_a_load_goes_on_from_what_was_read_ahead(page: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("staged", page)
    slots = pin(rig)
    ahead = ahead_of(rig)
    rig.driver.timeline.run_all()
    before = rig.host[SLOTS].copy()
    # It is not read again: these bytes nobody may see any more. (A lease would keep them.)
    num_read = ahead.chunk.end
    flat = rig.host[SLOTS, : rig.kv.layout.block_bytes].reshape(-1)
    flat[:num_read] ^= 0xFF
    rig.host[SLOTS, : rig.kv.layout.block_bytes] = flat.reshape(len(SLOTS), -1)
    rig.load(slots, BLOCKS)
    rig.drain_ok()
    assert ahead.is_used
    for row, block in zip(before, BLOCKS, strict=True):
        assert rig.kv.block(block) == row[: rig.kv.layout.block_bytes].tobytes()
    rig.close()
    assert rig.driver.leaks() == {}


def test_with_what_was_read_ahead_the_next_chunk_is_queued_at_once(monkeypatch: Any) -> None:
    """Else the link would run dry until another thread has had its turn at the interpreter."""
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("staged", 3000)
    path: Any = rig.engine._paths["staged"]
    slots = pin(rig)
    read = ahead_of(rig).chunk.end
    job = rig.engine._jobs.of(Transfer(TransferId(9), HOST, DEVICE, slots, as_slots(BLOCKS)))
    copied: list[int] = []
    copy_in = path._copy_in

    def noting(trip: Any) -> Any:
        copied.append(trip.chunk.end)
        return copy_in(trip)

    monkeypatch.setattr(path, "_copy_in", noting)
    with rig.driver.current():
        pieces = path.pieces(job, rig.stream(Direction.LOAD))
        next(pieces)
        assert copied == [read]
        pieces.close()
    rig.driver.timeline.run_all()
    rig.close()


def test_the_same_slots_of_another_hit_are_read_anew(monkeypatch: Any) -> None:
    """The first hit was let go, and its slots have other blocks now: stored beside the ring."""
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("kernel")
    pin(rig)
    rig.driver.timeline.run_all()
    for block in BLOCKS:
        rig.kv.set_block(block, rig.fresh())
    rig.store(BLOCKS, SLOTS)
    rig.drain_ok()
    load_and_check(rig, as_slots(SLOTS))
    rig.close()


def test_nothing_is_taken_from_a_ring_that_others_have_used_since(rig: Rig) -> None:
    for _ in range(3):  # the ring has several slots
        slots = pin(rig)
        ahead = ahead_of(rig)
        rig.store([0, 2, 5], [0, 1, 3])
        rig.drain_ok()
        load_and_check(rig, slots)
        assert not ahead.is_used


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_store_waits_for_the_slot_that_is_being_read_into(
    is_refused: bool, monkeypatch: Any
) -> None:
    """Also where the driver would not say when that has been read."""
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("staged", 3000)  # goes around the ring
    timeline, outbound = rig.driver.timeline, rig.stream(Direction.STORE)
    inbound = rig.engine._paths["staged"]._ring.inbound  # type: ignore[attr-defined]
    for _ in range(4):
        timeline.frozen, timeline.late = {outbound}, {inbound}
        if is_refused:
            rig.driver.fail("record_event", 2)
        else:
            timeline.frozen.add(inbound)
        for _ in range(1000):  # the card has much else to do
            timeline.put(0, lambda: None)
        pin(rig)
        expected = [rig.kv.block(block) for block in (0, 2, 5)]
        rig.store([0, 2, 5], [0, 1, 3])
        rig.wait_until_queued()
        timeline.run_all()  # gathers, if they may
        timeline.frozen = {outbound}
        timeline.run_all()  # what was read ahead lands
        timeline.frozen = set()
        rig.drain_ok()
        assert [rig.slot(slot) for slot in (0, 1, 3)] == expected
    rig.close()


def test_hits_that_are_let_go_leave_nothing_behind_and_do_not_line_up(rig: Rig) -> None:
    rig.driver.timeline.frozen = {inbound_of(rig)}
    for _ in range(50):
        pin(rig)
    assert len(rig.driver.timeline.streams[inbound_of(rig)].queue) < 10
    rig.driver.timeline.frozen = set()
    for _ in range(50):
        pin(rig)
        rig.driver.timeline.run_all()
    assert len(rig.engine._timing_events._all) <= 8
    load_and_check(rig, as_slots([7, 8, 1]))


def test_loads_that_were_read_ahead_give_their_events_back(rig: Rig) -> None:
    for _ in range(30):
        load_and_check(rig, pin(rig))
    assert len(rig.engine._timing_events._all) <= 8


@pytest.mark.parametrize("page", [200, 3000])
def test_a_load_in_parts_reads_its_parts_itself(page: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("staged", page)
    slots = pin(rig)
    ahead = ahead_of(rig)
    rig.driver.timeline.run_all()
    for block in BLOCKS:
        rig.kv.set_block(block, rig.fresh())
    rig.load(slots, BLOCKS, in_parts=True)
    rig.drain_ok()
    for slot, block in zip(SLOTS, BLOCKS, strict=True):
        assert rig.kv.block(block) == rig.slot(slot)
    assert not ahead.is_used
    rig.close()


def test_memory_goes_only_when_what_was_read_ahead_has_landed(monkeypatch: Any) -> None:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = rig_of("staged")
    ring = rig.engine._paths["staged"]._ring  # type: ignore[attr-defined]
    rig.driver.timeline.late = {ring.inbound}
    pin(rig)
    queue, close, left = rig.driver.timeline.streams[ring.inbound].queue, ring.close, []
    assert queue

    def closing() -> None:
        left.append(len(queue))
        close()

    monkeypatch.setattr(ring, "close", closing)
    rig.close()
    assert left == [0]


def test_its_time_counts_but_not_the_time_nobody_had_ordered_the_rest(rig: Rig) -> None:
    """On a clock of one microsecond for each piece of work, wherever."""
    slots = pin_slowly(rig)
    work(rig, 10_000)  # nobody has ordered it
    rig.load(slots, BLOCKS)
    (receipt,) = rig.drain().values()
    assert 1000e-6 < receipt.seconds < 1200e-6


def test_its_time_counts_though_another_hit_was_looked_up_since(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = pin_slowly(rig)
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 1 << 30)
    pin(rig, [7])
    rig.load(slots, BLOCKS)
    (receipt,) = rig.drain().values()
    assert 1000e-6 < receipt.seconds < 1200e-6


def test_a_load_that_is_ordered_while_it_is_read_counts_no_time_twice(rig: Rig) -> None:
    slots = begin_to_read(rig)
    rig.load(slots, BLOCKS)
    rig.wait_until_queued()
    work(rig, 1000)
    rig.driver.timeline.frozen = set()
    (receipt,) = rig.drain().values()
    assert 1000e-6 < receipt.seconds < 1200e-6


def test_a_load_does_not_ask_for_what_the_card_may_not_have_got_to(rig: Rig) -> None:
    """Its bytes are in the ring, and it may end before anything else on that stream."""
    timeline = rig.driver.timeline
    queue = timeline.streams[inbound_of(rig)].queue
    timeline.frozen = {inbound_of(rig)}
    slots = pin(rig)
    slot = ahead_of(rig).slot
    timeline.frozen = set()
    while not rig.driver._events[slot.copied_in].is_done:
        assert timeline.step()
    timeline.frozen = {inbound_of(rig)} if queue else set()
    rig.load(slots, BLOCKS)
    rig.drain_ok()
    timeline.frozen = set()


def pin_slowly(rig: Rig) -> SlotArray:
    """A hit that takes a millisecond to read."""
    slots = begin_to_read(rig)
    work(rig, 1000)
    rig.driver.timeline.frozen = set()
    rig.driver.timeline.run_all()
    return slots


def begin_to_read(rig: Rig) -> SlotArray:
    """A hit of which the card has come to the beginning, and no further."""
    timeline = rig.driver.timeline
    timeline.frozen = {inbound_of(rig)}
    slots = pin(rig)
    timeline.frozen = set()
    assert timeline.step()
    timeline.frozen = {inbound_of(rig)}
    return slots


def inbound_of(rig: Rig) -> int:
    path: Any = rig.engine._paths["staged"]
    return int(path._ring.inbound)


def work(rig: Rig, amount: int) -> None:
    for _ in range(amount):
        rig.launch(lambda: None)
    rig.driver.timeline.run_all()


@pytest.mark.parametrize(
    "why", ["compute runs", "a load is under way", "small", "scattered", "beside", "a trial is due"]
)
def test_where_there_is_something_better_to_do_nothing_is_read(
    rig: Rig, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = rig.driver.timeline
    if why == "compute runs":
        timeline.frozen = {rig.compute}
        rig.launch(lambda: None)
    elif why == "a load is under way":
        timeline.frozen = {rig.stream(Direction.LOAD)}
        rig.load([3], [0])
        rig.wait_until_queued()
        timeline.run_all()
    elif why == "small":
        monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 1 << 30)
    elif why == "scattered":
        monkeypatch.setattr(reading_ahead, "MOST_RUNS", 2)
    elif why == "a trial is due":
        monkeypatch.setattr(rig.engine._channels, "wants_trial", lambda stream: True)
        monkeypatch.setattr(rig.engine, "_try_out", lambda *_: None)
    else:
        rig.engine._runs_beside = lambda: True
    slots = pin(rig)
    assert ahead_of(rig) is None
    timeline.frozen = set()
    rig.drain_ok()
    load_and_check(rig, slots)


def test_before_the_first_load_there_is_nothing_to_read_into(monkeypatch: Any) -> None:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    rig = Rig(make_kv("layers", num_blocks=6, page=200, seed=3), path="staged", num_slots=9)
    slots = pin(rig)
    assert ahead_of(rig) is None
    load_and_check(rig, slots)
    rig.close()


@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("call", ["record_event", "copy_batch_async", "event_is_done"])
def test_a_driver_that_refuses_costs_nothing_but_the_time(rig: Rig, call: str, nth: int) -> None:
    rig.driver.fail(call, nth)
    slots = pin(rig)
    rig.driver._failures.clear()
    load_and_check(rig, slots)
