"""``kvferry disk``: what is listed, what is removed and what is refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvferry
from kvferry.ferry import Ferry
from kvferry.tiers.disk.quota import BLOCKS_NAME
from kvferry.tools.cli.commands import kvferry as command

SHAPE = (24, 2, 16, 64)
BLOCKS = 16

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


def attach(folder: Path, model: str = "some-model", size: str = "4MiB", **settings: Any) -> Ferry:
    kv = [np.random.default_rng().random(SHAPE).astype(np.float32)]
    return kvferry.attach(
        kv,
        model=model,
        host="1MiB",
        disk=str(folder),
        disk_size=size,
        disk_keep_free=0,
        tier_write="through",
        **settings,
    )


def fill(folder: Path, model: str = "some-model", **settings: Any) -> None:
    """Leave a store with some blocks behind."""
    with attach(folder, model, **settings) as ferry:
        keys = ferry.keys(range(BLOCKS * 16))
        ferry.wait(ferry.store(keys, range(BLOCKS)), 30)
        end = time.monotonic() + 30
        while ferry.stats().tiers["disk"].cached < BLOCKS:
            ferry.poll()
            time.sleep(0.001)
            assert time.monotonic() < end


@pytest.fixture
def run() -> Run:
    return lambda *words, **how: CliRunner().invoke(command, ["disk", *map(str, words)], **how)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    fill(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, filled: Path) -> Path:
    """One store, closed."""
    return shutil.copytree(filled, tmp_path / "disk")


def store_in(folder: Path) -> Path:
    (store,) = folder.glob("kvferry-*")
    return store


def test_a_store_is_listed_with_whose_it_is(run: Run, folder: Path) -> None:
    (told,) = json.loads(run("ls", folder, "--json").stdout)["stores"]
    assert told["label"] == "some-model"
    assert (told["rank"], told["num_ranks"]) == (0, 1)
    assert told["block_bytes"] == 2 * 16 * 64 * 4
    assert told["bytes"] <= 4 << 20
    assert not told["open_in"]
    said = run("ls", folder).stdout
    assert f"{told['places']:,}" in said
    assert "closed" in said
    assert store_in(folder).name in said


def test_the_setting_names_the_directory(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no directory is named" in run("ls").stderr
    monkeypatch.setenv("KVFERRY_DISK", str(folder))
    assert len(json.loads(run("ls", "--json").stdout)["stores"]) == 1


def test_one_of_another_format_is_shown_as_what_it_is(run: Run, folder: Path) -> None:
    (store_in(folder) / "superblock").write_bytes(b"nonsense" * 512)
    (told,) = json.loads(run("ls", folder, "--json").stdout)["stores"]
    assert told["trouble"]
    assert "cannot be used: " in run("ls", folder).stdout


def spoil(store: Path, places: list[int]) -> None:
    """Turn one bit of the middle of each of these blocks."""
    with (store / BLOCKS_NAME).open("r+b") as file:
        pitch = 2 * 16 * 64 * 4
        for place in places:
            file.seek(place * pitch + 777)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))


def test_every_bit_that_turned_is_found(
    run: Run, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed, key = tmp_path / "sealed", base64.b64encode(os.urandom(32)).decode()
    assert run("verify", folder).exit_code == 0
    with attach(folder):
        found = run("verify", folder)
        assert found.exit_code == 1
        assert f"process {os.getpid()}" in found.stderr
    monkeypatch.setenv("KVFERRY_DISK_KEY", key)
    fill(sealed)
    for where in (folder, sealed):
        spoil(store_in(where), [3, 4, 11])
        found = run("verify", where, "--json")
        assert found.exit_code == 1
        (told,) = json.loads(found.stdout)["stores"]
        assert told["blocks"] == BLOCKS
        assert sorted(told["bad_places"]) == [3, 4, 11]
        assert "16 blocks, 3 of them damaged" in run("verify", where).stderr
    monkeypatch.delenv("KVFERRY_DISK_KEY")
    assert "it is encrypted" in run("verify", sealed).stderr


def test_purge_asks_and_takes_no_for_an_answer(run: Run, folder: Path) -> None:
    found = run("purge", folder, input="n\n")
    assert found.exit_code == 1
    assert "Remove 1 store" in found.stderr
    assert store_in(folder).is_dir()
    assert run("purge", folder, input="y\n").exit_code == 0
    assert not list(folder.glob("kvferry-*"))


def test_purge_must_be_told_what(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_DISK", str(folder))
    assert run("purge", "--yes").exit_code == 2
    assert store_in(folder).is_dir()
    assert run("purge", "--all", "--yes").exit_code == 0
    assert not list(folder.glob("kvferry-*"))


def test_what_is_in_use_is_refused_by_name_and_the_rest_goes(run: Run, folder: Path) -> None:
    with attach(folder):
        fill(folder, "another", size="8MiB")
        found = run("purge", folder, "--yes", "--json")
        assert found.exit_code == 1
        told = {one["gone"]: one["words"] for one in json.loads(found.stdout)["stores"]}
        assert f"process {os.getpid()}" in told[False]
        assert "not overwritten" in told[True]
    assert len(list(folder.glob("kvferry-*"))) == 1


def test_nothing_but_a_store_is_ever_removed(run: Run, folder: Path) -> None:
    mine = folder / "mine"
    mine.mkdir()
    (mine / "file").touch()
    assert run("purge", mine, "--yes").stdout == "There is no store to remove.\n"
    run("purge", folder, "--yes")
    assert (mine / "file").exists()
