"""The planner: which path copies what, by the costs of a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.driver import FakeDriver

from kvferry.errors import DriverError, InputError
from kvferry.settings.copy_paths import BY_NAME, path_names
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths import contract
from kvferry.transfer.paths.contract import open_paths
from kvferry.transfer.planner import Planner

KiB = 1 << 10
LOAD, STORE = Direction.LOAD, Direction.STORE
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
PATHS = frozenset(BY_NAME)


def layout(segment_bytes: int, segments: int = 64) -> GroupLayout:
    sizes = np.full(segments, segment_bytes)
    return GroupLayout(sizes, sizes, sizes, num_blocks=10)


def test_small_copies_start_soon_and_large_ones_run_fast() -> None:
    planner = Planner(PATHS)
    small = layout(16 * KiB)
    for way in Direction:
        assert planner.choose(way, small, 1, busy=False) == "kernel"
        assert planner.choose(way, small, 256, busy=False) == "staged"
    assert planner.choose(STORE, layout(1 * KiB), 4096, False, 4096) == "kernel"  # scattered
    assert Planner(["loop", "dma"]).choose(LOAD, small, 64, busy=True) == "dma"
    assert Planner(["loop"]).choose(LOAD, small, 64, busy=True) == "loop"


def test_beside_a_model_stores_take_the_ring_and_loads_one_launch() -> None:
    """A store by a kernel slows the model; a load by the ring takes many calls to queue."""
    planner = Planner(PATHS)
    assert planner.choose(STORE, layout(16 * KiB), 64, busy=True) == "staged"
    assert planner.choose(LOAD, layout(16 * KiB), 256, busy=True) == "kernel"


def test_what_compute_waits_for_goes_by_the_path_that_queues_it_at_once() -> None:
    """Also where another one copies faster: an early reader waits for the last launch."""
    large = (LOAD, layout(16 * KiB), 256, False)
    planner = Planner(PATHS)
    assert planner.choose(*large) == "staged"
    assert planner.choose(*large, at_once=True) == "kernel"
    assert Planner(PATHS, "dma").choose(*large, at_once=True) == "dma"
    assert Planner(PATHS - {"kernel"}).choose(*large, at_once=True) == "staged"


def test_the_setting_overrules_the_costs() -> None:
    assert Planner(PATHS, "dma").choose(LOAD, layout(4 * KiB), 64, busy=False) == "dma"
    with pytest.raises(InputError, match="staged"):
        Planner(["dma"], "staged")


def test_by_the_timings_of_a_card_each_choice_is_within_a_twentieth_of_the_best() -> None:
    timed: dict[tuple[Any, ...], dict[str, float]] = {}
    data = json.loads((BENCHMARKS / "copy-h200.json").read_text())
    for row in (*data["rows"], *data["small"]):
        if row["path"] in BY_NAME:
            what = [row[key] for key in ("direction", "segment_bytes", "num_blocks", "host_slots")]
            timed.setdefault(tuple(what), {})[row["path"]] = row["seconds"]
    assert len(timed) == 74
    planner = Planner(PATHS)
    for (direction, segment, blocks, slots), found in timed.items():
        runs = blocks if slots == "scattered" else 1
        chosen = planner.choose(Direction(direction), layout(segment), blocks, False, runs)
        assert found[chosen] < 1.05 * min(found.values()), (direction, segment, blocks, slots)


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
