"""The traps that published offloaders fell into, one test each, on a server that holds real bytes.

Each guard was taken out once, in a copy of the source, and one of these tests was seen to fail.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.desk import Desk, story
from tests.fakes.memory_tiers import MemoryTier
from tests.fakes.pools import evict
from tests.model.serving import Serving
from tests.model.stage import RankSide, Served, Setup

from kvferry.core.keys import Key
from kvferry.errors import TransferError
from kvferry.hostmem.slots import HostTier
from kvferry.scheduler.tier import WriteMode
from kvferry.tiers.contract import Way
from kvferry.tiers.movers import TierMover
from kvferry.tools.demo.engine import Engine, ServedRequest
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.transfer.layout import describe
from kvferry.types import DEVICE, HOST, MatchState, Outcome, Plan, TierName, Transfer, TransferId
from kvferry.worker import Worker

# -- parts ----------------------------------------------------------------------------------------


def run(server: Serving, *ranks: RankSide, outcome: str = "ok") -> None:
    """These ranks (all, if none is named) do everything they were given."""
    for rank in ranks or server.ranks:
        while rank.todo:
            server.execute(rank, 0, outcome)


def land(server: Serving) -> None:
    """Hand over the plan, copy, settle."""
    server.dispatch()
    run(server)
    server.settle(list(server.receipts))


def told(server: Serving, number: int, tokens: int = 40) -> None:
    """Serve one story to its end, and let all of it land."""
    request = server.arrive(number, tokens - 1, 1)
    assert server.admit(request) is MatchState.MISS
    while request.id in server.requests:
        assert server.compute(request, 8)
        land(server)


def cool(server: Serving) -> None:
    """The device forgets what it has; only the host can help now."""
    for pool in server.devices:
        pool.forget_all()


def loading(server: Serving, number: int, tokens: int = 40) -> Served:
    """A request that has begun to load its story from the host."""
    request = server.arrive(number, tokens, 4)
    assert server.admit(request) is MatchState.HIT
    assert request.state == "loading"
    return request


def computed(server: Serving, number: int = 0) -> Served:
    """A request that has computed its prompt, which nothing had of it."""
    request = server.arrive(number, 40, 4)
    server.admit(request)
    server.compute(request, 40)
    return request


def finish(server: Serving) -> None:
    server.check()
    server.quiesce()
    server.drain()


# -- preempted, aborted, finished -----------------------------------------------------------------


def test_preempted_with_a_store_in_flight() -> None:
    """Its device blocks go to someone else before the copy has read them: the host keeps garbage.

    The engine holds what is being stored until the receipt, whoever owned it before.
    """
    server = Serving(Setup(num_blocks=24, num_ranks=2, joins_loads=False))
    request = computed(server)
    server.dispatch()
    server.preempt(request)
    computed(server, 2)  # takes every block it can get
    run(server)
    server.settle(list(server.receipts))
    server.check()  # what can be matched is what was computed
    assert server.pool.counts.cached > 0
    finish(server)


def test_preempted_with_a_load_in_flight() -> None:
    """The load lands in blocks that were given to another request meanwhile."""
    server = Serving(Setup(num_blocks=24, num_ranks=2, bounded=False))
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    server.dispatch()
    run(server, server.ranks[0])
    server.preempt(request)
    computed(server, 2)
    run(server, server.ranks[1])  # the second rank is late
    server.check()
    server.settle(list(server.receipts))
    assert request.state == "waiting"
    finish(server)
    assert server.num_finished == 3


def test_preempted_before_its_load_was_sent_off() -> None:
    """A load that nobody waits for is not started, and its blocks come back."""
    server = Serving(Setup())
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    server.preempt(request)
    assert server.dispatch() == 0
    server.settle()
    assert not any(server.devices[0].holders)
    finish(server)


def test_aborted_between_match_and_allocation() -> None:
    """A hit that is never loaded must not stay pinned."""
    desk = Desk(slots=4)
    desk.keep("a", story(1, 4), 16)
    assert desk.match("b", story(1, 4)).state is MatchState.HIT
    desk.scheduler.abort("b")
    desk.check_empty()
    assert desk.store("c", story(2, 4), 16) == {0: [0, 1, 2, 3]}


def test_a_hit_lost_between_match_and_allocation() -> None:
    """A reset or a deadline took it back: loading it now would read what is there by chance."""
    desk = Desk(slots=4, match_deadline=5)
    desk.keep("a", story(1, 4), 16)
    desk.match("b", story(1, 4))
    desk.scheduler.reset()
    assert desk.load("b", 16) == {}
    desk.keep("c", story(1, 4), 16)
    desk.match("d", story(1, 4))
    desk.now = 6.0
    desk.scheduler.settle()
    assert desk.load("d", 16) == {}
    desk.check_empty()


def test_aborted_with_a_load_in_flight() -> None:
    """A copy that is under way goes on writing into blocks nobody seems to own."""
    server = Serving(Setup(num_blocks=24, bounded=False))
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    server.dispatch()
    server.abort(request)
    computed(server, 2)
    run(server)
    server.check()
    server.settle(list(server.receipts))
    finish(server)


def test_finished_before_its_stores_landed() -> None:
    """A request's end must not end its stores: the next turn needs them."""
    server = Serving(Setup(num_blocks=64, num_slots=48, bounded=False))
    request = server.arrive(0, 39, 1)
    server.admit(request)
    server.compute(request, 40)
    assert not server.requests
    land(server)
    cool(server)
    assert server.admit(server.arrive(0, 41, 4)) is MatchState.HIT
    finish(server)


