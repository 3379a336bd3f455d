"""Compute behind a load that is still being queued: bytes, order, and no way to hang.

Each proof runs twice: with the engine as it is, and with one of its promises dropped, which must be
seen.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import LONG, Rig

from kvferry.transfer.engine import flags as flags_module
from kvferry.transfer.engine import gpu as gpu_module
from kvferry.transfer.engine.copy_queue import CopyQueue, PendingCopy
from kvferry.transfer.engine.flags import NUM_FLAGS, FlagWatchdog, HostFlags
from kvferry.transfer.job import Direction
from kvferry.types import Outcome, TransferId

SEEDS = range(6)
HALF = 6
ALL = list(range(2 * HALF))


class Deaf(FakeDriver):
    """Can be told that compute waits for no flag, or that flags are set by the first piece."""

    waits_for_flags = True

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        if self.waits_for_flags:
            super().stream_wait_value(stream, address, value)


def nobody_has_a_turn(queue: CopyQueue) -> None:
    """The queue's thread is there and never comes to anything."""
    queue._has_thread = lambda: True  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def one_piece_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "SMALL_BYTES", 0)


def warm_rig(
    seed: int = 0,
    driver: FakeDriver | None = None,
    patience: float = 60.0,
    *,
    apart: bool = True,
) -> Rig:
    """A rig whose jobs take many slots of the ring, with all made that is made once."""
    kv = make_kv("split", page=1024, num_blocks=len(ALL), seed=seed)
    driver = driver or Deaf(seed=seed)
    rig = Rig(kv, path="staged", driver=driver, num_slots=len(ALL), patience=patience, seed=seed)
    for direction in (rig.load, rig.store):
        direction(ALL, ALL)
        rig.drain_ok()
    if apart:
        rig.engine._probe._is_safe[rig.compute] = True
    for block in ALL:
        rig.kv.set_block(block, b"\xee" * rig.kv.layout.block_bytes)
    rig.host[...] = rig.rng.integers(0, 256, rig.host.shape, dtype="uint8")
    for queue in rig.engine._queues.values():
        queue.close(LONG)
        queue._thread, queue._is_closing = None, False
        nobody_has_a_turn(queue)
    return rig


def load_first_piece(rig: Rig, blocks: list[int]) -> TransferId:
    with rig.engine.starting_here():
        transfer = rig.load(blocks, blocks)
    assert rig.engine._queues[Direction.LOAD].num_unqueued
    return transfer


def pending(number: int) -> PendingCopy:
    job: Any = None
    return PendingCopy(TransferId(number), job)


def is_unset(rig: Rig) -> bool:
    return any(flag is not None and not flag.is_set for flag in rig.engine._flags._last)


def settle(rig: Rig) -> dict[TransferId, Any]:
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    return rig.drain()


def compute_reads_what_was_loaded(rig: Rig) -> bool:
    """Compute is queued while most of the load is not, and runs as soon as it may."""
    load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    assert rig.engine._queues[Direction.LOAD].num_unqueued, "it waited until all was queued"
    seen: list[bytes] = []
    rig.launch(lambda: seen.extend(rig.kv.block(block) for block in ALL))
    rig.driver.timeline.run_all()
    too_early = bool(seen)
    settle(rig)
    return not too_early and seen == [rig.slot(slot) for slot in ALL]


def flags_are_set_behind_the_last_piece(rig: Rig) -> bool:
    """All is queued, and the card has not got there yet."""
    rig.driver.timeline.frozen = {rig.stream(Direction.LOAD)}
    load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    seen: list[bytes] = []
    rig.launch(lambda: seen.extend(rig.kv.block(block) for block in ALL))
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    rig.driver.timeline.frozen = set()
    settle(rig)
    return seen == [rig.slot(slot) for slot in ALL]


def right(rig: Rig) -> None:
    pass


def compute_does_not_wait(rig: Rig) -> None:
    rig.driver.waits_for_flags = False  # type: ignore[attr-defined]


def flags_are_set_by_the_host(rig: Rig) -> None:
    rig.engine._flags.set_behind = lambda flag, stream: flag.set_now()  # type: ignore[method-assign]


