"""Profiles on disk: read back as written, replaced whole, and never a reason to fail."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.settings.copy_paths import BY_NAME
from kvferry.transfer.driver.base import DeviceIdentity
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.planner.choose import Planner
from kvferry.transfer.planner.profile import (
    MOST_FILE_BYTES,
    builtin_profile,
    load_profile,
    profile_file,
    save_profile,
)

CARD = DeviceIdentity("NVIDIA H200", 13000, "0000:00:06.0", "32.0 GT/s PCIe x16")
PATHS = frozenset(BY_NAME)
GOOD = builtin_profile("this is a test").to_json()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvferry"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "profile.json"


def test_a_profile_reads_back_as_it_was_written(cache: Path) -> None:
    profile = builtin_profile("this is a test")
    file = profile_file(CARD, PATHS)
    save_profile(profile, file)
    assert load_profile(file, PATHS) == profile
    assert list(cache.iterdir()) == [file]


def test_card_driver_link_and_paths_have_a_file_each() -> None:
    others = [
        (CARD, PATHS),
        (DeviceIdentity("NVIDIA H100", 13000, CARD.pci_bus_id, CARD.link), PATHS),
        (DeviceIdentity(CARD.name, 12080, CARD.pci_bus_id, CARD.link), PATHS),
        (DeviceIdentity(CARD.name, 13000, CARD.pci_bus_id, "16.0 GT/s PCIe x8"), PATHS),
        (CARD, PATHS - {"staged"}),
    ]
    assert len({profile_file(*each) for each in others}) == len(others)
    moved = DeviceIdentity(CARD.name, 13000, "0000:81:00.0", CARD.link)
    assert profile_file(moved, sorted(PATHS)) == profile_file(CARD, PATHS)
    assert profile_file(CARD, PATHS).name.startswith("profile-nvidia-h200-")


def changed(where: str, name: str, value: Any) -> str:
    data = copy.deepcopy(GOOD)
    part = data[where][0] if isinstance(data[where], list) else data[where]
    part[name] = value
    return json.dumps(data)


def without(*where: Any) -> str:
    data: Any = copy.deepcopy(GOOD)
    part = data
    for name in where[:-1]:
        part = part[name]
    del part[where[-1]]
    return json.dumps(data)


def only(keep: Callable[[dict[str, Any]], bool]) -> str:
    return json.dumps({**GOOD, "cells": [cell for cell in GOOD["cells"] if keep(cell)]})


NO_NUMBERS: list[Any] = [0, -1, math.nan, math.inf, -math.inf, "1", None, True, [], {}, 10**400]
NO_PROFILES = {
    "empty": "",
    "cut short": json.dumps(GOOD)[:-2],
    "not an object": "[]",
    "null": "null",
    "another version": json.dumps({**GOOD, "format": 1}),
    "without a bottom": "[" * 100_000,
    "deep": '{"cells": ' * 20_000 + "1" + "}" * 20_000,
    "no text": "\udcff",
    "too long": "[" + " " * MOST_FILE_BYTES + "]",
    "paths that are no words": json.dumps({**GOOD, "paths": [1]}),
    "too many cells": json.dumps({**GOOD, "cells": GOOD["cells"] * 200}),
    "a cell twice": json.dumps({**GOOD, "cells": [*GOOD["cells"], GOOD["cells"][0]]}),
    "one direction": only(lambda cell: cell["direction"] == "load"),
    "scattered only": only(lambda cell: cell["path"] != "staged" or cell["num_runs"] > 1),
    "a path it was not measured for": changed("cells", "path", "teleport"),
    "nothing": only(lambda cell: False),
    "escape sequences": changed("provenance", "source", "\x1b[2J"),
    "provenance of numbers": changed("provenance", "gpu", 1),
    **{f"no {name}": without(name) for name in GOOD},
    **{f"no {name} in a cell": without("cells", 0, name) for name in GOOD["cells"][0]},
    **{f"no {name} beside a model": without("busy", 0, name) for name in GOOD["busy"][0]},
    **{
        f"{where}.{name} = {str(value)[:9]}": changed(where, name, value)
        for where, names in {
            "cells": ("segment_bytes", "num_segments", "seconds", "num_runs", "path", "direction"),
            "busy": ("gbps", "idle_gbps", "path", "direction", "load"),
        }.items()
        for name in names
        for value in NO_NUMBERS
        if not (name in ("path", "load") and value == "1")
    },
    **{
        f"busy.lost_ms_per_gb = {str(value)[:9]}": changed("busy", "lost_ms_per_gb", value)
        for value in NO_NUMBERS[1:]
    },
    "as slow as nothing is": changed("cells", "seconds", 1e300),
    "as fast as nothing is": changed("cells", "seconds", 1e-300),
    "as large as nothing is": changed("cells", "segment_bytes", 1 << 62),
}


@pytest.mark.parametrize("text", NO_PROFILES.values(), ids=NO_PROFILES)
def test_an_unusable_profile_is_ignored_and_logged_once(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, errors="surrogateescape")
    assert load_profile(file, PATHS) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert len(record.getMessage()) < 1000


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside ``data``, and to itself."""
    if not isinstance(data, (dict, list)):
        return [at]
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    return [at, *(place for name, part in inside for place in places(part, (*at, name)))]


def replaced(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    result = copy.copy(data)
    result[at[0]] = replaced(data[at[0]], at[1:], value)
    return result


SMALL = {
    **GOOD,
    "cells": [
        cell
        for cell in GOOD["cells"]
        if cell["path"] in ("dma", "staged") and cell["segment_bytes"] == 16384
    ],
    "busy": GOOD["busy"][:3],
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([0, -0.0, 5e-324, 1e308, 2**63, "NaN", "load", "store", "dma", "kernel"]),
    st.text(max_size=5),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.data())
def test_whatever_a_file_says_it_is_none_or_can_be_planned_by(
    kept: Path, data: st.DataObject
) -> None:
    content: Any = SMALL
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(places(content)))
        content = replaced(content, at, data.draw(ODD))
    kept.write_text(json.dumps(content), errors="surrogatepass")
    plan_by(kept)


@given(st.binary(max_size=200) | st.text().map(lambda text: text.encode(errors="surrogatepass")))
def test_whatever_bytes_are_there_are_none(kept: Path, content: bytes) -> None:
    kept.write_bytes(content)
    assert load_profile(kept, PATHS) is None


def plan_by(file: Path) -> None:
    profile = load_profile(file, PATHS)
    if profile is None:
        return
    planner = Planner(profile, PATHS)
    for segment_bytes, segments in ((1, 1), (4096, 64), (3 << 20, 2)):
        sizes = np.full(segments, segment_bytes)
        layout = GroupLayout(sizes, sizes, sizes, 4)
        for way in Direction:
            for num_blocks, num_runs in ((1, 1), (1000, 700)):
                for busy in (False, True):
                    given_what = (way, layout, num_blocks, busy, num_runs)
                    assert planner.choose(*given_what) in PATHS
                    assert planner.explain(*given_what)
                    for estimate in planner.estimates(*given_what):
                        assert 0 < estimate.seconds < math.inf
                        assert 0 <= estimate.lost_seconds < math.inf
