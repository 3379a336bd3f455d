"""The planner: what is measured, how it is kept, what is chosen by it, and why."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.driver import FakeDriver

from kvferry.errors import DriverError, InputError
from kvferry.settings.copy_paths import BY_NAME, path_names
from kvferry.transfer.driver import DeviceIdentity
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths import contract
from kvferry.transfer.paths.contract import open_paths
from kvferry.transfer.paths.direct import DmaPath
from kvferry.transfer.planner import choose, measure
from kvferry.transfer.planner.choose import Planner, open_planner
from kvferry.transfer.planner.measure import CopyRig, Timing, calibrate
from kvferry.transfer.planner.profile import (
    MOST_FILE_BYTES,
    Profile,
    builtin_cost,
    builtin_profile,
    has_profile,
    load_profile,
    profile_file,
    save_profile,
)

KiB, MiB = 1 << 10, 1 << 20
LOAD, STORE = Direction.LOAD, Direction.STORE
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"

CARD = DeviceIdentity("NVIDIA H200", 13000, "0000:00:06.0", "32.0 GT/s PCIe x16")
PATHS = frozenset(BY_NAME)


def layout(segment_bytes: int, segments: int = 64) -> GroupLayout:
    sizes = np.full(segments, segment_bytes)
    return GroupLayout(sizes, sizes, sizes, num_blocks=10)


# -- choices -----------------------------------------------------------------------------------


def test_the_builtin_profile_gives_sane_choices() -> None:
    planner = Planner(builtin_profile(), PATHS)
    small = layout(16 * KiB)
    for way in Direction:
        assert planner.choose(way, small, 1, busy=False) == "kernel"
        assert planner.choose(way, small, 256, busy=False) == "staged"
    assert planner.choose(STORE, layout(1 * KiB), 4096, False, 4096) == "kernel"  # scattered
    without = Planner(builtin_profile(), ["loop", "dma"])
    assert without.choose(LOAD, small, 64, busy=True) == "dma"
    assert Planner(builtin_profile(), ["loop"]).choose(LOAD, small, 64, busy=True) == "loop"


def test_beside_a_model_stores_take_the_ring_and_loads_one_launch() -> None:
    """A store by a kernel slows the model; a load by the ring takes many calls to queue."""
    planner = Planner(builtin_profile(), PATHS)
    assert planner.choose(STORE, layout(16 * KiB), 64, busy=True) == "staged"
    assert planner.choose(LOAD, layout(16 * KiB), 256, busy=True) == "kernel"


def test_what_compute_waits_for_goes_by_the_path_that_queues_it_at_once() -> None:
    """Also where another one copies faster: an early reader waits for the last launch."""
    large = (LOAD, layout(16 * KiB), 256, False)
    planner = Planner(builtin_profile(), PATHS)
    assert planner.choose(*large) == "staged"
    assert planner.choose(*large, at_once=True) == "kernel"
    assert Planner(builtin_profile(), PATHS, pinned="dma").choose(*large, at_once=True) == "dma"
    others = Planner(builtin_profile(), PATHS - {"kernel"})
    assert others.choose(*large, at_once=True) == "staged"


def test_a_pinned_path_overrules_and_says_so() -> None:
    planner = Planner(builtin_profile(), PATHS, pinned="dma")
    assert planner.choose(LOAD, layout(4 * KiB), 64, busy=False) == "dma"
    assert "copy_path" in planner.explain(LOAD, layout(4 * KiB), 64, busy=False)
    with pytest.raises(InputError, match="staged"):
        Planner(builtin_profile(), ["dma"], pinned="staged")


def test_by_the_timings_of_a_card_each_choice_is_within_a_twentieth_of_the_best() -> None:
    """Calibrated by one part of a published run, held against all of it."""
    timed: dict[tuple[Any, ...], dict[str, float]] = {}
    data = json.loads((BENCHMARKS / "copy-h200.json").read_text())
    for row in (*data["rows"], *data["small"]):
        if row["path"] in BY_NAME:
            what = [row[key] for key in ("direction", "segment_bytes", "num_blocks", "host_slots")]
            timed.setdefault(tuple(what), {})[row["path"]] = row["seconds"]
    costs = {}
    for way in Direction:
        for path in ("kernel", "staged"):
            jobs, seconds = [], []
            for (direction, segment, blocks, slots), found in timed.items():
                if direction == way.value and segment <= 16 * KiB and blocks * segment <= MiB:
                    jobs.append(job_of(way, segment, blocks, slots))
                    seconds.append(found[path])
            costs[way, path] = measure._fit(builtin_cost(way, path), jobs, np.array(seconds))
    planner = Planner(Profile(costs), PATHS)
    for (direction, segment, blocks, slots), found in timed.items():
        runs = blocks if slots == "scattered" else 1
        chosen = planner.choose(Direction(direction), layout(segment), blocks, False, runs)
        assert found[chosen] < 1.05 * min(found.values()), (direction, segment, blocks, slots)


def job_of(way: Direction, segment_bytes: int, num_blocks: int, slots: str) -> Any:
    blocks = np.arange(num_blocks)
    scattered = 2 if slots == "scattered" else 1
    pitch = layout(segment_bytes).block_bytes
    return CopyJob(way, layout(segment_bytes), blocks, scattered * blocks, 0, pitch)


# -- calibration -------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kilobytes instead of gigabytes."""
    monkeypatch.setattr(measure, "NUM_BYTES", (16 * KiB, 64 * KiB, 512 * KiB))
    monkeypatch.setattr(measure, "SCATTERED_BYTES", (512 * KiB,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvferry"


def kernels(driver: Any) -> dict[str, Any]:
    """Two paths under the names between which there is a choice, and one that is no match."""
    return {name: DmaPath(driver) for name in ("dma", "kernel", "staged")}


@pytest.mark.usefixtures("small")
def test_calibration_finds_the_costs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed by a clock of exact costs: a start, so much per byte, so much per run."""
    costs = {
        (way, path): replace(builtin_cost(way, path), start=start, rate=rate, per_run=per_run)
        for way in Direction
        for path, start, rate, per_run in (("kernel", 2e-5, 5e10, 0), ("staged", 4e-5, 6e10, 1e-6))
    }

    def timed(rig: CopyRig, calls: list[Any], direction: Direction, **_: Any) -> list[Timing]:
        job, names = calls[0], ("kernel", "staged")
        work = (job.num_bytes, 0, len(job.run_heads))
        return [Timing(costs[direction, name].seconds(*work), 0.0) for name in names]

    monkeypatch.setattr(CopyRig, "time_in_turn", timed)
    monkeypatch.setattr(CopyRig, "call", lambda rig, path, job: job)
    driver: Any = FakeDriver()
    found = calibrate(driver, kernels(driver)).costs
    assert found.keys() == costs.keys()
    for which, cost in costs.items():
        for name in ("start", "rate", "per_run"):
            assert getattr(found[which], name) == pytest.approx(
                getattr(cost, name), rel=1e-6, abs=1e-12
            )


@pytest.mark.usefixtures("small")
def test_the_planner_measures_once_and_then_reads(cache: Path) -> None:
    driver: Any = FakeDriver()
    paths = kernels(driver)
    assert not has_profile(driver.identity(), paths)
    first = open_planner(driver, paths)
    assert first.profile.provenance["gpu"] == "fake"
    assert driver.leaks() == {}
    assert list(cache.iterdir()) == [profile_file(driver.identity())]
    assert has_profile(driver.identity(), paths)
    calls = len(driver.calls)
    assert open_planner(driver, paths).profile == first.profile
    assert len(driver.calls) == calls


def test_without_a_choice_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "calibrate", None)
    driver: Any = FakeDriver()
    paths = open_paths(driver, ring_bytes=1 << 20).paths
    assert set(paths) == {"loop", "dma"}  # a fake has no kernels
    assert open_planner(driver, paths).choose(LOAD, layout(64), 1, False) == "dma"
    assert open_planner(driver, kernels(driver), copy_path="dma").pinned == "dma"
    assert has_profile(driver.identity(), paths)


def test_a_machine_that_cannot_be_measured_is_planned_for_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver: Any = FakeDriver()
    driver.fail("alloc_host")
    planner = open_planner(driver, kernels(driver))
    assert "built-in" in planner.profile.provenance["source"]
    assert "could not be measured" in caplog.text
    assert driver.leaks() == {}


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

    monkeypatch.setattr(contract, "CudaLauncher", Launcher)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    opened = open_paths(FakeDriver(), ring_bytes=1 << 20)
    assert set(opened.paths) == set(path_names(with_kernels=can_compile))
    assert ("no compiler for this card" in caplog.text) is not can_compile
    opened.close()


# -- profiles on disk --------------------------------------------------------------------------

MEASURED = Profile(
    {(way, path): builtin_cost(way, path) for way in Direction for path in ("kernel", "staged")},
    {"source": "a test"},
)
GOOD = MEASURED.to_json()


def test_a_profile_reads_back_as_it_was_written(cache: Path) -> None:
    file = profile_file(CARD)
    save_profile(MEASURED, file)
    assert load_profile(file, PATHS) == MEASURED
    assert list(cache.iterdir()) == [file]


def test_card_driver_and_link_have_a_file_each() -> None:
    others = [
        CARD,
        replace(CARD, name="NVIDIA H100"),
        replace(CARD, driver_version=12080),
        replace(CARD, link="16.0 GT/s PCIe x8"),
    ]
    assert len({profile_file(each) for each in others}) == len(others)
    assert profile_file(replace(CARD, pci_bus_id="0000:81:00.0")) == profile_file(CARD)
    assert profile_file(CARD).name.startswith("profile-nvidia-h200-")


def replaced(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    result = copy.copy(data)
    result[at[0]] = replaced(data[at[0]], at[1:], value)
    return result


STAGED = ("costs", "load", "staged")
NO_NUMBERS: list[Any] = [0, -1, math.nan, math.inf, -math.inf, "1", None, True, [], {}, 10**400]
NO_PROFILES = {
    "empty": "",
    "cut short": json.dumps(GOOD)[:-2],
    "not an object": "[]",
    "another version": json.dumps({**GOOD, "format": 3}),
    "without a bottom": "[" * 100_000,
    "too long": " " * (MOST_FILE_BYTES + 1),
    "no path measured": json.dumps({**GOOD, "costs": {}}),
    "an unknown path": json.dumps(replaced(GOOD, ("costs", "load"), {"teleport": {}})),
    "a path missing": json.dumps(replaced(GOOD, ("costs", "load"), {"kernel": {}})),
    "text for a terminal": json.dumps(replaced(GOOD, ("provenance", "source"), "\x1b[31m")),
    "endless text": json.dumps(replaced(GOOD, ("provenance", "source"), "a" * 2000)),
    **{
        f"{name} {number!r:.9}": json.dumps(replaced(GOOD, (*STAGED, name), number))
        for name in ("start", "rate", "per_run")
        for number in NO_NUMBERS
        if number != 0 or name == "rate"
    },
}


@pytest.mark.parametrize("text", NO_PROFILES.values(), ids=NO_PROFILES.keys())
def test_an_unusable_profile_is_ignored_and_logged_once(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, errors="surrogateescape")
    assert load_profile(file, PATHS) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert len(record.getMessage()) < 1500
