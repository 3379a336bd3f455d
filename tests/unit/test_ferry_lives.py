"""A ferry among threads, forks and forgetful callers: nothing piles up, nothing is shared."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.errors import StateError
from kvferry.rank import RankMemory

BLOCKS, TOKENS, LAYERS = 12, 4, 3
Tensors = list[np.ndarray[Any, Any]]


def tensors() -> Tensors:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(LAYERS)]


def attach(kv: Any = None, **more: Any) -> kvferry.Ferry:
    given = {"model": "m", "block_tokens": TOKENS, "host": "64KiB", **more}
    return kvferry.attach(tensors() if kv is None else kv, **given)


@pytest.fixture
def ferry() -> Iterator[kvferry.Ferry]:
    with attach() as ferry:
        yield ferry


def in_a_thread(work: Callable[[], object], name: str = "other") -> BaseException | None:
    """What ``work`` raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return raised[0] if raised else None


# -- threads -------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_by_name(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(TOKENS))
    hit = ferry.match(keys)
    for use in (
        lambda: ferry.match(keys),
        lambda: ferry.load(hit, []),
        lambda: ferry.release(hit),
        lambda: ferry.store(keys, [0]),
        lambda: ferry.wait(ferry.store(keys, [0])),
        lambda: ferry.note_prefill(1, 1.0),
        lambda: ferry.explain(hit),
        ferry.poll,
        ferry.reset,
        ferry.stats,
        ferry.serve_metrics,
        ferry.hand_over,
        ferry.close,
    ):
        error = in_a_thread(use, name="second")
        assert isinstance(error, StateError), use
        assert "belongs to thread 'MainThread', but 'second' used it" in str(error)
    assert in_a_thread(lambda: ferry.keys(range(TOKENS))) is None
    assert in_a_thread(ferry.host_stats) is None
    assert ferry.wait(ferry.store(keys, [0])).num_blocks == 1


def test_four_threads_at_once_break_nothing(ferry: kvferry.Ferry) -> None:
    """They broke the pool's free list."""
    barrier = threading.Barrier(4)
    rng = np.random.default_rng(1)
    starts = rng.integers(0, 10**6, (4, 60))
    refused = []

    def work(number: int) -> None:
        barrier.wait()
        try:
            for start in starts[number].tolist():
                keys = ferry.keys(range(start, start + 3 * TOKENS))
                ferry.wait(ferry.store(keys, [0, 1, 2]))
                hit = ferry.match(keys)
                ferry.wait(ferry.load(hit, [3, 4, 5][: len(hit)]))
        except StateError as error:
            refused.append(error)
        finally:
            barrier.wait(20)  # an owner that has ended may be followed by another

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    ferry._scheduler.check_integrity()


def test_attaching_is_no_use_and_a_thread_that_ended_owns_nothing() -> None:
    ferry = attach(metrics_port=None)
    keys = ferry.keys(range(TOKENS))
    assert in_a_thread(lambda: ferry.wait(ferry.store(keys, [0]))) is None
    assert len(ferry.match(keys)) == 1  # the thread is gone: it is ours
    assert in_a_thread(ferry.poll) is not None
    ferry.hand_over()
    assert in_a_thread(ferry.poll) is None
    ferry.close()
    assert in_a_thread(ferry.close) is None