CAUGHT = [
    (compute_does_not_wait, compute_reads_what_was_loaded),
    (compute_does_not_wait, flags_are_set_behind_the_last_piece),
    (flags_are_set_by_the_host, flags_are_set_behind_the_last_piece),
]
Scenario = Callable[[Rig], bool]


def outcome(scenario: Scenario, mutate: Callable[[Rig], None], seed: int) -> bool:
    rig = warm_rig(seed)
    mutate(rig)
    good = scenario(rig)
    rig.close()
    assert rig.driver.leaks() == {}
    return good


@pytest.mark.parametrize(
    "scenario", [compute_reads_what_was_loaded, flags_are_set_behind_the_last_piece]
)
def test_compute_waits_for_a_load_that_is_not_queued(scenario: Scenario) -> None:
    assert all(outcome(scenario, right, seed) for seed in SEEDS)


@pytest.mark.parametrize(("mutate", "scenario"), CAUGHT)
def test_dropping_the_flag_corrupts_and_is_seen(
    mutate: Callable[[Rig], None], scenario: Scenario
) -> None:
    assert not all(outcome(scenario, mutate, seed) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_loads_each_behind_its_own_flag(seed: int) -> None:
    rig = warm_rig(seed)
    ids = [TransferId(-1)] * 2
    seen: dict[int, list[bytes]] = {0: [], 1: []}
    for number, blocks in enumerate((ALL[:HALF], ALL[HALF:])):
        with rig.engine.starting_here():
            ids[number] = rig.load(blocks, blocks)
        rig.engine.order_compute_after_loads()
        rig.launch(
            lambda n=number, b=blocks: seen[n].extend(rig.kv.block(x) for x in b)  # type: ignore[misc]
        )
    rig.driver.timeline.run_all()
    receipts = settle(rig)
    rig.driver.timeline.run_all()
    assert [receipts[transfer].outcome for transfer in ids] == [Outcome.OK] * 2
    assert seen[0] + seen[1] == [rig.slot(slot) for slot in ALL]


def test_compute_is_ordered_before_another_thread_hears_of_the_load() -> None:
    rig = warm_rig()
    loads = rig.engine._queues[Direction.LOAD]
    unset: list[bool] = []
    loads._wake_thread = lambda: unset.append(is_unset(rig))  # type: ignore[method-assign]
    with rig.engine.starting_here(compute_waits=True):
        transfer = rig.load(ALL, ALL)
    assert unset == [True]
    seen: list[bytes] = []
    rig.launch(lambda: seen.extend(rig.kv.block(block) for block in ALL))
    assert settle(rig)[transfer].outcome is Outcome.OK
    assert seen == [rig.slot(slot) for slot in ALL]


def store_behind_a_flag(rig: Rig) -> bool:
    """A store that compute holds shares a channel with the load in front of the flag."""
    inbound = rig.engine._paths["staged"]._rings[Direction.LOAD].inbound  # type: ignore[attr-defined]
    rig.driver.timeline.channels = {rig.stream(Direction.STORE): 1, inbound: 1}
    load_first_piece(rig, ALL[:HALF])
    rig.driver.timeline.run_all()
    rig.engine.order_compute_after_loads()
    rig.launch(lambda: None)
    with rig.engine.starting_here():
        rig.store(ALL[HALF:], ALL[HALF:])
    stores = rig.engine._queues[Direction.STORE]
    stores.flush(0.02)
    for queue in (rig.engine._queues[Direction.LOAD], stores):
        assert queue.flush(LONG)
    rig.driver.timeline.run_all()
    ended = not is_unset(rig)
    for flag in rig.engine._flags._last:
        if flag is not None:
            flag.set_now()
    settle(rig)
    return ended


def stores_do_not_wait_for_flagged_loads(rig: Rig) -> None:
    stores = rig.engine._queues[Direction.STORE]
    stores._wait_for_load = lambda load, end: True


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_behind_a_flag_waits_for_its_turn(seed: int) -> None:
    assert outcome(store_behind_a_flag, right, seed)


def test_a_store_that_overtakes_the_load_before_it_hangs_both_and_is_seen() -> None:
    results = [outcome(store_behind_a_flag, stores_do_not_wait_for_flagged_loads, n) for n in SEEDS]
    assert not all(results)


def test_a_flag_that_stays_unset_is_set_and_its_load_has_failed() -> None:
    rig = warm_rig(patience=0.0)
    transfer = load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    ran: list[int] = []
    rig.launch(lambda: ran.append(1))
    rig.driver.timeline.run_all()
    assert not ran
    rig.engine._watchdog.check()
    rig.driver.timeline.run_all()
    assert ran
    receipt = settle(rig)[transfer]
    assert receipt.outcome is Outcome.FAILED
    assert "was not queued within" in receipt.reason


def test_the_watchdog_wakes_by_itself() -> None:
    watch = FlagWatchdog(patience=0.0, timeout=0.0, every=0.0)
    word = ctypes.c_uint32(0)
    load = pending(1)
    driver = FakeDriver()
    flags = HostFlags(driver)
    with driver.current():
        flags.prepare()
    load.flag = flags.make()
    assert load.flag is not None
    assert watch.start()
    watch.watch(load)
    for _ in range(1000):
        if load.flag.is_set:
            break
        threading.Event().wait(0.01)
    assert load.flag.is_set
    assert load.reason
    watch.close()
    watch.close()
    with driver.current():
        flags.close()
    assert word.value == 0
    assert driver.leaks() == {}


def try_a_flag(rig: Rig) -> bool:
    """Whether a flag is unset at the second load, and all ends."""
    for round_ in range(2):
        load_first_piece(rig, ALL)
        rig.engine.order_compute_after_loads()
        is_flagged = is_unset(rig)
        assert not is_flagged or round_, "not tried yet"
        rig.launch(lambda: None)
        rig.wait_until_queued()
        rig.driver.timeline.run_all()
        ended = not is_unset(rig)
        for flag in rig.engine._flags._last:
            if flag is not None:
                flag.set_now()
        settle(rig)
        rig.driver.timeline.run_all()
        assert ended
    return is_flagged


def test_a_compute_stream_is_tried_before_it_waits_at_a_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flags_module, "PROBE_SECONDS", LONG)
    rig = warm_rig(apart=False)
    assert try_a_flag(rig)