def test_the_last_blocks_of_a_finished_request() -> None:
    """Stores wait for the next step, and a finished request has none."""
    desk = Desk()
    desk.store("a", story(1, 5), 16)
    desk.run()
    desk.store("a", story(1, 5), 20)
    desk.scheduler.finish("a")
    desk.run()
    assert desk.hit(story(1, 5)) == 20


def test_generated_tokens() -> None:
    """Only prompts are stored, so the next turn computes the last answer again."""
    server = Serving(Setup(num_blocks=64, num_slots=48))
    request = server.arrive(0, 9, 32)
    server.admit(request)
    while request.id in server.requests:
        server.compute(request, 1)
        land(server)
    cool(server)
    again = server.arrive(0, 42, 4)
    server.admit(again)
    assert again.loading[1] == 40
    finish(server)


# -- eviction, joining, room ----------------------------------------------------------------------


def test_evicted_between_match_and_load() -> None:
    """The slot that was promised holds another conversation when it is read."""
    server = Serving(Setup(num_slots=12, num_blocks=64, bounded=False))
    told(server, 0)
    cool(server)
    request = server.arrive(0, 40, 4)
    keys = server.stories.keys[0]
    match = server.scheduler.match(request.id, keys[:9], max_tokens=39)
    assert match.state is MatchState.HIT
    told(server, 2)  # wants every slot of the host
    land(server)
    assert server.admit(request) is MatchState.HIT
    land(server)
    assert server.num_loads == 1  # and it had the right bytes
    finish(server)


def test_two_requests_that_want_the_same_block() -> None:
    """Loaded twice, it costs twice; deferred, the second starves. It joins the load in flight."""
    server = Serving(Setup(num_blocks=64, num_slots=48, bounded=False))
    told(server, 0)
    cool(server)
    loading(server, 0)
    second = server.arrive(0, 40, 4)
    assert server.admit(second) is MatchState.WAIT
    moved = [t for t in server.scheduler.plan().transfers if t.dst == DEVICE]
    assert len(moved) == 1
    for rank in server.ranks:
        rank.todo += moved
    run(server)
    server.settle(list(server.receipts))
    assert server.admit(second) is MatchState.MISS  # it is on the device now
    assert second.computed == 36
    finish(server)
    assert server.num_loads == 1


def test_a_store_batch_larger_than_the_free_space() -> None:
    """All or nothing stores nothing: what fits is stored, from the front."""
    desk = Desk(slots=6)
    assert desk.store("a", story(1, 10), 40) == {0: [0, 1, 2, 3, 4, 5]}
    desk.run()
    assert desk.hit(story(1, 10)) == 24


