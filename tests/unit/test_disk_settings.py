"""The disk as a setting: what is accepted, what is refused by name, and what a tier is told."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import tiers as fakes

import kvferry
from kvferry.config import DISK_KEY_ENV, Config, show
from kvferry.core.identity import Namespace
from kvferry.errors import ConfigError
from kvferry.rank import Contents, tier_setup
from kvferry.tiers.contract import TierSetup
from kvferry.transfer.layout import describe as layout_of
from kvferry.types import Rank

SPACE = Namespace(model="m", dtype="f4", layout="l", geometry="g", block_tokens=16)


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(DISK_KEY_ENV, raising=False)
    fakes.opened.clear()
    yield
    fakes.opened.clear()


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (None, ()),
        ("", ()),
        ("/mnt/a", ("/mnt/a",)),
        (" /mnt/a/ , /mnt/b/../c ", ("/mnt/a", "/mnt/c")),
        (["/mnt/a", Path("/mnt/b")], ("/mnt/a", "/mnt/b")),
        (Path("/mnt/a"), ("/mnt/a",)),
        ("~/blocks", (os.path.expanduser("~/blocks"),)),
    ],
)
def test_directories_are_read_from_a_text_or_a_list(value: object, paths: tuple[str, ...]) -> None:
    config = Config.from_dict({"disk": value})
    assert config.disk == paths
    assert Config.from_dict({"disk": show("disk", config.disk)}) == config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disk": "cache"}, "disk: expected a whole path such as /mnt/nvme/kvferry, got 'cache'"),
        ({"disk": ["/a", ""]}, "disk: expected a whole path"),
        ({"disk": 7}, "disk: expected a path or a list of paths, got 7 (int)"),
        ({"disk": "/" + "a" * 2000}, "cannot be used as a path"),
        ({"disk": ["/a,b"]}, "without commas"),
        ({"disk": "/a, /a/"}, "are not two directories apart"),
        ({"disk": "/a/b, /a"}, "give one for each drive"),
        ({"disk": [f"/{n}" for n in range(17)]}, "disk: at most 16 can be given, got 17"),
        ({"disk_size": 0}, "disk_size: must be at least 1 bytes"),
        ({"disk_write_per_day": 0}, "disk_write_per_day: must be at least 1"),
        ({"disk_key_file": "key"}, "disk_key_file: expected a whole path"),
        ({"disk_key": "x"}, "there is no setting 'disk_key'; did you mean 'disk_key_file'?"),
        ({"tiers": "disk:/mnt/a"}, "a disk and a shared store have settings of their own"),
        ({"disk": "/a", "tiers": "disk=memory:1GiB"}, "tiers: 2 tiers are called disk"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.from_dict(settings)
    assert words in str(refused.value)


def settings(path: object = None) -> Config:
    return Config(disk_key_file=None if path is None else str(path))


def test_a_key_comes_from_the_file_or_else_from_the_environment(tmp_path: Path) -> None:
    key, other = os.urandom(32), os.urandom(32)
    env = {DISK_KEY_ENV: base64.b64encode(other).decode() + "\n"}
    file = tmp_path / "key"
    file.touch(0o600)
    assert settings().disk_key({}) is None
    assert settings().disk_key(env) == other
    for content in (key, base64.b64encode(key) + b"\n"):
        file.write_bytes(content)
        assert settings(file).disk_key(env) == key


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 44, b"A" * 4096, b"\xff" * 31])
def test_a_key_that_cannot_be_used_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no key: give 32 random bytes") as refused:
        settings(file).disk_key({})
    assert "xxxx" not in str(refused.value)


def test_a_key_that_others_can_read_is_none(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(bytes(32))
    file.chmod(0o604)
    with pytest.raises(ConfigError, match="can be read or changed by others: chmod 600"):
        settings(file).disk_key({})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        settings(tmp_path / "none").disk_key({})
    with pytest.raises(ConfigError, match="is no file"):
        settings(tmp_path).disk_key({})
    with pytest.raises(ConfigError, match=f"{DISK_KEY_ENV} holds no key"):
        settings().disk_key({DISK_KEY_ENV: "secret"})


def told(contents: Contents, rank: int = 0, num_ranks: int = 1, tokens: int = 16) -> TierSetup:
    layout = layout_of([np.zeros((4, 2, tokens, 8), np.float32)], block_axis=0)
    return tier_setup(Config(disk=("/a",)), [layout], contents, Rank(rank), num_ranks)


def test_a_store_is_named_by_everything_that_decides_its_bytes() -> None:
    contents = Contents(SPACE)
    same = told(contents)
    assert same.namespace == told(Contents(replace(SPACE))).namespace
    assert len(same.namespace) == 32
    assert same.label == "m"
    others = [
        told(Contents(replace(SPACE, revision="2"))),
        told(Contents(replace(SPACE, dtype="f2"))),
        told(replace(contents, weights=(1, 2))),
        told(replace(contents, weights=(2, 1))),
        told(replace(contents, engine=1)),
        told(contents, num_ranks=2),
        told(contents, rank=1, num_ranks=2),
        told(contents, tokens=32),
    ]
    names = {setup.namespace for setup in (same, *others)}
    assert len(names) == 1 + len(others)


def test_ranks_of_one_server_are_a_family_whatever_its_weights() -> None:
    first = told(Contents(SPACE, (1,)), num_ranks=2)
    assert first.family == told(Contents(SPACE, (9,)), 1, 2).family
    assert first.family != told(Contents(SPACE, (1,))).family
    assert told(Contents(SPACE, engines_here=3), 1, 2).num_ranks_here == 6


def test_a_disk_needs_the_contents_of_its_blocks() -> None:
    layout = layout_of([np.zeros((4, 2, 16, 8), np.float32)], block_axis=0)
    with pytest.raises(ConfigError, match=r"contents=Contents\(namespace\)"):
        tier_setup(Config(disk=("/a",)), [layout], None)
    tier_setup(Config(), [layout], None)


def test_a_disk_without_a_revision_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for revision in ("", "2"):
        kv = [np.zeros((4, 2, 16, 8), np.float32)]
        caplog.clear()
        with kvferry.attach(
            kv, model="m", revision=revision, host="1MiB", disk=str(tmp_path), disk_size="4MiB"
        ) as ferry:
            assert ferry.stats().restored == {"disk": 0}
        assert ("give a revision" in caplog.text) == (not revision)
