"""Calibration on a fake device: every path timed, nothing left behind, failures survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver

from kvferry.errors import DriverError
from kvferry.settings.copy_paths import path_names
from kvferry.transfer.driver.base import BatchForm
from kvferry.transfer.job import Direction
from kvferry.transfer.paths import contract
from kvferry.transfer.paths.contract import open_paths
from kvferry.transfer.paths.direct import DmaPath, LoopPath
from kvferry.transfer.planner import choose, measure
from kvferry.transfer.planner.choose import open_planner
from kvferry.transfer.planner.measure import calibrate
from kvferry.transfer.planner.profile import profile_file

KiB = 1 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kilobytes instead of gigabytes, and no model beside."""
    monkeypatch.setattr(measure, "SEGMENT_BYTES", (4 * KiB, 16 * KiB))
    monkeypatch.setattr(measure, "NUM_BYTES", (16 * KiB, 64 * KiB))
    monkeypatch.setattr(measure, "SCATTERED_BYTES", (16 * KiB, 64 * KiB))
    monkeypatch.setattr(measure, "_time_beside_model", lambda *_: iter(()))


def test_each_path_is_timed_each_way() -> None:
    driver = FakeDriver()
    said: list[str] = []
    profile = calibrate(driver, {"dma": DmaPath(driver)}, progress=said.append)
    assert {(cell.direction, cell.path) for cell in profile.cells} == {
        (way, "dma") for way in Direction
    }
    assert {(cell.segment_bytes, cell.num_bytes) for cell in profile.cells} == {
        (4 * KiB, 16 * KiB), (4 * KiB, 64 * KiB), (16 * KiB, 16 * KiB), (16 * KiB, 64 * KiB),
    }  # fmt: skip
    assert all(cell.seconds > 0 for cell in profile.cells)
    assert profile.provenance["gpu"] == "fake"
    assert said[0] == "store, segments of 4 KiB"
    assert driver.leaks() == {}


def test_a_call_per_segment_is_for_drivers_without_the_batch() -> None:
    newest = BatchForm.WITHOUT_FAIL_INDEX
    for form, expected in ((BatchForm.ABSENT, {"loop", "dma"}), (newest, {"dma"})):
        driver = FakeDriver(batch_form=form)
        profile = calibrate(driver, {"loop": LoopPath(driver), "dma": DmaPath(driver)})
        assert {cell.path for cell in profile.cells} == expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvferry"


def test_the_planner_measures_once_and_then_reads(cache: Path) -> None:
    driver: Any = FakeDriver()
    paths = open_paths(driver, ring_bytes=1 << 20).paths
    assert set(paths) == {"loop", "dma"}  # no kernels for a driver that is not CUDA's
    first = open_planner(driver, paths)
    assert list(cache.iterdir()) == [profile_file(driver.identity(), paths)]
    calls = len(driver.calls)
    second = open_planner(driver, paths)
    assert len(driver.calls) == calls
    assert second.profile == first.profile


def test_what_was_measured_for_other_paths_is_not_planned_by(cache: Path) -> None:
    """Measured without Triton, say, and then it is installed: kernels would never be chosen."""
    driver: Any = FakeDriver()
    few = open_paths(driver, ring_bytes=1 << 20).paths
    first = open_planner(driver, few).profile
    assert first.paths == set(few)
    more = {**few, "staged": DmaPath(driver)}
    second = open_planner(driver, more).profile
    assert second.paths == set(more)
    assert {cell.path for cell in second.cells} == {"dma", "staged"}
    assert open_planner(driver, few).profile == first  # both are kept: machines have many a venv
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("cache")
def test_a_machine_that_cannot_be_measured_is_planned_for_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver: Any = FakeDriver()
    driver.fail("alloc_host")
    planner = open_planner(driver, open_paths(driver, ring_bytes=1 << 20).paths)
    assert "built-in" in planner.profile.provenance["source"]
    assert "could not be measured" in caplog.text
    assert driver.leaks() == {}


@pytest.mark.usefixtures("cache")
def test_a_pinned_path_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "calibrate", None)
    driver: Any = FakeDriver()
    paths = open_paths(driver, ring_bytes=1 << 20).paths
    assert open_planner(driver, paths, copy_path="loop").pinned == "loop"


@pytest.mark.parametrize("can_compile", [True, False])
def test_kernels_that_cannot_be_compiled_are_not_offered(
    can_compile: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Launcher:
        def __init__(self, driver: object) -> None:
            self.closed = False

        def prepare_all(self, variants: object) -> None:
            if not can_compile:
                raise DriverError("no compiler for this card", unsupported=True)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(contract, "CudaDriver", FakeDriver)
    monkeypatch.setattr(contract, "CudaLauncher", Launcher)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    opened = open_paths(FakeDriver(), ring_bytes=1 << 20)
    assert set(opened.paths) == set(path_names(with_kernels=can_compile))
    assert ("no compiler for this card" in caplog.text) is not can_compile
    opened.close()
