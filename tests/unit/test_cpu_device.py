"""The CPU device: blocks through every layout, and the two orderings that keep them right.

The races check themselves: each runs once as it is and once with the engine's wait taken away, and
without the wait the bytes must be wrong, or the test proves nothing.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from tests.fakes.kv import make_kv

from kvferry.cache.slots import as_slots
from kvferry.errors import ClosedError
from kvferry.transfer.engine.cpu import CpuEngine, Stream
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Rank,
    Receipt,
    SlotArray,
    TierName,
    Transfer,
    TransferId,
)

LONG = 10.0
NUM_BLOCKS = 6
NUM_SLOTS = 8


class Rig:
    """KV tensors, host slots and an engine between them."""

    def __init__(self, layout: str = "layers", *, compute: Stream | None = None) -> None:
        self.kv = make_kv(layout, num_blocks=NUM_BLOCKS, page=12)
        self.layout, self.block = self.kv.layout, self.kv.block
        self.host = np.full((NUM_SLOTS, self.layout.block_bytes + 3), 0xEE, np.uint8)
        self.engine = CpuEngine([self.layout], self.host, compute=compute, rank=Rank(1))
        self.count = 0

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for block in range(NUM_BLOCKS):
            self.kv.set_block(block, rng.bytes(self.layout.block_bytes))

    def store(self, blocks: list[int], slots: list[int]) -> Transfer:
        return self.submit(DEVICE, HOST, as_slots(blocks), as_slots(slots))

    def load(self, slots: list[int], blocks: list[int]) -> Transfer:
        return self.submit(HOST, DEVICE, as_slots(slots), as_slots(blocks))

    def submit(
        self, src: TierName, dst: TierName, frm: SlotArray, to: SlotArray, group: int = 0
    ) -> Transfer:
        self.count += 1
        transfer = Transfer(TransferId(self.count), src, dst, frm, to, group)
        self.engine.submit(transfer)
        return transfer


@pytest.fixture(params=["layers", "split", "block-outermost"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    made.fill(1)
    yield made
    made.engine.close()


def test_there_and_back_in_every_layout(rig: Rig) -> None:
    expected = [rig.block(b) for b in range(NUM_BLOCKS)]
    stored = rig.store([4, 0, 2], [7, 1, 3])
    (receipt,) = rig.engine.drain(10)
    assert (receipt.transfer_id, receipt.rank, receipt.outcome) == (stored.id, 1, Outcome.OK)
    assert receipt.num_bytes == 3 * rig.layout.block_bytes
    size = rig.layout.block_bytes
    assert (rig.host[:, size:] == 0xEE).all(), "a slot larger than a block keeps its tail"
    assert (rig.host[[0, 2, 4, 5, 6]] == 0xEE).all()
    rig.fill(2)
    untouched = {b: rig.block(b) for b in (0, 1, 3, 4)}
    rig.load([7, 3], [5, 2])
    (receipt,) = rig.engine.drain(10)
    assert receipt.outcome is Outcome.OK
    assert rig.block(5) == expected[4]
    assert rig.block(2) == expected[2]
    assert {b: rig.block(b) for b in untouched} == untouched


@pytest.mark.parametrize(
    ("src", "dst", "frm", "to", "group", "words"),
    [
        (DEVICE, HOST, [NUM_BLOCKS], [0], 0, str(NUM_BLOCKS)),
        (DEVICE, HOST, [0], [NUM_SLOTS], 0, str(NUM_SLOTS)),
        (HOST, DEVICE, [NUM_SLOTS], [0], 0, str(NUM_SLOTS)),
        (HOST, DEVICE, [0], [NUM_BLOCKS], 0, str(NUM_BLOCKS)),
        (DEVICE, HOST, [-1], [0], 0, "-1"),
        (HOST, DEVICE, [0], [-1], 0, "-1"),
        (DEVICE, HOST, [0], [0], 1, "1 groups, got group 1"),
        (DEVICE, HOST, [0], [0], -1, "got group -1"),
        (DEVICE, TierName("disk"), [0], [0], 0, "from device to disk"),
        (HOST, HOST, [0], [0], 0, "from host to host"),
    ],
)
def test_a_bad_transfer_is_a_failed_receipt_and_moves_nothing(
    rig: Rig, src: TierName, dst: TierName, frm: list[int], to: list[int], group: int, words: str
) -> None:
    device, host = [rig.block(b) for b in range(NUM_BLOCKS)], rig.host.copy()
    rig.submit(src, dst, np.array(frm), np.array(to), group)
    (receipt,) = rig.engine.drain(10)
    assert receipt.outcome is Outcome.FAILED
    assert words in receipt.reason
    assert [rig.block(b) for b in range(NUM_BLOCKS)] == device
    assert (rig.host == host).all()
    rig.store([0], [0])
    assert rig.engine.drain(10)[0].outcome is Outcome.OK, "the threads outlive the fault"


def test_closing_finishes_the_work_and_use_after_is_refused(rig: Rig) -> None:
    for block in range(4):
        rig.store([block], [block])
    rig.engine.close()
    rig.engine.close()
    assert len(rig.engine.poll()) == 4
    assert rig.engine.drain(1) == []
    with pytest.raises(ClosedError, match="engine is closed"):
        rig.store([0], [0])


@pytest.fixture
def compute() -> Iterator[Stream]:
    stream = Stream("compute")
    yield stream
    stream.close()


def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The break: streams that wait for nothing."""
    monkeypatch.setattr(Stream, "wait", lambda self, event: None)


