"""Profiles on disk: read back as written, replaced whole, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.device.builtin_profile import builtin_profile
from kvferry.device.driver import DeviceIdentity
from kvferry.device.profile import cache_directory, load_profile, profile_file, save_profile

CARD = DeviceIdentity("NVIDIA H200", 13000, "0000:00:06.0", "32.0 GT/s PCIe x16")


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    profile = builtin_profile("this is a test")
    file = profile_file(CARD, tmp_path / "new")
    save_profile(profile, file)
    assert load_profile(file) == profile
    assert list(file.parent.iterdir()) == [file]


def test_card_driver_and_link_have_a_file_each(tmp_path: Path) -> None:
    others = [
        CARD,
        DeviceIdentity("NVIDIA H100", 13000, CARD.pci_bus_id, CARD.link),
        DeviceIdentity(CARD.name, 12080, CARD.pci_bus_id, CARD.link),
        DeviceIdentity(CARD.name, 13000, CARD.pci_bus_id, "16.0 GT/s PCIe x8"),
    ]
    assert len({profile_file(card, tmp_path) for card in others}) == len(others)
    moved = DeviceIdentity(CARD.name, 13000, "0000:81:00.0", CARD.link)
    assert profile_file(moved, tmp_path) == profile_file(CARD, tmp_path)
    assert profile_file(CARD, tmp_path).name.startswith("profile-nvidia-h200-")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 1}', '{"format": 2, "cells": [{}], "busy": []}', "null"]
)
def test_an_unreadable_profile_is_none_and_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert load_profile(file) is None
    assert str(file) in caplog.text


def test_no_profile_is_none_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_profile(tmp_path / "none.json") is None
    assert not caplog.records


def test_the_cache_directory_follows_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/kvferry")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "kvferry"
