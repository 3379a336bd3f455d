"""Conversations on a small device, on bad days: not one token may differ, nothing may be left.

Hybrid layers, too little memory, users who hang up, copies that fail and leave rubbish, a small
tier below the host that refuses and forgets. The truth is the same engine with room for everything
and no kvferry. ``KVFERRY_TEST_REQUESTS`` sets how many requests each life has (thousands, say).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tests.fakes.memory_tiers import MemoryTier

from kvferry.config import Config
from kvferry.core.keys import Key
from kvferry.errors import TransferError
from kvferry.scheduler.tier import WriteMode
from kvferry.tiers.contract import TierSetup, Way
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.transfer.layout import describe
from kvferry.types import DEVICE, HOST, TierName, Transfer

NUM_REQUESTS = int(os.environ.get("KVFERRY_TEST_REQUESTS", "120"))
SECONDS_PER_REQUEST = 2.0  # far more than any request takes: beyond it the engine hangs

VOCAB = 61
LONGEST = 112
BLOCK_TOKENS = 8
NUM_BLOCKS = 22  # hardly two conversations
HOST_BLOCKS = 40
LOWER_BLOCKS = 120
LOWER = TierName("lower")
OPENED: list[MemoryTier] = []


def open_prepared(setup: TierSetup) -> MemoryTier:
    """The factory that the setting names: it returns the tier of the running test."""
    return OPENED[-1]


FULL = ModelShape(
    vocab=VOCAB, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, hidden=16, seed=5
)
MODELS = {
    "full": FULL,
    "hybrid": replace(FULL, windows=(None, 19)),
    "windows": replace(FULL, windows=(1, 19)),
}


@dataclass
class Life:
    """One way to live: which model, what is below."""

    model: str
    below: WriteMode | None
    failure_rate: float = 0.05
    settings: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        below = self.below.value if self.below else "nothing"
        return f"{self.model}, {below} below {' '.join(self.settings)}".strip()


LIVES = [
    Life("full", None),
    Life("full", WriteMode.SPILL),
    Life("hybrid", WriteMode.SPILL),
    Life("hybrid", WriteMode.THROUGH, failure_rate=0.3),
    Life("hybrid", None, failure_rate=0.3),
    Life("windows", None, settings={"store_threshold": 2, "max_loading_blocks": 3}),
    Life("hybrid", None, 0.1, {"load_deadline": 0.005, "store_deadline": 0.0005}),
]


def unreliable(chance: random.Random, failure_rate: float) -> type[CpuEngine]:
    """A copy engine that fails now and then; a failed copy leaves rubbish where it wrote."""

    class Unreliable(CpuEngine):
        def _move(self, transfer: Transfer) -> None:
            if chance.random() < 0.05:
                time.sleep(0.01 * chance.random())
            if chance.random() >= failure_rate:
                super()._move(transfer)
                return
            if transfer.dst == DEVICE:
                for view, _ in self._views_of(self._jobs.layouts[transfer.group]).segments:
                    view[transfer.dst_slots] = 0x7F
            else:
                self._host[transfer.dst_slots] = 0x7F
            raise TransferError("injected: the copy failed")

    return Unreliable


def forgetful_tier(chance: random.Random, slot_bytes: int, failure_rate: float) -> MemoryTier:
    def fault(way: Way, key: Key) -> None:
        if chance.random() < failure_rate:
            raise TransferError(f"injected: no {way.value}")
        if chance.random() < 0.02:
            tier.lose(np.array([chance.randrange(LOWER_BLOCKS)]))

    tier = MemoryTier(LOWER_BLOCKS, slot_bytes, name=LOWER, delay=0.0002, fault=fault)
    return tier


def conversations(chance: random.Random, answers: dict[str, list[int]]) -> Iterator[ServedRequest]:
    """Requests without end: new ones, and old ones that go on where they stopped."""
    systems = [[chance.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    histories: list[list[int]] = []
    asked: dict[str, list[int]] = {}
    number = 0
    while True:
        done = [request_id for request_id in asked if request_id in answers]
        histories += [asked.pop(request_id) + answers[request_id] for request_id in done]
        if histories and chance.random() < 0.7:
            history = chance.choice(histories)
        else:
            history = chance.choice(systems)
        prompt = history + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))]
        if len(prompt) > LONGEST - 16:
            histories.remove(history)
            continue
        number += 1
        request = ServedRequest(f"r{number:05d}", tuple(prompt), chance.randint(1, 16))
        asked[request.id] = prompt
        yield request


def truth(model: ModelShape, requests: list[ServedRequest]) -> dict[str, list[int]]:
    """What these requests generate where there is room for everything, without kvferry."""
    runner = Runner(Decoder(model), num_blocks=20 * LONGEST, block_tokens=BLOCK_TOKENS)
    with runner:
        engine = Engine(runner, limits=Limits(max_running=16))
        copies = [ServedRequest(r.id, r.prompt, r.max_new_tokens) for r in requests]
        for copy in copies:
            engine.submit(copy)
        engine.run()
    return {copy.id: copy.generated for copy in copies}


@pytest.mark.timeout(60 + SECONDS_PER_REQUEST * NUM_REQUESTS)
@pytest.mark.parametrize("life", LIVES, ids=str)
def test_tokens_are_equal_whatever_happens(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(str(life))
    model = MODELS[life.model]
    engine_class = unreliable(random.Random(f"copies {life}"), life.failure_rate)
    monkeypatch.setattr("kvferry.rank.CpuEngine", engine_class)
    answers: dict[str, list[int]] = {}
    served: list[ServedRequest] = []
    settings = {"load_policy": "always", "match_deadline": 0.05}
    settings |= life.settings
    if life.below:
        settings |= {"tiers": f"lower={__name__}:open_prepared", "tier_write": life.below.value}
    config = Config.from_dict(settings)
    with Runner(Decoder(model), num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS) as runner:
        layouts = [describe(tensors, block_axis=0) for tensors in runner.group_tensors()]
        slot_bytes = max(layout.block_bytes for layout in layouts)
        chances = random.Random(f"tier {life}")
        OPENED.append(forgetful_tier(chances, slot_bytes, life.failure_rate))
        host_bytes = HOST_BLOCKS * slot_bytes
        with Offloader(runner, host_bytes=host_bytes, config=config) as offloader:
            engine = Engine(runner, limits=Limits(48, 4), offloader=offloader)
            num_aborted = serve(engine, chance, answers, served)
            engine.drain()
            prove_nothing_left(engine, offloader)
            stats = offloader.stats()
        OPENED.pop().close()
    expected = truth(model, served)
    different = [r.id for r in served if r.generated != expected[r.id]]
    assert not different, f"{len(different)} of {len(served)} answers differ: {different[:5]}"
    # Nothing of this proves anything unless it happened.
    assert num_aborted > 0
    assert engine.counts.num_preemptions > 0
    assert engine.counts.num_loaded_tokens > 0
    assert stats.failed > 0
    if life.below:
        assert stats.bytes_moved[HOST, LOWER] > 0


def serve(
    engine: Engine,
    chance: random.Random,
    answers: dict[str, list[int]],
    served: list[ServedRequest],
) -> int:
    """Serve so many requests; some hang up, some are preempted. Returns how many hung up."""
    coming = conversations(chance, answers)
    under_way: list[ServedRequest] = []
    num_aborted = num_asked = 0
    give_up = time.monotonic() + 30.0 + SECONDS_PER_REQUEST * NUM_REQUESTS
    while num_asked < NUM_REQUESTS or engine.has_work:
        while num_asked < NUM_REQUESTS and len(under_way) < 6:
            under_way.append(next(coming))
            engine.submit(under_way[-1])
            num_asked += 1
        for request in engine.step():
            under_way.remove(request)
            answers[request.id] = request.generated
            served.append(request)
        is_last_chance = num_asked == NUM_REQUESTS and not num_aborted
        if under_way and (chance.random() < 0.015 or is_last_chance):
            hung_up = under_way.pop(chance.randrange(len(under_way)))
            engine.abort(hung_up.id)
            num_aborted += 1
        if engine.offloader and chance.random() < 0.002:
            engine.offloader.scheduler.reset()
        if engine._running and chance.random() < 0.03:  # some event elsewhere needs the memory now
            engine._preempt(chance.choice(engine._running))
        assert time.monotonic() < give_up, f"no progress: {len(under_way)} requests wait"
    return num_aborted


def prove_nothing_left(engine: Engine, offloader: Offloader) -> None:
    scheduler = offloader.scheduler
    engine.memory.check_integrity()
    scheduler.check_integrity()
    assert scheduler.num_in_flight == 0
    assert scheduler.num_queued == 0
    for pool in (scheduler.pool, *(tier.pool for tier in scheduler.lower.tiers)):
        assert pool is None or pool.num_leases == 0
    assert not scheduler.requests
    assert not scheduler.hits._being_loaded.any()


class Careless(CpuEngine):
    """Loads every block from its neighbour's slot, and says it went well."""

    def _move(self, transfer: Transfer) -> None:
        if transfer.dst == DEVICE:
            wrong = (transfer.src_slots + 1) % len(self._host)
            transfer = Transfer(
                transfer.id, transfer.src, transfer.dst, wrong, transfer.dst_slots, transfer.group
            )
        super()._move(transfer)


def test_wrong_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that tokens are equal can fail: bytes from a wrong slot change them."""
    monkeypatch.setattr(__name__ + ".unreliable", lambda *_: Careless)
    with pytest.raises(AssertionError, match="answers differ"):
        test_tokens_are_equal_whatever_happens(LIVES[0], monkeypatch)