def test_a_chain_does_not_evict_its_own_beginning() -> None:
    """Making room for the end of a conversation by dropping its start leaves nothing to match."""
    desk = Desk(slots=6)
    for end in range(4, 41, 4):
        desk.store("a", story(1, 10), end)
        desk.run()
    assert desk.hit(story(1, 10)) == 24


def test_loads_that_would_hold_every_device_block() -> None:
    """Requests that load hold blocks and cannot be preempted: enough of them stop the engine."""
    desk = Desk(blocks=16, slots=64)
    for number in range(6):
        for end in (8, 16):
            desk.store(f"s{number}", story(number, 4), end)
            desk.run()
        desk.scheduler.finish(f"s{number}")
    held = 0
    for number in range(6):
        if desk.match(f"r{number}", story(number, 4)).state is MatchState.HIT:
            held += len(desk.load(f"r{number}", 16)[0])
    assert 8 < held <= 14  # several at once, and some blocks for what runs


def test_an_engine_of_loads_alone_gets_on() -> None:
    """Every request has all its tokens in the host and the device holds hardly two of them."""
    server = Serving(Setup(num_blocks=24, num_slots=96, num_stories=6), max_loading_blocks=2)
    for number in range(6):  # each has more blocks than the bound, and loads alone
        told(server, number)
    cool(server)
    for number in range(6):
        server.arrive(number, 40, 4)
    finish(server)
    assert server.num_loads > 0


# -- reset and weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["ordered", "sent", "half done", "done"])
def test_reset_with_a_store_in_flight(moment: str) -> None:
    """A block that lands after the reset must not be matched; its slot must come back."""
    server = Serving(Setup(num_blocks=64, num_ranks=2))
    request = computed(server)
    if moment != "ordered":
        server.dispatch()
    if moment in ("half done", "done"):
        run(server, *(server.ranks if moment == "done" else server.ranks[:1]))
    server.reset()
    server.abort(request)
    land(server)
    assert server.pool.counts.cached == 0
    assert server.admit(server.arrive(0, 40, 4)) is MatchState.MISS
    finish(server)


@pytest.mark.parametrize("moment", ["matched", "ordered", "sent"])
def test_reset_with_a_load_under_way(moment: str) -> None:
    """The slots it reads must not be given out before it has read them."""
    server = Serving(Setup(num_blocks=64, num_slots=12, bounded=False))
    told(server, 0)
    cool(server)
    if moment == "matched":
        request = server.arrive(0, 40, 4)
        server.scheduler.match(request.id, server.stories.keys[0][:9], max_tokens=39)
    else:
        request = loading(server, 0)
    if moment == "sent":
        server.dispatch()
    server.reset()
    told(server, 2)  # new bytes for every slot that is free
    finish(server)
    assert server.num_loads == (0 if moment == "matched" else 1)


def test_reset_with_a_promotion_in_flight() -> None:
    server = Serving(Setup(num_blocks=64, tiers=((64, WriteMode.THROUGH),)))
    told(server, 0)
    land(server)
    cool(server)
    evict(server.pool, 64)
    request = server.arrive(0, 40, 4)
    assert server.admit(request) is MatchState.WAIT
    server.dispatch()
    server.reset()
    run(server)
    server.settle(list(server.receipts))
    assert server.pool.counts.cached == 0
    finish(server)


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_weights_updated_in_place(kind: str) -> None:
    """A running request holds blocks of the old weights; stored now, they would pass as new."""
    server = Serving(Setup(kind, num_blocks=64, num_slots=48, bounded=False))
    request = server.arrive(0, 20, 40)
    server.admit(request)
    server.compute(request, 20)
    server.reset()
    while request.id in server.requests:
        server.compute(request, 8)
        land(server)
        server.check()
    assert server.pool.counts.cached == 0
    told(server, 0)  # from scratch under the new weights
    assert server.pool.counts.cached > 0
    finish(server)


def test_weights_updated_while_old_blocks_are_loaded() -> None:
    """What it loads is of the old weights: it may go on with it, and must not store it."""
    server = Serving(Setup(num_blocks=64, num_slots=48, bounded=False))
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    server.reset()
    land(server)
    assert server.num_loads == 1
    while request.id in server.requests:
        server.compute(request, 4)
        land(server)
    assert server.pool.counts.cached == 0
    finish(server)


