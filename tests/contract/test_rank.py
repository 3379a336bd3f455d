"""A rank opened whole: it serves while it grows, unpinned if it must; nothing is left after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv

from kvferry.config import Config
from kvferry.device.planning import opening
from kvferry.device.planning.builtin_profile import builtin_profile
from kvferry.device.planning.profile import Profile
from kvferry.errors import ConfigError, InputError
from kvferry.rank import Activity, RankMemory, open_on_cpu, open_on_gpu
from kvferry.types import DEVICE, HOST, Outcome, Transfer, TransferId, as_slots

KV = make_kv("split")


def settings(**more: object) -> Config:
    return Config.from_dict({"host": "1MiB", "copy_path": "dma", **more})


def copies_right(rank: RankMemory) -> str:
    """Store a block, lose it, load it; returns the path the copies took."""
    content = KV.block(4)
    rank.engine.submit(Transfer(TransferId(1), DEVICE, HOST, as_slots([4]), as_slots([2])))
    stored = drain(rank)
    assert rank.host.tier.rows[2].tobytes() == content
    KV.set_block(4, bytes(len(content)))
    rank.engine.submit(Transfer(TransferId(2), HOST, DEVICE, as_slots([2]), as_slots([4])))
    assert drain(rank) == stored
    assert KV.block(4) == content
    return stored


def drain(rank: RankMemory) -> str:
    (receipt,) = rank.engine.drain(5.0)
    assert receipt.outcome is Outcome.OK, receipt.reason
    return receipt.path


def fake_driver() -> FakeDriver:
    driver = FakeDriver()
    for memory in KV.memory:
        driver.adopt(memory)
    return driver


def test_on_a_gpu_it_is_pinned_copies_and_gives_everything_back() -> None:
    driver = fake_driver()
    rank = open_on_gpu([KV.layout], settings(), driver=driver, compute_stream=lambda: 0)
    assert rank.host.is_pinned
    assert rank.host.growth.wait(5)
    assert rank.ready_slots == rank.host.num_slots
    assert copies_right(rank) == "dma"
    rank.note_step()
    rank.close()
    rank.close()
    assert driver.leaks() == {}


def test_where_nothing_can_be_pinned_copies_go_through_the_driver_and_are_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = fake_driver()
    driver.fail("register_host")
    rank = open_on_gpu([KV.layout], settings(), driver=driver, compute_stream=lambda: 0)
    driver.adopt(rank.host.tier.bytes)  # a real driver copies from and to any memory
    assert not rank.host.is_pinned
    assert copies_right(rank) == "loop"
    rank.close()
    assert driver.leaks() == {}
    assert "cannot be pinned" in caplog.text


def test_a_refusal_while_opening_leaves_nothing_behind() -> None:
    driver = fake_driver()
    driver.fail("register_host")
    with pytest.raises(ConfigError, match="host_pin: required"):
        open_on_gpu(
            [KV.layout],
            settings(host_pin="required"),
            driver=driver,
            compute_stream=lambda: 0,
        )
    kernel = settings(copy_path="kernel")  # this driver has none
    with pytest.raises(InputError, match="'kernel' is pinned"):
        open_on_gpu([KV.layout], kernel, driver=driver, compute_stream=lambda: 0)
    assert driver.leaks() == {}


def test_a_machine_is_measured_before_its_host_memory_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning beside a calibration would be measured with it."""
    driver = fake_driver()
    pinned_before: list[int] = []

    def measure(*_: object, **__: object) -> Profile:
        pinned_before.append(driver.calls.count("register_host"))
        return builtin_profile()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(opening, "calibrate", measure)
    auto = settings(copy_path="auto")
    rank = open_on_gpu([KV.layout], auto, driver=driver, compute_stream=lambda: 0)
    assert rank.host.growth.wait(5)
    assert pinned_before == [0]
    assert "register_host" in driver.calls
    rank.close()
    assert driver.leaks() == {}


def test_on_a_cpu_the_same_calls_serve() -> None:
    rank = open_on_cpu([KV.layout], settings())
    assert copies_right(rank) == "cpu"
    rank.note_step()
    rank.close()
    rank.close()


def test_an_engine_that_is_stuck_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    rank = open_on_cpu([KV.layout], settings())

    class Stuck:
        is_stuck = True

        def close(self) -> None: ...

    engine, rank.engine = rank.engine, Stuck()  # type: ignore[assignment]
    rank.close()
    assert "a copy never ended" in caplog.text
    assert np.asarray(rank.host.tier.rows).size
    rank.engine = engine
    rank.close()


def test_a_model_is_busy_for_a_while_after_it_was_given_work() -> None:
    now = 100.0
    activity = Activity(lambda: now)
    assert not activity.is_busy()
    activity.note()
    assert activity.is_busy()
    now += 1.0
    assert not activity.is_busy()


def test_an_engine_that_starts_is_busy_until_it_says_that_it_has_started() -> None:
    """Else host memory is pinned at full speed beside its graphs' capture, and holds that back."""
    now = 100.0
    starting = Activity(lambda: now, is_starting=True)
    now += 60.0
    assert starting.is_busy()
    starting.note_started()
    assert not starting.is_busy()
    stepping = Activity(lambda: now, is_starting=True)
    stepping.note()  # a vLLM that asks for no handshake still steps
    now += 1.0
    assert not stepping.is_busy()
