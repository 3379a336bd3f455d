"""A rank opened whole: it serves while it grows, unpinned if it must; nothing is left after."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.driver import FakeDriver
from tests.fakes.host_launcher import HostLauncher
from tests.fakes.kv import make_kv

from kvferry.cache.slots import as_slots
from kvferry.config import Config
from kvferry.errors import ClosedError, ConfigError
from kvferry.rank import Activity, RankMemory
from kvferry.transfer.paths import opening
from kvferry.types import DEVICE, HOST, Outcome, Plan, TierName, Transfer, TransferId

KV = make_kv("split")


def settings(**more: object) -> Config:
    return Config.from_dict({"host": "1MiB", **more})


def copies_right(rank: RankMemory) -> list[str]:
    """Store a block, lose it, load it; returns the paths the copies took."""
    content = KV.block(4)
    rank.engine.submit(Transfer(TransferId(1), DEVICE, HOST, as_slots([4]), as_slots([2])))
    stored = drain(rank)
    assert rank.host.tier.rows[2].tobytes() == content
    KV.set_block(4, bytes(len(content)))
    rank.engine.submit(Transfer(TransferId(2), HOST, DEVICE, as_slots([2]), as_slots([4])))
    loaded = drain(rank)
    assert KV.block(4) == content
    return [stored, loaded]


def drain(rank: RankMemory) -> str:
    (receipt,) = rank.engine.drain(60.0)
    assert receipt.outcome is Outcome.OK, receipt.reason
    return receipt.path


def fake_driver() -> FakeDriver:
    driver = FakeDriver()
    for memory in KV.memory:
        driver.adopt(memory)
    return driver


def test_on_a_gpu_it_is_pinned_copies_and_gives_everything_back() -> None:
    driver = fake_driver()
    rank = RankMemory.open([KV.layout], settings(), driver=driver, compute_stream=lambda: 0)
    assert rank.host.is_pinned
    assert rank.host.wait(60)
    assert rank.ready_slots == rank.host.num_slots
    assert copies_right(rank) == 2 * ["dma"]
    rank.activity.note_step()
    rank.close()
    rank.close()
    assert driver.leaks() == {}


def test_where_nothing_can_be_pinned_copies_go_through_the_driver_and_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = fake_driver()
    driver.fail("register_host")
    rank = RankMemory.open([KV.layout], settings(), driver=driver, compute_stream=lambda: 0)
    driver.adopt(rank.host._bytes)  # a real driver copies from and to any memory
    assert not rank.host.is_pinned
    assert copies_right(rank) == 2 * ["dma"]
    assert "copy_batch_async" not in driver.calls
    rank.close()
    assert driver.leaks() == {}
    assert "cannot be pinned" in caplog.text


def test_a_refusal_while_opening_leaves_nothing_behind() -> None:
    driver = fake_driver()
    driver.fail("register_host")
    with pytest.raises(ConfigError, match="host_pin: required"):
        RankMemory.open(
            [KV.layout],
            settings(host_pin="required"),
            driver=driver,
            compute_stream=lambda: 0,
        )
    assert driver.leaks() == {}


def test_the_first_transfers_find_everything_made(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver()
    launcher = HostLauncher(driver)
    monkeypatch.setattr(opening, "open_launcher", lambda _: launcher)
    rank = RankMemory.open([KV.layout], settings(), driver=driver, compute_stream=lambda: 0)
    assert rank.host.wait(60)
    driver.calls.clear()
    monkeypatch.setattr(launcher, "prepare", None)
    assert copies_right(rank) == ["staged", "kernel"]
    slots = as_slots([0, 1, 2])
    rank.engine.submit(Transfer(TransferId(3), DEVICE, HOST, slots, slots))
    drain(rank)
    rank.engine.submit(Transfer(TransferId(4), HOST, DEVICE, slots, slots, in_parts=True))
    drain(rank)
    made = {call for call in driver.calls if call.startswith(("alloc", "create_stream"))}
    assert not made
    rank.close()
    assert driver.leaks() == {}


def below(number: int, src: TierName, dst: TierName, from_slot: int, to_slot: int) -> Transfer:
    slots = as_slots([from_slot]), as_slots([to_slot])
    return Transfer(TransferId(number), src, dst, *slots, keys=keys([1]).array, within=60.0)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_tiers_are_opened_with_a_rank_and_closed_before_its_memory(on_gpu: bool) -> None:
    driver = fake_driver()
    config = settings(tiers="memory:1MiB, memory-by-key:1MiB")
    if on_gpu:
        rank = RankMemory.open([KV.layout], config, driver=driver, compute_stream=lambda: 0)
    else:
        rank = RankMemory.open([KV.layout], config)
    assert list(rank.tiers) == ["memory", "memory-by-key"]
    assert rank.host.wait(60)
    rank.host.tier.rows[3] = 7
    name = TierName("memory")
    mover = rank.tiers[name]
    for order in (below(1, HOST, name, 3, 0), below(2, name, HOST, 0, 5)):
        mover.submit(order)
        assert [receipt.outcome for receipt in mover.drain(60)] == [Outcome.OK]
    assert (rank.host.tier.rows[5] == 7).all()
    rank.close()
    rank.close()
    with pytest.raises(ClosedError):
        mover.submit(below(3, HOST, name, 3, 0))
    assert driver.leaks() == {}


def test_a_tier_that_cannot_be_opened_takes_the_rank_back() -> None:
    driver = fake_driver()
    for tiers in ("memory:1B", "memory:1MiB, no_such_package.x:y"):
        with pytest.raises(ConfigError, match="tiers: "):
            RankMemory.open(
                [KV.layout], settings(tiers=tiers), driver=driver, compute_stream=lambda: 0
            )
        with pytest.raises(ConfigError, match="tiers: "):
            RankMemory.open([KV.layout], settings(tiers=tiers))
    assert driver.leaks() == {}


def test_a_tier_that_hangs_does_not_hang_the_close_and_keeps_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.tiers.movers._abandoned_memory", [])
    rank = RankMemory.open([KV.layout], settings(tiers="memory:1MiB"))
    name, hung = TierName("memory"), threading.Event()
    mover = rank.tiers[name]
    mover._close_seconds = 0.05
    monkeypatch.setattr(mover._tier, "_move", lambda *_: str(hung.wait(20)))
    mover.submit(below(1, HOST, name, 3, 0))
    while not next(iter(mover._tier._tasks.values())).is_begun:  # type: ignore[attr-defined]
        time.sleep(0.001)
    rank.close()
    assert "a copy never ended" in caplog.text
    rank.host.tier.rows[3] = 9  # still mapped
    hung.set()
    for thread in mover._tier._threads:  # type: ignore[attr-defined]
        thread.join(10)  # it touches the memory, which this test gives back
    rank.host.close()


def test_an_engine_that_is_stuck_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    rank = RankMemory.open([KV.layout], settings())

    class Stuck:
        is_stuck = True

        def close(self) -> None: ...

    engine, rank.engine = rank.engine, Stuck()  # type: ignore[assignment]
    rank.close()
    assert "a copy never ended" in caplog.text
    assert np.asarray(rank.host.tier.rows).size
    rank.engine = engine
    rank.close()


def test_an_engine_that_starts_is_busy_until_it_says_that_it_has_started() -> None:
    """Else host memory is pinned at full speed beside its graphs' capture, and holds that back."""
    now = 100.0
    starting = Activity(lambda: now, is_starting=True)
    now += 60.0
    assert starting.is_busy()
    starting.note_started()
    assert not starting.is_busy()
    stepping = Activity(lambda: now, is_starting=True)
    stepping.note_step()  # a vLLM that asks for no handshake still steps
    now += 1.0
    assert not stepping.is_busy()


def test_as_many_slots_are_wanted_as_were_to_be_written() -> None:
    """Loads want none. Seen red with every transfer counted, and with none."""
    activity = Activity(is_starting=True)
    rank = RankMemory.open([KV.layout], settings())
    rank.activity = activity
    store = Transfer(TransferId(1), DEVICE, HOST, as_slots([4, 5]), as_slots([2, 3]))
    load = Transfer(TransferId(2), HOST, DEVICE, as_slots([2]), as_slots([4]))
    up = Transfer(TransferId(3), TierName("disk"), HOST, as_slots([0]), as_slots([1]))
    rank.activity.note_started()
    assert activity.num_written == float("inf"), "nobody has said what is written"
    rank.activity.note_plan(Plan(1, (load,)))
    assert activity.num_written == 0
    rank.activity.note_plan(Plan(2, (store, load, up)))
    assert activity.num_written == 3
    rank.close()