def test_a_preempted_request_is_stored_anew() -> None:
    """Nothing old is left of it, so nothing keeps it from being stored."""
    server = Serving(Setup(num_blocks=64, num_slots=48, bounded=False))
    request = server.arrive(0, 36, 8)
    server.admit(request)
    server.compute(request, 30)
    server.reset()
    server.preempt(request)
    finish(server)
    assert server.pool.counts.cached == 11


def test_a_waiting_request_stores_after_new_weights() -> None:
    """It has no block yet: it must not be taken for one that runs on old ones."""
    server = Serving(Setup(num_blocks=64, num_slots=48, bounded=False))
    request = server.arrive(0, 36, 8)
    server.scheduler.match(request.id, server.stories.keys[0][:8])
    server.reset()
    finish(server)
    assert server.pool.counts.cached == 11


# -- ranks ----------------------------------------------------------------------------------------


def test_a_block_is_matchable_only_when_every_rank_has_it() -> None:
    """One rank is ready, the other still copies: half a block is a wrong answer."""
    server = Serving(Setup(num_blocks=64, num_slots=48, num_ranks=3, bounded=False))
    computed(server)
    server.dispatch()
    for rank in server.ranks:
        assert server.pool.counts.cached == 0
        server.check()
        run(server, rank)
        server.settle(list(server.receipts))
    assert server.pool.counts.cached == 10
    finish(server)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_fails_the_transfer_for_all(failing: int) -> None:
    server = Serving(Setup(num_blocks=64, num_slots=48, num_ranks=3, bounded=False))
    computed(server)
    server.dispatch()
    for rank in server.ranks:
        run(server, rank, outcome="fail" if rank.rank == failing else "ok")
    server.settle(list(server.receipts))
    assert server.pool.counts.cached == 0
    finish(server)


def test_a_rank_that_writes_after_its_deadline() -> None:
    """Its slot was given to another block meanwhile, and now holds the wrong bytes.

    A deadline ends the waiting, not the claim: the slot is not given out before the rank answers.
    """
    server = Serving(Setup(num_blocks=64, num_slots=10, num_ranks=2, bounded=False))
    request = computed(server)
    server.dispatch()
    run(server, server.ranks[0])
    server.settle(list(server.receipts))
    late = list(server.ranks[1].todo)
    server.ranks[1].todo = []
    server.now += 100.0
    server.settle()
    server.abort(request)
    told(server, 2)  # would like all the slots
    server.ranks[1].todo = late
    run(server)
    server.check()
    server.settle(list(server.receipts))
    assert server.pool.counts.leased == 0
    finish(server)


def test_a_rank_that_loads_after_its_deadline() -> None:
    """Its device blocks were given to another request meanwhile, and are overwritten."""
    server = Serving(Setup(num_blocks=24, num_slots=48, num_ranks=2, bounded=False))
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    server.dispatch()
    run(server, server.ranks[0])
    server.now += 100.0
    server.settle(list(server.receipts))
    assert request.state == "running"  # told to compute instead of waiting
    server.abort(request)
    computed(server, 2)
    run(server, server.ranks[1])
    server.check()
    server.settle(list(server.receipts))
    finish(server)


def test_a_rank_that_never_answers() -> None:
    """The request that waits for it is told to compute, at the deadline."""
    server = Serving(Setup(num_blocks=64, num_slots=48, num_ranks=2))
    told(server, 0)
    cool(server)
    request = loading(server, 0)
    for _ in range(40):
        server.step(hung=[1])
    assert request.id not in server.requests
    finish(server)


def test_receipts_that_come_twice_or_too_late() -> None:
    server = Serving(Setup(num_blocks=64, num_slots=48, num_ranks=2))
    told(server, 0)
    cool(server)
    loading(server, 0)
    server.dispatch()
    run(server)
    receipts = list(server.receipts)
    server.settle(receipts)
    server.receipts += receipts
    server.settle(receipts)
    assert server.scheduler.stats().stale_receipts == 2
    finish(server)


