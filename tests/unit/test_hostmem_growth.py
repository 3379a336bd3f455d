"""Host memory that becomes usable chunk by chunk: what is ready, pinned, and goes wrong."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.registrar import FakeRegistrar

from kvferry.core.quantities import GiB, MiB
from kvferry.errors import ConfigError
from kvferry.hostmem import memory as memory_module
from kvferry.hostmem import slots as slots_module
from kvferry.hostmem.limits import Machine
from kvferry.hostmem.memory import HostMemory
from kvferry.hostmem.slots import CHUNK_BYTES, Chunks

PAGE = mmap.PAGESIZE
LONG = 60.0
"""Nothing takes so long, also on a machine that is busy."""


def until(condition, seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.001)


class Meminfo:
    """A machine whose memory shrinks by what was asked of it, if it is told to."""

    def __init__(self, left: int, total: int = 64 * GiB) -> None:
        self.left = left
        self.total = total

    def __call__(self, path: str) -> str | None:
        if path != "/proc/meminfo":
            return None
        return f"MemTotal: {self.total >> 10} kB\nMemAvailable: {self.left >> 10} kB\n"

    def machine(self) -> Machine:
        return Machine(read=self, env={})


def growing(num_slots: int, **more: Any) -> HostMemory:
    """Slots of a page, four of them in a chunk."""
    given = {"chunk_bytes": 4 * PAGE, "machine": Meminfo(32 * GiB).machine(), **more}
    return HostMemory(num_slots * PAGE, PAGE, **given)


@given(
    slot=st.integers(1, 3 * PAGE),
    num_slots=st.integers(1, 300),
    pages=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_bytes_written_while_it_grows_stay(slot: int, num_slots: int, pages: int, seed: int):
    registrar = FakeRegistrar(seconds=0.0005)
    size = Chunks.lay_out(num_slots, slot, pages * PAGE).num_bytes
    growth = HostMemory(
        size,
        slot,
        registrar=registrar,
        chunk_bytes=pages * PAGE,
        machine=Meminfo(32 * GiB).machine(),
    )
    host, num_slots = growth.tier, growth.num_slots
    step = host.chunks.slots_per_chunk
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 256, (num_slots, slot), dtype=np.uint8)
    written = 0
    while written < num_slots:
        ready = growth.ready_slots
        assert ready >= written, "ready slots never become fewer"
        held = set(registrar.held)
        assert all(host.address + start * host.pitch in held for start in range(0, ready, step))
        slots = np.arange(written, ready)
        host.rows[slots] = wanted[slots]
        if written == ready:
            time.sleep(0.0002)  # the growing thread needs the interpreter, too
        written = ready
    got = np.empty_like(wanted)
    got[:] = host.rows
    assert np.array_equal(got, wanted)
    ends = {host.address + s * host.pitch for s in range(num_slots)}
    assert growth.wait(LONG)
    assert set(registrar.held) <= ends, "a registration begins inside a slot"
    growth.close()
    assert registrar.held == {}


def test_beside_a_busy_model_one_chunk_at_a_time_is_pinned_with_nine_times_as_long_a_rest() -> None:
    spans: list[tuple[float, float]] = []

    class Watched(FakeRegistrar):
        def register_host(self, address: int, num_bytes: int) -> None:
            began = time.monotonic()
            super().register_host(address, num_bytes)
            spans.append((began, time.monotonic()))

    registrar = Watched(seconds=0.002)
    busy = threading.Event()
    busy.set()
    growth = growing(400, registrar=registrar, busy=busy.is_set, num_threads=8)
    until(lambda: registrar.num_calls > 8)
    assert registrar.most_at_once == 1
    beside = spans[1:8]  # the first chunk is pinned before the growth looks at the model
    for (began, ended), (after, _) in itertools.pairwise(beside):
        assert after - ended >= 9 * (ended - began) * 0.99
    busy.clear()
    assert growth.wait(LONG)
    assert growth.ready_slots == 400
    assert registrar.most_at_once > 1, "all threads, once the model is idle"
    growth.close()


def test_beside_a_busy_model_what_is_not_needed_yet_hardly_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until more is wanted: then it goes on as if nothing had been said about that."""
    monkeypatch.setattr(memory_module, "_MOST_UNUSED_BYTES", 100 * PAGE)
    monkeypatch.setattr(memory_module, "_PIN_PAUSE_FACTOR", 1.0)
    wanted = [0]
    growth = growing(
        400, registrar=FakeRegistrar(seconds=1e-4), busy=lambda: True, wanted=lambda: wanted[0]
    )
    until(lambda: growth.ready_slots >= 100)
    time.sleep(0.05)
    most = 100 + 4
    assert growth.ready_slots <= most
    wanted[0] = 200
    until(lambda: growth.ready_slots >= 300)
    time.sleep(0.05)
    assert growth.ready_slots <= most + 200
    wanted[0] = 10**6
    assert growth.wait(LONG)
    assert growth.ready_slots == 400
    growth.close()


