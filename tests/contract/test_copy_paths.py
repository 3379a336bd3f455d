"""A path is described once: whoever speaks of paths speaks of those, and they do what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.driver import FakeDriver
from tests.fakes.kv import make_kv
from tests.fakes.rig import PATHS

from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.settings import copy_paths
from kvferry.settings.copy_paths import AUTO_PATH, BY_NAME, COPY_PATHS, path_names
from kvferry.transfer.job import Direction
from kvferry.transfer.paths.contract import class_of, common_variants, open_paths
from kvferry.transfer.planner import Planner

KV = make_kv("layers")
PAGE = Path(__file__).parents[2] / "docs" / "copy-engine.md"


def test_the_suites_for_all_paths_know_them_all() -> None:
    assert set(PATHS) == set(BY_NAME)


def test_a_setting_can_name_each_and_no_other() -> None:
    for name in (AUTO_PATH, *BY_NAME):
        assert Config(copy_path=name).copy_path == name
    with pytest.raises(ConfigError, match=", ".join((AUTO_PATH, *BY_NAME))):
        Config(copy_path="teleport")


def test_each_can_be_chosen() -> None:
    for way in Direction:
        for name in BY_NAME:
            assert Planner([name]).choose(way, KV.layout, 3, True) == name


def test_there_is_always_one_that_asks_for_nothing() -> None:
    assert any(not path.needs_kernels and not path.needs_pinned for path in COPY_PATHS)
    kernels = {path.name for path in COPY_PATHS if path.needs_kernels}
    assert set(path_names(with_kernels=False)) == set(BY_NAME) - kernels
    assert common_variants()
    for path in COPY_PATHS:
        assert bool(class_of(path).COMMON) is path.needs_kernels


def test_the_page_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(path.name, path.how) for path in COPY_PATHS]


def test_one_more_is_an_entry_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened, planned for and chosen when it says that it is best."""
    loop = BY_NAME["loop"]
    swift = replace(
        loop,
        name="swift",
        load=replace(loop.load, start=1e-9, per_segment=0.0, rate=1e12),
        fallback=1,
    )
    monkeypatch.setattr(copy_paths, "COPY_PATHS", (*COPY_PATHS, swift))
    monkeypatch.setitem(BY_NAME, "swift", swift)
    driver: Any = FakeDriver()
    opened = open_paths(driver, ring_bytes=1 << 16)
    assert set(opened.paths) == {*path_names(with_kernels=False)} >= {"swift"}
    planner = Planner(opened.paths)
    assert planner.choose(Direction.LOAD, KV.layout, 3, False) == "swift"