def shared_channel(rig: Rig) -> None:
    path: Any = rig.engine._paths["staged"]
    rig.driver.timeline.channels = {rig.compute: 1, path._rings[Direction.LOAD].inbound: 1}


@pytest.mark.parametrize("number", range(3))
def test_none_is_unset_where_compute_shares_a_channel_with_us(number: int) -> None:
    rig = warm_rig(number, apart=False)
    shared_channel(rig)
    assert not try_a_flag(rig)


def test_a_flag_on_a_shared_channel_would_hang_and_is_seen() -> None:
    rig = warm_rig(apart=True)  # taken for granted
    shared_channel(rig)
    load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    rig.wait_until_queued()
    rig.driver.timeline.run_all()
    assert is_unset(rig)
    rig.driver.timeline.channels = {}


def test_nothing_is_tried_while_compute_or_a_copy_runs() -> None:
    rig = warm_rig(apart=False)
    assert not rig.engine._probe.is_safe(rig.compute)
    rig.driver.timeline.frozen = {rig.compute}
    rig.launch(lambda: None)
    load_first_piece(rig, ALL)
    rig.driver.timeline.frozen = set()
    rig.driver.timeline.run_all()
    rig.store(ALL, ALL)  # a load is under way
    assert rig.engine._probe.is_wanted(rig.compute)
    settle(rig)


def is_all_queued_at_once(rig: Rig) -> bool:
    transfer = load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    is_queued = not rig.engine._queues[Direction.LOAD].num_unqueued
    seen: list[bytes] = []
    rig.launch(lambda: seen.extend(rig.kv.block(block) for block in ALL))
    rig.driver.timeline.run_all()
    assert settle(rig)[transfer].outcome is Outcome.OK
    assert seen == [rig.slot(slot) for slot in ALL]
    return is_queued


