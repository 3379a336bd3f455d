"""The planner: right between what was measured, and able to say why."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.planner.choose import Planner
from kvferry.transfer.planner.profile import BusyCell, Cell, Profile, builtin_profile

KiB, MiB = 1 << 10, 1 << 20
LOAD, STORE = Direction.LOAD, Direction.STORE

# Seconds to start, per segment, and per byte: what a path costs on a machine we made up.
COSTS = {"dma": (10e-6, 2e-6, 1 / 55e9), "kernel": (25e-6, 0.0, 1 / 50e9)}


def layout(segment_bytes: int, segments: int = 64) -> GroupLayout:
    steps = np.arange(segments, dtype=np.int64)
    return GroupLayout(
        bases=steps * segment_bytes * 10,
        strides=np.full(segments, segment_bytes),
        sizes=np.full(segments, segment_bytes),
        num_blocks=10,
    )


def seconds(path: str, segment_bytes: int, num_bytes: int) -> float:
    start, per_segment, per_byte = COSTS[path]
    return start + per_segment * num_bytes / segment_bytes + per_byte * num_bytes


def profile(*busy: BusyCell) -> Profile:
    return Profile(
        tuple(
            Cell(way, path, segment, num_bytes // segment, seconds(path, segment, num_bytes))
            for way in Direction
            for path in COSTS
            for segment in (4 * KiB, 64 * KiB, 2 * MiB)
            for num_bytes in (2 * MiB, 64 * MiB, 256 * MiB)
        ),
        busy,
        paths=frozenset(COSTS),
    )


@pytest.mark.parametrize("segment_bytes", [4 * KiB, 6 * KiB, 32 * KiB, 500 * KiB, 2 * MiB])
@pytest.mark.parametrize("num_blocks", [1, 3, 40, 1000])
def test_estimates_are_exact_for_costs_of_that_shape(segment_bytes: int, num_blocks: int) -> None:
    blocks = layout(segment_bytes)
    for estimate in Planner(profile(), COSTS).estimates(STORE, blocks, num_blocks, False):
        num_bytes = num_blocks * blocks.block_bytes
        if num_bytes >= 2 * MiB:
            expected = seconds(estimate.path, segment_bytes, num_bytes)
            assert estimate.seconds == pytest.approx(expected)
        assert estimate.seconds > 0


def test_small_segments_go_by_kernel_and_large_ones_by_dma() -> None:
    planner = Planner(profile(), COSTS)
    assert planner.choose(LOAD, layout(4 * KiB), 64, busy=False) == "kernel"
    assert planner.choose(LOAD, layout(2 * MiB), 1, busy=False) == "dma"
    assert planner.choose(LOAD, layout(512), 64, busy=False) == "kernel"
    assert planner.choose(LOAD, layout(64 * MiB, 1), 4, busy=False) == "dma"


def test_what_lands_in_parts_goes_by_the_path_that_queues_it_at_once() -> None:
    """Also where another one copies faster: an early reader waits for the last launch."""
    large = (LOAD, layout(2 * MiB), 40, False)
    assert Planner(profile(), COSTS).choose(*large) != "kernel"
    assert Planner(profile(), COSTS).choose(*large, in_parts=True) == "kernel"
    assert Planner(profile(), COSTS, pinned="dma").choose(*large, in_parts=True) == "dma"
    others = [path for path in COSTS if path != "kernel"]
    planner = Planner(profile(), others)
    assert planner.choose(*large, in_parts=True) == planner.choose(*large)


def test_what_the_model_loses_counts_while_it_runs() -> None:
    costly = BusyCell(STORE, "kernel", "a load", gbps=40.0, idle_gbps=50.0, lost_ms_per_gb=6.0)
    planner = Planner(profile(costly), COSTS)
    blocks = layout(128 * KiB)
    assert planner.choose(STORE, blocks, 8, busy=False) == "kernel"
    assert planner.choose(STORE, blocks, 8, busy=True) == "dma"
    assert planner.choose(LOAD, blocks, 8, busy=True) == "kernel"


def test_a_load_that_takes_many_calls_to_queue_yields_to_one_launch_while_the_model_runs() -> None:
    """The ring is faster, and on the card costs no more: what it costs is the interpreter's time.

    Seen red with queueing not counted.
    """
    cells = [BusyCell(way, path, "a load", 50.0, 50.0, 1.5) for way in Direction for path in COSTS]
    planner = by_runs(*cells)
    blocks = layout(16 * KiB)
    assert planner.choose(LOAD, blocks, 256, busy=False) == "staged"
    assert planner.choose(LOAD, blocks, 256, busy=True) == "kernel"
    assert planner.choose(STORE, blocks, 256, busy=True) == "staged"


def by_runs(*busy: BusyCell) -> Planner:
    """For a machine where a ring pays for every run of host slots, and a kernel does not."""
    costs = {"kernel": (25e-6, 51e9, 0.0), "staged": (60e-6, 54e9, 0.5e-6)}
    cells = tuple(
        Cell(way, path, segment, num_bytes // segment, start + num_bytes / rate + runs * per, runs)
        for way in Direction
        for path, (start, rate, per) in costs.items()
        for segment in (4 * KiB, 64 * KiB)
        for num_bytes in (1 * MiB, 256 * MiB)
        for runs in (1, 200)
    )
    return Planner(Profile(cells, paths=frozenset(costs)), costs)


def test_a_pinned_path_overrules_and_says_so() -> None:
    planner = Planner(profile(), COSTS, pinned="dma")
    assert planner.choose(LOAD, layout(4 * KiB), 64, busy=False) == "dma"
    assert "copy_path" in planner.explain(LOAD, layout(4 * KiB), 64, busy=False)
    with pytest.raises(InputError, match="staged"):
        Planner(profile(), COSTS, pinned="staged")


def test_an_unmeasured_path_is_not_chosen() -> None:
    planner = Planner(profile(), [*COSTS, "loop"])
    found = {estimate.path for estimate in planner.estimates(LOAD, layout(4096), 1, False)}
    assert found == set(COSTS)
    with pytest.raises(InputError, match="loop"):
        Planner(profile(), ["loop"])


def test_the_builtin_profile_gives_sane_choices() -> None:
    planner = Planner(builtin_profile(), ["loop", "dma", "kernel", "staged"])
    small = layout(16 * KiB)
    assert planner.choose(LOAD, small, 1, busy=False) == "kernel"
    assert planner.choose(STORE, small, 1, busy=False) == "kernel"
    assert planner.choose(STORE, small, 256, busy=False) == "staged"
    assert planner.choose(STORE, small, 256, busy=True) == "staged"
    tiny = layout(1 * KiB)
    assert planner.choose(STORE, tiny, 4096, busy=False) == "staged"
    assert planner.choose(STORE, tiny, 4096, False, 4096) == "kernel"
    assert planner.choose(LOAD, layout(8 * MiB), 4, busy=False) in ("dma", "staged")
    without = Planner(builtin_profile(), ["loop", "dma"])
    assert without.choose(LOAD, small, 64, busy=True) == "dma"