# -- forks ---------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], object]) -> str:
    """What ``work`` says in a forked child, or raises there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads beside a fork: that is it
        child = os.fork()
    if child == 0:
        try:
            said = f"{work()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 20)
    said = os.read(reader, 10_000).decode() if ready else "it never came back"
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_refused_and_the_parent_goes_on(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(2 * TOKENS))
    ferry.wait(ferry.store(keys, [0, 1]))
    for use in (
        lambda: ferry.wait(ferry.load(ferry.match(keys), [2, 3])),
        lambda: ferry.wait(ferry.store(ferry.keys(range(90, 99)), [2, 3])),
        ferry.poll,
        ferry.stats,
    ):
        assert in_a_child(use).startswith("StateError: this ferry was made before this process")
    assert in_a_child(lambda: ferry.keys(range(2 * TOKENS)) == keys) == "True"
    assert ferry.wait(ferry.load(ferry.match(keys), [2, 3])).ok


def test_a_forked_child_leaves_the_with_block_in_peace(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(TOKENS))
    ferry.wait(ferry.store(keys, [0]))
    assert in_a_child(ferry.close) == "None"
    holder = [attach()]

    def drop() -> str:
        holder.clear()
        gc.collect()
        return "dropped"

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        assert in_a_child(drop) == "dropped"
    holder[0].close()
    assert ferry.wait(ferry.load(ferry.match(keys), [1])).ok


# -- dropped without close -----------------------------------------------------------------------


def ferry_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kvferry-")]


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def eventually(true: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + 60
    while not true():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("serving", [False, True])
def test_dropped_ferries_leave_no_threads_and_no_memory(serving: bool) -> None:
    before, size = ferry_threads(), resident()

    def drop(number: int) -> None:
        ferry = attach([np.zeros((BLOCKS, 1 << 16), np.uint8)], host="16MiB")
        ferry.store(ferry.keys(range(number, number + 3 * TOKENS)), [0, 1, 2])
        if serving:
            ferry.serve_metrics(0)

    for number in range(20):
        with pytest.warns(ResourceWarning, match=r"Ferry was dropped without close\(\)"):
            drop(number)
    assert eventually(lambda: ferry_threads() == before), ferry_threads()
    gc.collect()  # a web server is a knot of its own
    assert eventually(lambda: resident() - size < 3 * 16 * 2**20), resident() - size


def test_a_dropped_ferry_finishes_its_copies_before_the_tensors_go() -> None:
    kv, go_on, seen = tensors(), threading.Event(), []
    expected = b"".join(layer[3].tobytes() for layer in kv)
    holder = [attach(kv)]
    del kv
    engine: Any = holder[0]._rank.engine
    move = engine._move

    def slow(job: Any) -> None:
        assert go_on.wait(60)
        move(job)
        seen.append(engine._host[job.host_slots].tobytes())

    engine._move = slow
    holder[0].store(holder[0].keys(range(TOKENS)), [3])
    with pytest.warns(ResourceWarning):
        holder.clear()
    churn = [np.full((BLOCKS, 2, TOKENS, 8), 0xEE, np.uint8) for _ in range(200)]
    go_on.set()
    assert eventually(lambda: bool(seen))
    assert seen == [expected]
    del churn
    assert eventually(lambda: not ferry_threads())


def test_the_tensors_live_until_the_last_copy_of_a_closing_ferry() -> None:
    kv = np.zeros((BLOCKS, 64), np.uint8)
    tensor = weakref.ref(kv)
    ferry = attach([kv])
    del kv
    alive: list[bool] = []
    engine: Any = ferry._rank.engine
    ferry.store(ferry.keys(range(TOKENS)), [3])
    engine._stores.run(lambda: time.sleep(0.05))
    engine._stores.run(lambda: alive.append(tensor() is not None))
    ferry.close()
    assert alive == [True]


def test_a_cycle_that_holds_a_ferry_is_collected_from_its_own_thread() -> None:
    """The collector may run in the very copy thread that closing waits for."""
    ferry = attach()
    engine: Any = ferry._rank.engine
    go_on, collected = threading.Event(), threading.Event()

    def collect() -> None:
        assert go_on.wait(60)
        gc.collect()
        collected.set()

    def let_it_collect() -> None:
        go_on.set()
        collected.wait(60)

    engine._stores.run(collect)
    cycle: list[Any] = [ferry]
    cycle.append(cycle)
    gc.disable()
    try:
        del ferry, engine, cycle
        with pytest.warns(ResourceWarning):
            let_it_collect()
    finally:
        gc.enable()
    assert collected.is_set()
    assert eventually(lambda: not ferry_threads())


# -- forgetful callers ---------------------------------------------------------------------------


def test_ends_that_nobody_asks_for_are_bounded_and_the_newest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.tickets._MOST_UNREPORTED", 100)
    with attach() as ferry:
        keys = ferry.keys(range(TOKENS))
        ferry.wait(ferry.store(keys, [0]))
        tickets = [ferry.store(keys, [0]) for _ in range(1000)]
        assert ferry.wait(tickets[0]).ok
        assert ferry.wait(tickets[950]).ok
        assert ferry.poll() == [*tickets[900:950], *tickets[951:]]
        assert ferry.poll() == []


def test_a_hit_of_another_ferry_is_gone_here() -> None:
    """Both were called hit-0: the wrong tokens' blocks were loaded."""
    with attach() as one, attach(model="n") as other:
        keys = one.keys(range(TOKENS))
        theirs = other.keys(range(50, 50 + TOKENS))
        one.wait(one.store(keys, [0]))
        other.wait(other.store(theirs, [1]))
        mine, foreign = one.match(keys), other.match(theirs)
        done = one.wait(one.load(foreign, [5]))
        assert (done.ok, done.num_blocks) == (False, 0)
        one.release(foreign)
        assert one.wait(one.load(mine, [5])).ok
        assert other.wait(other.load(foreign, [5])).ok


# -- growth --------------------------------------------------------------------------------------


def test_a_store_finds_the_memory_that_has_grown_since_the_last_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits until host memory is whole, and then stores, has not polled since."""
    ready = [2]
    monkeypatch.setattr(RankMemory, "ready_slots", property(lambda _: ready[0]))
    with attach() as ferry:
        assert ferry.poll() == []
        ready[0] = ferry.host_stats().num_slots
        ticket = ferry.store(ferry.keys(range(5 * TOKENS)), list(range(5)))
        assert ferry.wait(ticket).num_blocks == 5
