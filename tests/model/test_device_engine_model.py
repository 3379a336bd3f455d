"""Random orders, faults and interleavings against a plain model of what must be where."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.fakes.kv import LAYOUTS, make_kv
from tests.fakes.rig import LONG, PATHS, Rig

from kvferry.errors import DriverError
from kvferry.transfer.job import Direction
from kvferry.types import Outcome, Receipt, TransferId

NUM_BLOCKS, NUM_SLOTS = 5, 6
PAGES = [5, 6000]  # three blocks of the larger ones go around the ring
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=3, unique=True)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=3, max_size=3, unique=True)

INJECTED = (
    "copy_async",
    "copy_batch_async",
    "record_event",
    "stream_wait_event",
    "event_is_done",
    "create_event",
    "current",
    "elapsed_seconds",
)


class EngineMachine(RuleBasedStateMachine):
    """Keeps the rules a scheduler keeps: nobody touches a block or slot with a copy in flight.

    ``blocks`` and ``slots`` hold what each must contain; None where a failed copy left it unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig | None = None

    @initialize(
        path=st.sampled_from(sorted(PATHS)),
        layout=st.sampled_from(sorted(LAYOUTS)),
        page=st.sampled_from(PAGES),
        seed=st.integers(0, 1000),
    )
    def open(self, path: str, layout: str, page: int, seed: int) -> None:
        self.begin(path, layout, page, seed)

    def begin(self, path: str, layout: str, page: int, seed: int) -> None:
        kv = make_kv(layout, num_blocks=NUM_BLOCKS, page=page, seed=seed)
        self.rig = rig = Rig(kv, path=path, num_slots=NUM_SLOTS, seed=seed, patience=30.0)
        self.blocks: list[bytes | None] = [rig.kv.block(b) for b in range(NUM_BLOCKS)]
        self.slots: list[bytes | None] = [rig.slot(s) for s in range(NUM_SLOTS)]
        # Transfer -> which table it writes, and the pairs of (destination, expected bytes).
        self.flying: dict[
            TransferId, tuple[list[bytes | None], list[tuple[int, bytes | None]]]
        ] = {}
        self.held_blocks: dict[TransferId, list[int]] = {}
        self.held_slots: dict[TransferId, list[int]] = {}
        self.injected = 0
        self.failed = 0
        # Transfer -> what compute behind it must see of each block, and what it saw.
        self.reads: list[tuple[TransferId, bytes, list[bytes]]] = []
        self.landed: set[TransferId] = set()

    @rule(blocks=BLOCKS, slots=SLOTS, wait=st.booleans())
    def store(self, blocks: list[int], slots: list[int], wait: bool) -> None:
        blocks, slots = self._free(blocks, slots)
        if blocks:
            transfer = self._rig.store(blocks, slots)
            writes = [(s, self.blocks[b]) for b, s in zip(blocks, slots, strict=True)]
            self._fly(transfer, self.slots, writes, blocks, slots, wait)

    @rule(blocks=BLOCKS, slots=SLOTS, wait=st.booleans())
    def load(self, blocks: list[int], slots: list[int], wait: bool) -> None:
        blocks, slots = self._free(blocks, slots)
        if blocks:
            transfer = self._rig.load(slots, blocks)
            writes = [(b, self.slots[s]) for b, s in zip(blocks, slots, strict=True)]
            self._fly(transfer, self.blocks, writes, blocks, slots, wait)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def compute_writes(self, block: int) -> None:
        """Compute writes a free block, whenever the device gets to it."""
        if not any(block in held for held in self.held_blocks.values()):
            content = self._rig.fresh()
            self._rig.launch(lambda: self._rig.kv.set_block(block, content))
            self.blocks[block] = content

    @rule()
    def compute_reads(self) -> None:
        """Compute behind the loads under way reads what they bring, however late they are."""
        try:
            self._rig.engine.order_compute_after_loads()
        except DriverError:  # then nobody may compute
            return
        for transfer, (table, writes) in self.flying.items():
            if table is self.blocks:
                self._read_behind(transfer, writes)

    def _read_behind(self, transfer: TransferId, writes: list[tuple[int, bytes | None]]) -> None:
        for block, content in writes:
            if content is not None:
                seen: list[bytes] = []
                self._rig.launch(partial(self._see, seen, block))
                self.reads.append((transfer, content, seen))

    def _see(self, seen: list[bytes], block: int) -> None:
        seen.append(self._rig.kv.block(block))

    @rule(name=st.sampled_from(INJECTED), nth=st.integers(1, 6))
    @precondition(lambda self: self.injected < 3)
    def refuse(self, name: str, nth: int) -> None:
        self._rig.driver.fail(name, nth)
        self.injected += 1

    @rule(late=st.sampled_from(["nobody", "compute", "loads"]))
    def change_weather(self, late: str) -> None:
        rig = self._rig
        streams = {"nobody": set(), "compute": {rig.compute}}
        streams["loads"] = {rig.stream(Direction.LOAD)}
        rig.driver.timeline.late = streams[late]

    @rule()
    def poll(self) -> None:
        self._settle(self._rig.engine.poll())

    @rule()
    def drain(self) -> None:
        self._settle(self._rig.engine.drain(LONG))
        assert not self.flying
        self._rig.driver.timeline.run_all()
        for transfer, wanted, seen in self.reads:
            assert transfer not in self.landed or seen == [wanted]
        self.reads.clear()
        for block, content in enumerate(self.blocks):
            assert content is None or self._rig.kv.block(block) == content
        for slot, content in enumerate(self.slots):
            assert content is None or self._rig.slot(slot) == content

    @invariant()
    def failures_have_a_cause(self) -> None:
        if self.rig is not None:
            assert self.failed <= self.injected

    def teardown(self) -> None:
        if self.rig is not None:
            self.rig.driver._failures.clear()
            self.drain()
            self.rig.close()
            assert self.rig.driver.leaks() == {}

    @property
    def _rig(self) -> Rig:
        assert self.rig is not None
        return self.rig

    def _free(self, blocks: list[int], slots: list[int]) -> tuple[list[int], list[int]]:
        busy_blocks = {b for held in self.held_blocks.values() for b in held}
        busy_slots = {s for held in self.held_slots.values() for s in held}
        blocks = [b for b in blocks if b not in busy_blocks]
        slots = [s for s in slots if s not in busy_slots]
        count = min(len(blocks), len(slots))
        return blocks[:count], slots[:count]

    def _fly(
        self,
        transfer: TransferId,
        table: list[bytes | None],
        writes: list[tuple[int, bytes | None]],
        blocks: list[int],
        slots: list[int],
        wait: bool,
    ) -> None:
        self.flying[transfer] = (table, writes)
        self.held_blocks[transfer], self.held_slots[transfer] = blocks, slots
        if wait:
            self._rig.wait_until_queued()

    def _settle(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            table, writes = self.flying.pop(receipt.transfer_id)
            failed = receipt.outcome is Outcome.FAILED
            self.failed += failed
            for place, content in writes:
                table[place] = None if failed else content
            blocks = self.held_blocks.pop(receipt.transfer_id)
            slots = self.held_slots.pop(receipt.transfer_id)
            if failed:
                continue
            self.landed.add(receipt.transfer_id)
            # The promise of a receipt: the bytes are there now, whatever runs later.
            for block, slot in zip(blocks, slots, strict=True):
                if table is self.slots and self.slots[slot] is not None:
                    assert self._rig.slot(slot) == self.slots[slot]
                if table is self.blocks and self.blocks[block] is not None:
                    assert self._rig.kv.block(block) == self.blocks[block]


TestEngineMachine = EngineMachine.TestCase
