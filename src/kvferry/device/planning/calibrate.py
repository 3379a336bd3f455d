"""Calibration: time the paths on this very machine, in a second or two.

Each path is timed by direction, segment size and transfer size on an idle card, and then beside a
running model. A path that is hopeless for small segments is not asked to copy many of them: the
planner only needs to see that it is. A server's first start waits for all this, so nothing is timed
more often than a choice between paths needs.
"""

from __future__ import annotations

import itertools
import logging
import pathlib
import platform
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import import_module, metadata, util

from kvferry.copy_paths import BY_NAME, COPY_PATHS
from kvferry.device.driver.base import BatchForm, Driver
from kvferry.device.job import Direction
from kvferry.device.paths.base import Path
from kvferry.device.planning.copy_rig import GB, CopyRig, MiB
from kvferry.device.planning.profile import (
    LEAST_GBPS,
    MOST_LOST_MS,
    BusyCell,
    Cell,
    Profile,
)

log = logging.getLogger(__name__)

MODULE_VERSION = pathlib.Path("/sys/module/nvidia/version")

KiB = 1 << 10

SEGMENT_BYTES = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 2 * MiB)
NUM_BYTES = (256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
SEGMENTS_PER_BLOCK = 64
SMALL_REPEATS, REPEATS = 5, 3
LARGE = 16 * MiB
"""From here on three repeats do: what scatters is the start."""
HOPELESS = 2.0
"""A path is not timed on more bytes of the same segments if the last ones it was given alone took
it so many times as long as the best path took for all."""

SCATTERED = (4 * KiB, 16 * KiB)
"""Segment sizes at which paths are timed with host slots that are no neighbours."""
SCATTERED_BYTES = NUM_BYTES[-2:]

BUSY_SEGMENT, BUSY_SEGMENT_IF_PAID = 16 * KiB, 2 * MiB
"""Segment size at which a path is timed beside a model, and one that pays for each segment: sizes
at which it may be chosen."""
BUSY_BYTES = 64 * MiB
BUSY_ROUNDS = 8

Progress = Callable[[str], None]


def calibrate(
    driver: Driver, paths: Mapping[str, Path], *, progress: Progress = lambda _: None
) -> Profile:
    """Time ``paths`` on the device of ``driver``; what cannot be timed is left out.

    Where the driver has the batch copy, a stopgap for it has nothing to offer.
    """
    candidates = dict(paths)
    if driver.batch_form is not BatchForm.ABSENT:
        stopgaps = {path.name for path in COPY_PATHS if path.is_stopgap}
        candidates = {name: paths[name] for name in paths if name not in stopgaps} or candidates
    with driver.current():
        # Half of the host's slots are left out to scatter the others.
        rig = CopyRig(driver, num_bytes=NUM_BYTES[-1], host_bytes=2 * NUM_BYTES[-1])
        try:
            cells = []
            for direction in Direction:
                for segment_bytes in SEGMENT_BYTES:
                    progress(f"{direction.value}, segments of {segment_bytes // KiB} KiB")
                    cells += list(_time_paths(rig, direction, segment_bytes, candidates))
                cells += list(_time_scattered(rig, direction, candidates))
            busy = tuple(_time_beside_model(rig, candidates, progress))
        finally:
            rig.close()
    return Profile(tuple(cells), busy, provenance(driver), paths=frozenset(paths))


def _time_paths(
    rig: CopyRig, direction: Direction, segment_bytes: int, paths: Mapping[str, Path]
) -> Iterator[Cell]:
    """Larger and larger transfers, by each path in turn until it is hopeless.

    In turn, so that a machine that slows down for a while does so for all of them.
    """
    in_race = dict(paths)
    before: dict[str, float] = {}
    for num_bytes in NUM_BYTES:
        if num_bytes < segment_bytes:
            continue
        segments = min(SEGMENTS_PER_BLOCK, num_bytes // segment_bytes)
        job = rig.job(direction, segment_bytes, segments, num_bytes // (segments * segment_bytes))
        repeats = REPEATS if num_bytes >= LARGE else SMALL_REPEATS
        seconds = {
            name: rig.time(path, job, repeats=repeats).seconds for name, path in in_race.items()
        }
        best = min(seconds.values())
        for name, taken in seconds.items():
            yield Cell(direction, name, segment_bytes, num_bytes // segment_bytes, taken)
            if taken - before.get(name, taken) > HOPELESS * best:
                del in_race[name]
        before = seconds


def _time_scattered(
    rig: CopyRig, direction: Direction, paths: Mapping[str, Path]
) -> Iterator[Cell]:
    for segment_bytes, num_bytes in itertools.product(SCATTERED, SCATTERED_BYTES):
        num_blocks = num_bytes // (segment_bytes * SEGMENTS_PER_BLOCK)
        if num_blocks < 2:
            continue
        job = rig.job(direction, segment_bytes, SEGMENTS_PER_BLOCK, num_blocks, scattered=True)
        # The largest come in a row, if they come; then the start of the first hardly counts.
        in_flight = 2 if num_bytes == SCATTERED_BYTES[-1] else 1
        for path in COPY_PATHS:
            if path.name in paths and not path.pays_per_segment:
                found = rig.time(paths[path.name], job, repeats=REPEATS, in_flight=in_flight)
                size = (segment_bytes, num_blocks * SEGMENTS_PER_BLOCK)
                yield Cell(direction, path.name, *size, found.seconds, num_blocks)


def provenance(driver: Driver) -> dict[str, str]:
    """Where and when a measurement was made, and with what."""
    identity = driver.identity()
    versions = {name: _version(name) for name in ("torch", "triton", "numpy")}
    return {
        "source": "measurements on this machine",
        "gpu": identity.name,
        "driver": _driver_version(identity.driver_version),
        "link": identity.link,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "kvferry": str(import_module("kvferry").__version__),
        "python": platform.python_version(),
        **versions,
    }


def _driver_version(api: int) -> str:
    """``580.95.05 (CUDA 13.0)``, or without the first where the kernel does not tell."""
    cuda = f"CUDA {api // 1000}.{api % 1000 // 10}"
    try:
        return f"{MODULE_VERSION.read_text().strip()} ({cuda})"
    except OSError:
        return cuda


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _time_beside_model(
    rig: CopyRig, paths: Mapping[str, Path], progress: Progress
) -> Iterator[BusyCell]:
    if util.find_spec("torch") is None:
        log.warning("torch is not installed: what copies cost the model is not measured")
        return
    # Imported here: torch is heavy, and only these loads need it.
    from kvferry.device.planning.slowdown import measure_slowdown
    from kvferry.device.planning.workloads import MatmulLoad, WeightLoad, release

    for make_load in (MatmulLoad, WeightLoad):
        try:
            load = make_load()
        except RuntimeError as error:
            # Servers fill the card; what is left may not hold the weights.
            log.warning("what copies cost the model is not measured in full: %s", error)
            continue
        for direction in Direction:
            for name, path in paths.items():
                progress(f"{name}, {direction.value}, beside {load.name}")
                is_paid = BY_NAME[name].pays_per_segment
                segment = BUSY_SEGMENT_IF_PAID if is_paid else BUSY_SEGMENT
                segments = min(SEGMENTS_PER_BLOCK, BUSY_BYTES // segment)
                job = rig.job(direction, segment, segments, BUSY_BYTES // (segment * segments))
                idle = max(
                    job.num_bytes / rig.time(path, job, repeats=REPEATS).seconds / GB, LEAST_GBPS
                )
                found = measure_slowdown(
                    rig, load, path, job, rounds=BUSY_ROUNDS, phases=1, warm_up=4
                )
                # Noise makes a copy that costs nothing seem to give time back.
                lost = min(max(found.lost_ms_per_gb, 0.0), MOST_LOST_MS)
                gbps = max(found.gbps, LEAST_GBPS)
                yield BusyCell(direction, name, load.name, gbps, idle, lost)
        del load
        release()
