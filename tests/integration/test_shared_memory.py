"""One pool for several ranks, with real processes: stored once, loaded by each."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
from tests.fakes.by_name import ByName
from tests.fakes.crafted_keys import key

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.core.keys import Keys
from kvferry.core.quantities import MiB
from kvferry.errors import ConfigError, InputError
from kvferry.hostmem.memory import HostMemory
from kvferry.hostmem.slots import SharedHandle, SharedMemory, SlotLayout
from kvferry.rank import slot_layout
from kvferry.tiers.movers import SharedMover
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.transfer.layout import describe
from kvferry.types import DEVICE, HOST, Plan, Rank, Receipt
from kvferry.worker import Worker

RANKS = 2
BLOCKS, LAYERS, BLOCK_BYTES = 32, 3, 4096
POOL_BYTES = 4 * MiB
SLOTS = SlotLayout.of([4096])


def kv_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8) for _ in range(LAYERS)]


class RankProcess:
    """One rank: its copy of the KV, the shared host memory, a worker."""

    def __init__(self, rank: int, kv: list[np.ndarray], asked: int | SharedHandle) -> None:
        self.kv = kv
        layout = describe(kv, block_axis=0)
        slots = slot_layout((layout,))
        if isinstance(asked, int):
            self.shared = SharedMemory.create(asked, slots)
        else:
            self.shared = SharedMemory.open(asked, slots)
        self.host = HostMemory(0, layout.block_bytes, shared=self.shared)
        engine = CpuEngine((layout,), self.host.tier.rows, rank=Rank(rank))
        mover = SharedMover(engine, rank=Rank(rank), num_ranks=RANKS)
        self.worker = Worker({(DEVICE, HOST): mover, (HOST, DEVICE): mover}, rank=Rank(rank))

    def execute(self, plan: Plan) -> list[Receipt]:
        self.worker.execute(plan)
        return self.worker.drain(60)

    def close(self) -> None:
        self.worker.close()
        self.host.close()


def other_rank(handle: SharedHandle, link: Connection) -> None:
    """A rank whose device loses its KV after the store: it gets it back from the host."""
    me = RankProcess(1, kv_of(0), handle)
    me.host.wait(60)
    link.send(me.host.ready_slots)
    while (plan := link.recv()) is not None:
        if any(transfer.dst == DEVICE for transfer in plan.transfers):
            for layer in me.kv:
                layer[:] = 0
        receipts = me.execute(plan)
        link.send((receipts, [layer.copy() for layer in me.kv]))
    me.close()
    link.close()


def test_two_processes_store_once_and_both_load() -> None:
    first = RankProcess(0, kv_of(0), POOL_BYTES)
    methods = multiprocessing.get_context("spawn")
    ours, theirs = methods.Pipe()
    process = methods.Process(target=other_rank, args=(first.shared.handle, theirs))
    process.start()
    try:
        scheduler = ByName(
            Pool(first.host.num_slots, num_ready=0), [FullAttention(16)], num_ranks=RANKS
        )
        first.host.wait(60)
        scheduler.note_ready(Rank(0), first.host.ready_slots)
        assert scheduler.pool.num_free == 0  # the other rank has not said so yet
        assert ours.poll(60)
        scheduler.note_ready(Rank(1), ours.recv())
        assert scheduler.pool.num_free == first.host.num_slots

        keys = Keys.from_bytes([key(number) for number in range(BLOCKS - 1)])
        table = np.arange(BLOCKS - 1)
        scheduler.store("a", keys, (table,), len(keys) * 16)
        plan = scheduler.plan()
        ours.send(plan)
        mine = first.execute(plan)
        assert ours.poll(60)
        theirs_done, _ = ours.recv()
        settled = scheduler.settle([*mine, *theirs_done])
        assert not any(landing.reason for landing in settled.landed)
        moved = sum(receipt.num_bytes for receipt in [*mine, *theirs_done])
        assert moved == len(keys) * LAYERS * BLOCK_BYTES, "a block was stored twice"
        assert min(r.num_bytes for r in [*mine, *theirs_done]) > 0, "one rank did it all"

        scheduler.finish("a")
        scheduler.match("b", keys)
        scheduler.load("b", (table,))
        plan = scheduler.plan()
        for layer in first.kv:
            layer[:] = 0
        ours.send(plan)
        mine = first.execute(plan)
        assert ours.poll(60)
        theirs_done, their_kv = ours.recv()
        assert scheduler.settle([*mine, *theirs_done]).loaded == ("b",)
        for wanted, here, there in zip(kv_of(0), first.kv, their_kv, strict=True):
            assert np.array_equal(here[table], wanted[table])
            assert np.array_equal(there[table], wanted[table])
        scheduler.close()
    finally:
        ours.send(None)
        process.join(60)
        first.close()
    assert process.exitcode == 0


def test_a_handle_of_a_process_that_is_gone_is_refused() -> None:
    memory = SharedMemory.create(MiB, SLOTS)
    handle = memory.handle
    memory.close()
    memory.close()
    with pytest.raises(InputError, match="no other rank can open it"):
        _ = memory.handle
    with pytest.raises(ConfigError, match=r"must still run|is not the shared host memory"):
        SharedMemory.open(handle, SLOTS)


def test_a_file_number_given_to_another_file_is_not_taken_for_ours() -> None:
    memory, other = SharedMemory.create(MiB, SLOTS), SharedMemory.create(MiB, SLOTS)
    handle = memory.handle
    wrong = replace(handle, fd=other.handle.fd)
    with pytest.raises(ConfigError, match="is not the shared host memory it was"):
        SharedMemory.open(wrong, SLOTS)
    memory.close()
    other.close()


def test_no_process_can_cut_the_memory_short() -> None:
    """A page of it that is gone is a SIGBUS in every rank that touches it."""
    memory = SharedMemory.create(MiB, SLOTS)
    again = SharedMemory.open(memory.handle, SLOTS)
    path = f"/proc/{os.getpid()}/fd/{memory.handle.fd}"
    for cut in (0, MiB - 4096, 2 * MiB):
        with pytest.raises(PermissionError):
            os.truncate(path, cut)
    memory.bytes[:] = 3
    assert (again.bytes == 3).all()
    memory.close()
    again.close()


def test_ranks_whose_blocks_lie_otherwise_do_not_come_into_service() -> None:
    shared = SharedMemory.create(POOL_BYTES, SLOTS)
    first = HostMemory(0, 4096, shared=shared)
    with pytest.raises(ConfigError, match=r"blocks of 4096 bytes.*blocks of 4160 bytes"):
        SharedMemory.open(shared.handle, SlotLayout.of([4160]))
    others = [SlotLayout.of([4096, 64]), SlotLayout.of([4096], ["k v"]), replace(SLOTS, pitch=8192)]
    for slots in others:
        with pytest.raises(ConfigError) as error:
            SharedMemory.open(shared.handle, slots)
        assert str(SLOTS) in str(error.value)
        assert str(slots) in str(error.value)
    with pytest.raises(ConfigError, match=r"blocks of 4096 bytes.*have 4160 bytes"):
        HostMemory(0, 4160, shared=SharedMemory.open(shared.handle, SLOTS))
    first.close()


def test_a_memory_that_could_be_cut_short_is_not_taken() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, MiB)
    found = os.fstat(fd)
    handle = SharedHandle(os.getpid(), fd, found.st_dev, found.st_ino, MiB, SLOTS)
    with pytest.raises(ConfigError, match="is not the shared host memory"):
        SharedMemory.open(handle, SLOTS)
    os.close(fd)