def store_after_slow_compute(compute: Stream, patience: float) -> bool:
    """Compute writes block 0 late; was the store right to read it when it did?"""
    rig = Rig(compute=compute)
    gate = threading.Event()

    def work() -> None:
        assert gate.wait(60)
        rig.fill(3)

    compute.run(work)
    rig.store([0], [0])
    rig.engine.drain(patience)
    gate.set()
    compute.synchronize()
    rig.engine.close()
    return rig.host[0, : rig.layout.block_bytes].tobytes() == rig.block(0)


def load_after_slow_reader(compute: Stream, patience: float) -> bool:
    """Compute still reads block 0 of another request; does it see what was there?"""
    rig = Rig(compute=compute)
    rig.fill(4)
    before = rig.block(0)
    seen: list[bytes] = []
    gate = threading.Event()

    def work() -> None:
        assert gate.wait(60)
        seen.append(rig.block(0))

    compute.run(work)
    rig.load([0], [0])
    rig.engine.drain(patience)
    gate.set()
    compute.synchronize()
    rig.engine.close()
    assert rig.block(0) != before, "the load did happen"
    return seen == [before]


def reader_after_slow_load(compute: Stream, patience: float) -> bool:
    """Compute queued after a load reads its block; does it see the loaded bytes?"""
    rig = Rig(compute=compute)
    gate = threading.Event()
    rig.engine._loads.run(lambda: gate.wait(60))
    seen: list[bytes] = []
    rig.load([0], [0])
    rig.engine.order_compute_after_loads()
    compute.run(lambda: seen.append(rig.block(0)))
    marker = compute.record()
    marker.synchronize(patience)
    gate.set()
    compute.synchronize()
    rig.engine.close()
    return seen == [rig.host[0, : rig.layout.block_bytes].tobytes()]


@pytest.mark.parametrize(
    "race", [store_after_slow_compute, load_after_slow_reader, reader_after_slow_load]
)
def test_ordering_and_that_it_is_needed(
    race, compute: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert race(compute, 0.1)  # a copy that waits as it should waits through all of it
    unordered(monkeypatch)
    assert not race(compute, 30.0), "without the wait this must go wrong, or it proves nothing"


# -- streams -----------------------------------------------------------------------------------


def test_a_stream_keeps_order_and_its_faults(compute: Stream) -> None:
    done: list[int] = []
    for number in range(50):
        compute.run(partial(done.append, number))
    compute.synchronize()
    assert done == list(range(50))
    compute.run(lambda: 1 / 0)
    compute.run(lambda: done.append(50))
    with pytest.raises(ZeroDivisionError):
        compute.synchronize()
    assert done[-1] == 50, "work after a fault is done all the same"
    compute.synchronize()


def interrupts(call: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """``call``, interrupted at each place where CPython lets a signal's handler run.

    Those are after calls and jumps back, in all that ``call`` calls. Ends when there is none left.
    """
    for number in itertools.count():
        left = number

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            frame.f_trace_opcodes = frame.f_code.co_filename != __file__
            if event == "opcode" and frame.f_lasti in _after_checks(frame.f_code):
                if not left:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                left -= 1
            return trace

        def interrupted() -> bool:
            sys.settrace(trace)
            try:
                call()
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(None)
            return False

        yield interrupted
        if left:
            return


@functools.cache
def _after_checks(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a pending interrupt is raised."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairs
        if before.opname.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
    )


@pytest.mark.parametrize("verb", ["poll", "drain", "wait_for_end", "submit"])
def test_an_interrupt_anywhere_in_a_call_hangs_nothing_and_loses_no_receipt(verb: str) -> None:
    rig = Rig()
    calls: dict[str, Callable[[], object]] = {
        "poll": lambda: received.extend(rig.engine.poll()),
        "drain": lambda: received.extend(rig.engine.drain(LONG)),
        "wait_for_end": lambda: rig.engine.wait_for_end(LONG),
        "submit": lambda: rig.store([4], [5]),
    }
    received: list[Receipt] = []
    num_interrupts = 0
    for interrupted in interrupts(calls[verb]):
        received.clear()
        sent = [rig.store([1], [2]).id, rig.load([2], [3]).id]
        num_interrupts += interrupted()
        rest = threading.Thread(target=calls["drain"], daemon=True)
        rest.start()
        rest.join(LONG)
        assert not rest.is_alive(), "the engine hangs"
        arrived = [receipt.transfer_id for receipt in received]
        assert len(set(arrived)) == len(arrived)
        # Between the end of its poll and its own, drain alone may lose them, as its caller may.
        assert set(sent) <= set(arrived) or (verb == "drain" and not arrived)
    assert num_interrupts > 3
    rig.engine.close()