# -- faults that nobody reports -------------------------------------------------------------------


def test_a_copy_thread_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread dies, no receipt comes, and the request waits for ever."""

    def explode(self: CpuEngine, transfer: Transfer) -> int:
        raise MemoryError("no")

    monkeypatch.setattr(CpuEngine, "_move", explode)
    kv = [np.zeros((4, 2, 8), dtype=np.uint8)]
    host = HostTier(4, 16)
    engine = CpuEngine([describe(kv, block_axis=0)], host.rows)
    worker = Worker({(DEVICE, HOST): engine, (HOST, DEVICE): engine})
    slots = np.arange(2)
    try:
        for number in range(3):  # and the thread still lives for the next one
            worker.execute(
                Plan(number, (Transfer(TransferId(number), DEVICE, HOST, slots, slots),))
            )
            (receipt,) = worker.drain(60.0)
            assert receipt.outcome is Outcome.FAILED
            assert "MemoryError: no" in receipt.reason
    finally:
        worker.close()


def test_a_tier_that_raises() -> None:
    """The same below the host, whatever the exception."""

    def fault(way: Way, key: Key) -> None:
        raise ZeroDivisionError(way)

    disk = TierName("disk")
    tier = MemoryTier(4, 16, name=disk)
    tier.fault = fault
    mover = TierMover(HostTier(4, 16), tier)
    worker = Worker({}, tiers={disk: mover})
    slots, rows = np.arange(2), keys(range(2)).array
    try:
        plan = Plan(
            1,
            (
                Transfer(TransferId(1), HOST, disk, slots, slots, keys=rows, within=5.0),
                Transfer(TransferId(2), disk, HOST, slots, slots, keys=rows, within=5.0),
            ),
        )
        worker.execute(plan)
        receipts = mover.drain(60.0)
        assert sorted(r.transfer_id for r in receipts) == [1, 2]
        assert all(r.outcome is Outcome.FAILED for r in receipts)
    finally:
        worker.close()


def test_a_route_nobody_serves() -> None:
    """A plan for a tier this worker does not have ends in receipts, not in silence."""
    worker = Worker({})
    slots = np.arange(1)
    worker.execute(Plan(1, (Transfer(TransferId(0), HOST, TierName("moon"), slots, slots),)))
    (receipt,) = worker.poll()
    assert receipt.outcome is Outcome.FAILED
    assert "no way from host to moon" in receipt.reason
    worker.close()


def test_an_engine_whose_copies_all_fail_still_answers() -> None:
    """Nothing is ever stored or loaded, and every request gets its tokens."""
    shape = ModelShape(
        vocab=31, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, hidden=16
    )
    answers = []
    for broken in (False, True):
        with Engine(Decoder(shape), 6, {"host": "64KiB", "load_policy": "always"}) as engine:
            assert engine.ferry is not None
            if broken:
                engine.ferry._rank.engine._move = _refuse  # type: ignore[attr-defined]
            requests = [ServedRequest(f"r{n}", tuple(range(n % 2, 30)), 8) for n in range(4)]
            for request in requests:
                engine.submit(request)
            engine.run()
            engine.pool.check_integrity()
            answers.append([request.generated for request in requests])
            assert bool(engine.ferry.stats().failed) == broken
    assert answers[0] == answers[1]


def _refuse(transfer: Transfer) -> int:
    raise TransferError("no copies today")


# -- processes ------------------------------------------------------------------------------------


def test_nothing_waits_past_every_deadline() -> None:
    """All of it at once: a hung rank, loads, stores and promotions under way, then only time."""
    setup = Setup(
        num_blocks=64, num_slots=16, num_ranks=2, tiers=((64, WriteMode.THROUGH),), bounded=False
    )
    server = Serving(setup)
    for number in range(4):
        told(server, number)
        land(server)
    cool(server)
    for number in range(4):
        server.admit(server.arrive(number, 40, 4))
    server.dispatch()
    start = time.monotonic()
    for _ in range(60):
        server.step(hung=[0, 1])
    assert not server.requests
    assert time.monotonic() - start < 30.0
    server.drain()