def test_without_values_the_caller_queues_all_of_it() -> None:
    rig = warm_rig(driver=FakeDriver(has_values=False))
    assert is_all_queued_at_once(rig)


def test_a_refused_wait_is_no_flag() -> None:
    rig = warm_rig()
    rig.driver.fail("stream_wait_value")
    assert is_all_queued_at_once(rig)
    assert not is_unset(rig)


def test_what_must_still_be_made_is_made_before_a_flag_is_used() -> None:
    kv = make_kv("split", page=1024, num_blocks=len(ALL))
    rig = Rig(kv, path="staged", num_slots=len(ALL))
    for queue in rig.engine._queues.values():
        nobody_has_a_turn(queue)
        queue.hold()  # not begun: neither ring nor kernels are there
    rig.load(ALL, ALL)
    rig.engine.order_compute_after_loads()
    assert not rig.engine._queues[Direction.LOAD].num_unqueued
    assert not is_unset(rig)
    rig.drain_ok()


def test_a_refused_opening_is_done_by_the_host_once_the_copy_has_ended() -> None:
    rig = warm_rig()
    transfer = load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    seen: list[bytes] = []
    rig.launch(lambda: seen.extend(rig.kv.block(block) for block in ALL))
    rig.driver.fail("stream_write_value")
    receipts = settle(rig)
    assert receipts[transfer].outcome is Outcome.FAILED
    assert seen == [rig.slot(slot) for slot in ALL]


def test_a_piece_that_fails_opens_its_flag() -> None:
    rig = warm_rig()
    transfer = load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    ran: list[int] = []
    rig.launch(lambda: ran.append(1))
    rig.driver.fail("copy_async", 2)
    receipts = settle(rig)
    assert receipts[transfer].outcome is Outcome.FAILED
    assert ran
    assert not is_unset(rig)


def test_a_context_that_is_refused_between_two_pieces_leaves_nothing_unfenced() -> None:
    rig = warm_rig()
    transfer = load_first_piece(rig, ALL)
    rig.driver.fail("current")
    receipts = settle(rig)
    assert receipts[transfer].outcome is Outcome.FAILED
    rig.load([0], [1])
    rig.wait_until_queued()
    rig.drain_ok()


def test_closing_sets_every_flag() -> None:
    rig = warm_rig()
    rig.engine._close_timeout = 0.02
    load_first_piece(rig, ALL)
    rig.engine.order_compute_after_loads()
    flags = [flag for flag in rig.engine._flags._last if flag is not None]
    loads = rig.engine._queues[Direction.LOAD]
    loads.settle = list  # type: ignore[method-assign]
    were_set = [0]
    queue_close = loads.close

    def close(timeout: float) -> list[PendingCopy]:
        left = queue_close(timeout)
        were_set[0] = sum(flag.is_set for flag in flags)
        return left

    loads.close = close  # type: ignore[method-assign]
    rig.engine.close()
    assert were_set[0] == len(flags) == 1
    assert [receipt.outcome for receipt in rig.engine.poll()] == [Outcome.FAILED]
    rig.driver.timeline.run_all()


def test_numbers_are_used_again_go_round_and_never_back() -> None:
    driver = FakeDriver()
    flags = HostFlags(driver)
    assert not flags.is_prepared
    with driver.current():
        flags.prepare()
    made = [flags.make() for _ in range(NUM_FLAGS)]
    assert all(flag is not None and not flag.is_set for flag in made)
    assert flags.make() is None
    old = made[0]
    assert old is not None
    old.value = 0xFFFFFFFF  # the last one before the numbers go round
    ctypes.c_uint32.from_address(old.address).value = 0xFFFFFFFE
    assert not old.is_set
    old.set_now()
    new = flags.make()
    assert new is not None
    assert (new.address, new.value) == (old.address, 0)
    assert old.is_set
    assert not new.is_set
    new.set_now()
    old.set_now()  # says nothing new
    assert new.is_set
    with driver.current():
        flags.close()
        flags.close()
    assert driver.leaks() == {}
