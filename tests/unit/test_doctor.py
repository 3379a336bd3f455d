"""``doctor`` on machines we do not have: each line that is not ok is brought about once."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.fakes.driver import FakeDriver
from tests.fakes.endpoint import FakeEndpoint

from kvferry.config import DISK_KEY_ENV, Config
from kvferry.core.quantities import GiB, MiB
from kvferry.errors import ConfigError, DriverError
from kvferry.hostmem.limits import Machine
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.doctor import checks as environment
from kvferry.tools.doctor import drive
from kvferry.tools.doctor.checks import Environment, Finding, Gpu, Grade, examine
from kvferry.tools.doctor.drive import DriveSpeed, file_system, measure, measure_drive
from kvferry.transfer.driver import BatchForm, DeviceIdentity

CARD = Gpu(
    DeviceIdentity("NVIDIA Test", 13000, "00000000:41:00.0"),
    BatchForm.WITHOUT_FAIL_INDEX,
    *(32.0, 16, 32.0, 16),
)
MOUNTS = """\
22 1 254:0 / / rw,relatime - {kind} /dev/vda rw
30 22 0:27 / /far\\040away rw - nfs4 server:/x rw
31 22 259:0 / /mnt/nvme rw - xfs /dev/nvme0n1 rw
"""
FILES = {
    "/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
    "/proc/self/cgroup": "0::/pod\n",
    "/proc/self/mountinfo": MOUNTS.format(kind="ext4"),
    "/sys/fs/cgroup/pod/memory.max": f"{32 * GiB}\n",
    "/sys/fs/cgroup/pod/memory.current": f"{2 * GiB}\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/node/online": "0-1\n",
    "/sys/devices/system/node/node0/cpulist": "0-7\n",
    "/sys/devices/system/node/node1/cpulist": "8-15\n",
    "/sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
    "/proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    ),
}
PACKAGES = {"torch": "2.13.0", "triton": "3.7.1", "vllm": "0.32.0"}
PACKAGES |= {"xxhash": "4.1.0", "cryptography": "50"}
FAST = DriveSpeed("", True, 3.5 * GiB, 3.0 * GiB)
KEY = base64.b64encode(bytes(32)).decode()


def machine(files: Mapping[str, str] | None = None, **env: Any):
    said = {name: value for name, value in {"PYTHONHASHSEED": "0", **env}.items() if value}
    return Machine(read={**FILES, **(files or {})}.get, env=said)


def keyed(key: str) -> Machine:
    env: dict[str, Any] = {DISK_KEY_ENV: key}
    return machine(**env)


FIT = Environment(
    machine=machine(),
    gpu=lambda: CARD,
    cards=lambda: ["/dev/nvidia0"],
    package=PACKAGES.get,
    plugins=lambda group: ("kvferry", "other"),
    room=lambda path: (200 * GiB, 100 * GiB),
    drive=lambda directory: FAST,
    processors=lambda: frozenset(range(16)),
)


def raising(error: Exception) -> Any:
    def look(*_):
        raise error

    return look


def on(given: Mapping[str, object] | None = None, **changes: Any) -> Environment:
    """The fit machine with these settings and changes."""
    changed = replace(FIT, **changes)
    return replace(changed, config=lambda env: Config.from_dict(given)) if given else changed


def card(**changes: Any) -> Environment:
    return on(gpu=lambda: replace(CARD, **changes))


def package(
    name: str, version: str | None, given: Mapping[str, object] | None = None, **env: Any
) -> Environment:
    return on(given, package={**PACKAGES, name: version}.get, **env)


def disk(**changes: Any) -> Environment:
    return on({"disk": "/"}, **changes)


def mounted(kind: str) -> Environment:
    return disk(machine=machine({"/proc/self/mountinfo": MOUNTS.format(kind=kind)}))


def line(env: Environment, name: str) -> Finding:
    (found,) = [finding for finding in examine(env) if finding.name == name]
    return found


def test_a_fit_machine_is_ok_in_every_line():
    result = CliRunner().invoke(kvferry, ["doctor", "--strict", "--json"], obj=disk())
    assert result.exit_code == 0
    findings = json.loads(result.output)["findings"]
    assert [finding["name"] for finding in findings] == [
        *("settings", "gpu", "driver", "batch copy", "link", "numa", "torch", "triton"),
        *("host memory", "container", "/dev/shm", "huge pages"),
        *("disk /", "disk /: space", "disk /: drive", "disk encryption", "disk checksums"),
        *("vllm", "connector", "hash seed"),
    ]
    words = {finding["name"]: finding["words"] for finding in findings}
    assert words["disk /: drive"] == "3.5GiB/s read, 3GiB/s written"
    assert words["disk /: space"] == "100GiB free of 200GiB; up to 64GiB will be used"
    assert words["driver"] == "580.95.05, for CUDA up to 13.0"
    assert "15 ok, 0 warn, 0 fail" in CliRunner().invoke(kvferry, ["doctor"], obj=FIT).output


def test_tiers_are_opened_and_closed_again(monkeypatch):
    env = on({"tiers": "memory:1MiB, far=memory-by-key:1MiB"})
    assert line(env, "tier memory").words == "memory:1MiB: can be opened, has places for blocks"
    assert "finds blocks by their keys" in line(env, "tier far").words
    monkeypatch.setattr("kvferry.tiers.memory.MemoryTier.ailment", "its cable was pulled")
    found = line(on({"tiers": "memory:1MiB"}), "tier memory")
    assert found.grade is Grade.WARN
    assert "its cable was pulled" in found.words


W, F = Grade.WARN, Grade.FAIL
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
UNKNOWN = Machine(read=lambda path: None, env={})
SICK = (
    ("tier store", F, "correct the setting tiers", on({"tiers": "no_such_package.store:open_it"})),
    ("settings", F, "correct the file", on(config=raising(ConfigError("host: unknown unit")))),
    ("gpu", F, "--gpus all", on(gpu=raising(OSError("libcuda.so.1: cannot open")))),
    ("gpu", F, "--gpus all", on(gpu=raising(DriverError("cuInit(): no device")))),
    ("gpu", W, "demo", on(gpu=raising(OSError("no libcuda")), cards=list)),
    ("batch copy", W, "CUDA 12.8 or newer", card(batch_form=BatchForm.ABSENT)),
    ("link", W, "reseat the card", card(width=8)),
    ("link", W, "firmware", card(speed=16.0)),
    ("numa", W, "numactl --cpunodebind=1", on(processors=lambda: frozenset(range(8)))),
    ("torch", F, ".[gpu]", package("torch", None)),
    ("torch", F, "your driver", package("torch", "2.13.0+cpu")),
    ("triton", W, ".[gpu]", package("triton", None)),
    ("host memory", F, "ask for less", on({"host": "500GiB"})),
    ("host memory", F, "docker run", on({"host": "31GiB"})),
    (
        "host memory",
        F,
        "ask for less",
        on({"host": "16GiB"}, machine=machine(LOCAL_WORLD_SIZE="4")),
    ),
    ("host memory", F, "8GiB", on({"host": "auto"}, machine=UNKNOWN)),
    ("host memory", W, "check it yourself", on({"host": "100TiB"}, machine=UNKNOWN)),
    ("/dev/shm", W, "--shm-size", on(room=lambda path: (64 * MiB, 64 * MiB))),
    ("/dev/shm", F, "medium: Memory", on(room=lambda path: None)),
    ("huge pages", W, "echo madvise", on(machine=machine({THP: "always madvise [never]"}))),
    ("vllm", F, "install a vLLM", package("vllm", "0.9.1")),
    ("vllm", W, "in service", package("vllm", "9.0.0")),
    ("connector", F, "with pip", on(plugins=lambda group: ("other",))),
    ("connector", F, "unset VLLM_PLUGINS", on(machine=machine(VLLM_PLUGINS="lora,other"))),
    (
        *("hash seed", W, "PYTHONHASHSEED=0"),
        package("vllm", "0.28.0", machine=machine(PYTHONHASHSEED=None)),
    ),
    (
        *("hash seed", F, "PYTHONHASHSEED=0"),
        package("vllm", "0.28.0", {"disk": "/"}, machine=machine(PYTHONHASHSEED=None)),
    ),
    ("disk /", W, "a drive's directory", mounted("tmpfs")),
    ("disk /", W, "on a local drive", mounted("nfs4")),
    ("disk /", W, "mount a volume", mounted("overlay")),
    ("disk /no/such", W, "mount the drive first", on({"disk": "/no/such"})),
    ("disk /: space", F, "make the directory readable", disk(room=lambda path: None)),
    ("disk /: space", F, "make room", disk(room=lambda path: (GiB, GiB))),
    ("disk /: space", W, "set disk_size to", disk(room=lambda path: (90 * GiB, 40 * GiB))),
    ("disk /: drive", F, "dmesg", disk(drive=lambda _: DriveSpeed(error="denied"))),
    ("disk /: drive", W, "ext4 or xfs", disk(drive=lambda _: replace(FAST, is_direct=False))),
    ("disk /: drive", W, "NVMe", disk(drive=lambda _: replace(FAST, read_rate=90.0 * MiB))),
    ("disk checksums", F, ".[disk]", package("xxhash", None, {"disk": "/"})),
    ("disk encryption", F, "correct the key", disk(machine=keyed("x"))),
    (
        *("disk encryption", F, ".[disk-encryption]"),
        package("cryptography", None, {"disk": "/"}, machine=keyed(KEY)),
    ),
)


@pytest.mark.parametrize(("name", "grade", "remedy", "env"), SICK)
def test_each_ailment_has_its_line_its_remedy_and_its_exit_code(name, grade, remedy, env):
    found = line(env, name)
    assert found.grade is grade
    assert remedy in found.remedy
    done = CliRunner().invoke(kvferry, ["doctor", "--json"], obj=env)
    shown = json.loads(done.output)
    assert (name, grade.value) in [(f["name"], f["grade"]) for f in shown["findings"]]
    assert shown["fit"] is (done.exit_code == 0)
    if grade is F:
        assert done.exit_code == 1
    assert CliRunner().invoke(kvferry, ["doctor", "--strict"], obj=env).exit_code == 1


WELL = (
    ("link", "bench/copy_paths.py", card(speed=0)),
    *(
        ("hash seed", words, package("vllm", version, machine=machine(PYTHONHASHSEED=seed)))
        for version, seed, words in (
            ("0.29.0", None, "not needed"),
            ("0.32.0+cpu", None, "not needed"),
            ("0.26.0", "0", "PYTHONHASHSEED=0"),
            ("0.26.0", "random", "PYTHONHASHSEED=random"),  # to vLLM a text like any other
        )
    ),
)


@pytest.mark.parametrize(("name", "words", "env"), WELL)
def test_what_is_no_ailment_has_no_remedy(name, words, env):
    found = line(env, name)
    assert (found.grade, found.remedy) == (Grade.OK, "")
    assert words in found.words


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on():
    findings = {f.name: f for f in examine(on(room=raising(RuntimeError("odd machine"))))}
    (broken,) = [f for f in findings.values() if "odd machine" in f.words]
    assert broken.grade is Grade.WARN
    assert findings["vllm"].grade is Grade.OK


def test_this_machine_and_a_running_server_can_be_checked():
    server = FakeEndpoint()
    try:
        result = CliRunner().invoke(kvferry, ["doctor", "--json", "--url", server.url])
    finally:
        server.close()
    findings = json.loads(result.output)["findings"]
    assert not [f for f in findings if "could not be checked" in f["words"]]
    assert findings[-1]["words"] == f"kvferry serves at {server.url.rstrip('/')}, 10 requests"
    gone = CliRunner().invoke(kvferry, ["doctor", "--json", "--url", server.url])
    assert json.loads(gone.output)["findings"][-1]["grade"] == "warn"


def test_a_card_is_looked_at_while_it_copies_and_left_as_it_was(monkeypatch):
    driver = FakeDriver()
    seen: list[str] = []

    def read(path: str) -> float:
        seen.append(path)
        return 16

    monkeypatch.setattr("kvferry.tools.doctor.checks.Driver.open", lambda device: driver)
    monkeypatch.setattr(environment, "_read_number", read)
    gpu = environment.inspect_gpu(0)
    assert (gpu.identity, gpu.batch_form) == (driver.identity(), driver.batch_form)
    assert (gpu.width, gpu.max_width) == (16, 16)
    assert [path.rpartition("/")[2] for path in seen] == [
        *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    ]
    made = [call for call in driver.calls if call.startswith(("alloc", "create_stream"))]
    ended = [call for call in driver.calls if call.startswith(("free", "destroy_stream"))]
    assert len(made) == len(ended) == 3


def test_a_link_that_will_not_say_is_unknown(tmp_path):
    file = tmp_path / "link"
    for text, value in {"32.0 GT/s\n": 32.0, "Unknown\n": 0, "255\n": 0, "": 0}.items():
        file.write_text(text)
        assert environment._read_number(str(file)) == value
    assert environment._read_number(str(tmp_path / "none")) == 0


@pytest.mark.parametrize("said", ["²", "9" * 6000, "-1"], ids=range(3))
def test_a_number_of_ranks_that_is_none_does_not_end_it(said):
    findings = examine(on(machine=machine(LOCAL_WORLD_SIZE=said)))
    assert {finding.grade for finding in findings} == {Grade.OK}, findings


def test_a_full_drive_is_not_filled_to_measure_it():
    env = on({"disk": "/", "disk_keep_free": 0}, room=lambda path: (GiB, 400 * MiB))
    names = [f.name for f in examine(replace(env, drive=raising(AssertionError("measured"))))]
    assert "disk /: space" in names
    assert "disk /: drive" not in names


def test_the_nearest_mount_says_the_file_system():
    mounts = MOUNTS.format(kind="ext4")
    assert file_system("/mnt/nvme/blocks", mounts) == "xfs"
    assert file_system("/mnt/nvme2", mounts) == "ext4"
    assert file_system("/far away/x", mounts) == "nfs4"
    assert file_system("/x", "") == ""


def test_a_drive_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(drive, "MOST_BYTES", 16 * MiB)
    found = measure(str(tmp_path))
    assert (found.error, found.read_rate is None, found.write_rate is None) == ("", False, False)
    assert not list(tmp_path.iterdir())
    assert measure_drive(str(tmp_path)).read_rate, "in a process of its own"
    assert measure_drive(str(tmp_path / "none")).error


def test_a_drive_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real: Callable[..., Any] = subprocess.Popen
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: real(sleeps, **how))
    monkeypatch.setattr(drive, "HANG_SECONDS", 0.2)
    assert "not answered" in measure_drive(str(tmp_path)).error