@pytest.mark.parametrize("nth", [2, 5, 9])
def test_a_refused_chunk_leaves_the_pool_smaller(
    nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = FakeRegistrar(fail_at=nth)
    growth = growing(40, registrar=registrar)
    assert growth.wait(LONG)
    stats = growth.stats()
    assert not stats.is_growing
    assert 4 <= growth.ready_slots < 40
    assert "refused" in stats.reason
    assert "refused" in caplog.text
    # What lies behind the hole cannot be used, so it is not kept pinned.
    assert stats.pinned_bytes == stats.ready_bytes == sum(registrar.held.values())
    growth.tier.rows[: growth.ready_slots] = 1
    growth.close()
    assert registrar.held == {}


def test_a_process_that_may_have_few_threads_grows_with_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kvferry-grow") and int(thread.name[-1]) >= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    registrar = FakeRegistrar()
    growth = growing(40, registrar=registrar)
    assert growth.wait(LONG)
    assert growth.stats().is_whole
    growth.close()
    assert not registrar.held


def test_a_busy_signal_that_breaks_stops_the_growth_and_nothing_else() -> None:
    def broken() -> bool:
        raise ValueError("no stream")

    growth = growing(40, busy=broken)
    assert growth.wait(LONG)
    assert not growth.stats().is_whole
    assert "ValueError: no stream" in growth.stats().reason
    growth.close()


def test_a_driver_that_pins_nothing_means_unpinned_and_correct(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = FakeRegistrar(always_fails=True)
    meminfo = Meminfo(32 * GiB)
    with HostMemory(
        16 * MiB, PAGE, registrar=registrar, machine=meminfo.machine(), chunk_bytes=MiB
    ) as host:
        assert host.wait(LONG)
        assert not host.is_pinned
        assert host.ready_slots == host.num_slots == 16 * MiB // PAGE
        host.tier.rows[:] = 3
        assert (host.tier.rows == 3).all()
        assert host.stats().is_whole
        assert "cannot be pinned" in host.stats().reason
    assert registrar.num_calls == 1
    assert "Copies are correct but slow" in caplog.text


def test_where_pinning_is_required_its_refusal_is_ours() -> None:
    with pytest.raises(ConfigError, match="required, but host memory cannot be pinned"):
        HostMemory(
            16 * MiB,
            PAGE,
            registrar=FakeRegistrar(always_fails=True),
            pin="required",
            machine=Meminfo(32 * GiB).machine(),
        )
    with pytest.raises(ConfigError, match="there is no driver"):
        HostMemory(16 * MiB, PAGE, pin="required")


def test_memory_that_runs_out_stops_the_growth_before_the_kernel_does() -> None:
    meminfo = Meminfo(32 * GiB)

    class Eating(FakeRegistrar):
        def register_host(self, address: int, num_bytes: int) -> None:
            super().register_host(address, num_bytes)
            if self.num_calls >= 4:
                meminfo.left = GiB  # someone else took it

    growth = growing(4000, registrar=Eating(), machine=meminfo.machine())
    assert growth.wait(LONG)
    stats = growth.stats()
    assert not stats.is_growing
    assert 4 <= growth.ready_slots < 4000
    assert "the machine's memory has only 1GiB left of 64GiB" in stats.reason
    growth.close()


def test_no_pages_for_the_first_chunk_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(memory: np.ndarray) -> None:
        raise OSError(12, "got no pages")

    monkeypatch.setattr(memory_module, "populate", none_left)
    with pytest.raises(ConfigError, match="not even the first chunk could be had"):
        growing(8)


def test_an_old_kernel_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_MADV_POPULATE_WRITE", 9999)
    growth = growing(40)
    assert growth.wait(LONG)
    assert growth.ready_slots == 40
    growth.close()


def test_close_during_growth_is_quick_and_gives_everything_back() -> None:
    registrar = FakeRegistrar(seconds=0.01)
    growth = growing(100_000, registrar=registrar)
    until(lambda: registrar.num_calls > 1)
    growth.close()
    assert registrar.num_calls < 25_000, "it did not wait for all of it"
    assert registrar.held == {}
    assert not growth.stats().is_whole


def test_a_driver_that_never_answers_is_left_with_its_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar = FakeRegistrar()
    monkeypatch.setattr(memory_module, "_CLOSE_SECONDS", 0.05)

    def close_the_gate() -> bool:
        registrar.gate.clear()
        return False

    growth = growing(40, registrar=registrar, busy=close_the_gate)
    until(lambda: registrar.num_calls > 1)
    growth.close()
    assert "stuck" in caplog.text
    assert growth.ready_slots >= 4  # nothing was taken away under the driver
    registrar.gate.set()
    assert growth.wait(LONG)
    growth.close()


def test_a_refused_unregistration_is_logged_and_the_rest_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registrar = FakeRegistrar()
    growth = growing(40, registrar=registrar)
    assert growth.wait(LONG)
    lost = next(iter(registrar.held))
    del registrar.held[lost]
    growth.close()
    assert "stays registered" in caplog.text
    assert registrar.held == {}


@given(asked=st.integers(2 * PAGE, 8 * MiB), slot=st.integers(1, 2 * PAGE))
@settings(max_examples=30)
def test_never_more_than_asked_by_a_page_nor_less_by_a_slot(asked: int, slot: int) -> None:
    with HostMemory(
        asked, slot, machine=Meminfo(32 * GiB).machine(), chunk_bytes=64 * PAGE
    ) as host:
        taken = host.tier.chunks.num_bytes
        assert taken <= asked + PAGE
        assert host.num_slots >= 1
        assert taken > asked - 2 * host.tier.pitch - asked // 4096 - PAGE


# -- cuts fall between slots and between pages ---------------------------------------------------

slot_sizes = st.one_of(
    st.integers(1, 1 << 27),
    st.integers(0, 24).map(lambda power: 1 << power),
    st.integers(1, 24).map(lambda power: (1 << power) + 1),
    st.integers(1, 24).map(lambda power: (1 << power) - 1),
)
chunk_sizes = st.one_of(st.just(CHUNK_BYTES), st.integers(PAGE, 1 << 28))


@given(num_slots=st.integers(1, 1 << 24), slot=slot_sizes, wanted=chunk_sizes)
def test_cuts_fall_between_slots_and_between_pages(num_slots: int, slot: int, wanted: int) -> None:
    chunks = Chunks.lay_out(num_slots, slot, wanted)
    assert chunks.pitch >= slot
    assert chunks.chunk_bytes % PAGE == 0
    assert chunks.chunk_bytes % chunks.pitch == 0
    assert chunks.chunk_bytes <= max(wanted, chunks.pitch)
    for index in {0, len(chunks) // 2, len(chunks) - 1}:
        chunk = chunks[index]
        assert chunk.start == index * chunks.chunk_bytes
        assert chunk.start + chunk.num_bytes >= chunk.slots_after * chunks.pitch
        assert chunk.num_bytes % PAGE == 0
        # Nothing of the last slot lies in the next chunk, nothing of the next one in this.
        assert (chunk.slots_after - 1) * chunks.pitch + slot <= chunk.start + chunk.num_bytes
    last = chunks[len(chunks) - 1]
    assert last.slots_after == num_slots
    assert last.start + last.num_bytes == chunks.num_bytes
