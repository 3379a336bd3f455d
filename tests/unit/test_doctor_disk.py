"""``doctor`` about the disk: each line that is not ok is brought about once, and one real drive."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import Config
from kvferry.core.quantities import GiB, MiB
from kvferry.hostmem.limits import Machine
from kvferry.settings.tiers import KEY_ENV
from kvferry.tools.doctor import drive
from kvferry.tools.doctor.checks import check_disk, check_vllm
from kvferry.tools.doctor.drive import DriveFacts, file_system, look_at_drive, measure
from kvferry.tools.doctor.machine import Environment, Finding, Grade

MOUNTS = """\
22 1 254:0 / / rw,relatime - {root} /dev/vda rw
30 22 0:27 / /far\\040away rw - nfs4 server:/x rw
31 22 259:0 / {mount} rw - {kind} /dev/nvme0n1 rw
"""
FAST = DriveFacts("", True, 3.5 * GiB, 3.0 * GiB)


def machine(kind: str = "ext4", mount: str = "/mnt", **env: str) -> Machine:
    files = {"/proc/self/mountinfo": MOUNTS.format(root=kind, mount=mount, kind=kind)}
    return Machine(read=files.get, memlock=lambda: None, env=env)


FIT = Environment(
    machine=machine(),
    package={"xxhash": "4.1.0", "cryptography": "50"}.get,
    room=lambda path: (200 * GiB, 100 * GiB),
    drive=lambda directory: FAST,
)


def findings(env: Environment, **settings: Any) -> dict[str, Finding]:
    config = Config.from_dict({"disk": "/", **settings})
    return {finding.name: finding for finding in check_disk(env, config)}


def test_a_fit_drive_is_ok_in_every_line() -> None:
    found = findings(FIT)
    assert {finding.grade for finding in found.values()} == {Grade.OK}
    assert "3.5GiB/s read, 3GiB/s written" in found["disk /: drive"].words
    assert "100GiB free of 200GiB; up to 64GiB will be used" in found["disk /: space"].words


W, F = Grade.WARN, Grade.FAIL
CACHED, LAZY = replace(FAST, is_direct=False), replace(FAST, read_rate=90.0 * MiB)
KEY = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize(
    ("env", "settings", "line", "grade", "words"),
    [
        ({"machine": machine("tmpfs")}, {}, "disk /", W, "is memory"),
        ({"machine": machine("nfs4")}, {}, "disk /", W, "on another machine"),
        ({"machine": machine("overlay")}, {}, "disk /", W, "container's own layer"),
        ({}, {"disk": "/no/such"}, "disk /no/such", W, "would be made in / (ext4)"),
        ({"room": lambda path: None}, {}, "disk /: space", F, "cannot be read"),
        ({"room": lambda path: (GiB, GiB)}, {}, "disk /: space", F, "no more blocks can be"),
        ({"room": lambda path: (90 * GiB, 40 * GiB)}, {}, "disk /: space", W, "is 64GiB here"),
        ({"drive": lambda _: DriveFacts(error="denied")}, {}, "disk /: drive", F, "denied"),
        ({"drive": lambda _: CACHED}, {}, "disk /: drive", W, "through the page cache"),
        ({"drive": lambda _: LAZY}, {}, "disk /: drive", W, "90MiB/s read"),
        ({"package": {}.get}, {}, "disk checksums", F, "xxhash is not installed"),
        ({"machine": machine(**{KEY_ENV: "x"})}, {}, "disk encryption", F, "holds no key"),
        (
            {"machine": machine(**{KEY_ENV: KEY}), "package": {"xxhash": "4"}.get},
            {},
            *("disk encryption", F, "cryptography is not installed"),
        ),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    env: dict[str, Any], settings: dict[str, Any], line: str, grade: Grade, words: str
) -> None:
    found = findings(replace(FIT, **env), **settings)[line]
    assert found.grade is grade
    assert words in found.words
    assert found.remedy


def test_nothing_is_measured_where_there_is_no_room() -> None:
    asked: list[str] = []

    def note(directory: str) -> DriveFacts:
        asked.append(directory)
        return FAST

    findings(replace(FIT, drive=note, room=lambda path: (GiB, 400 * MiB)), disk_keep_free=0)
    assert not asked


def test_a_server_that_names_blocks_at_random_finds_none_after_a_restart() -> None:
    env = replace(
        FIT, package={"vllm": "0.28.0"}.get, plugins=lambda group: ("kvferry",), machine=machine()
    )
    for disk, grade in (("/", Grade.FAIL), ("none", Grade.WARN)):
        found = list(check_vllm(env, Config.from_dict({"disk": disk})))[-1]
        assert (found.name, found.grade) == ("hash seed", grade)


def test_the_nearest_mount_says_the_file_system() -> None:
    mounts = MOUNTS.format(root="ext4", mount="/mnt/nvme", kind="xfs")
    assert file_system("/mnt/nvme/blocks", mounts) == "xfs"
    assert file_system("/mnt/nvme2", mounts) == "ext4"
    assert file_system("/far away/x", mounts) == "nfs4"
    assert file_system("/x", "") == ""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "MOST_BYTES", 16 * MiB)


@pytest.mark.usefixtures("short")
def test_a_drive_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure(str(tmp_path))
    assert not found.error
    assert found.read_rate
    assert found.write_rate
    assert not list(tmp_path.iterdir())


def test_it_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = look_at_drive(str(tmp_path))
    assert found.read_rate
    assert look_at_drive(str(tmp_path / "none")).error


def test_a_drive_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real: Callable[..., Any] = subprocess.Popen
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: real(sleeps, **how))
    monkeypatch.setattr(drive, "HANGS_AFTER", 0.2)
    assert "not answered" in look_at_drive(str(tmp_path)).error
