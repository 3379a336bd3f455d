"""``doctor`` on machines we do not have: each line that is not ok is brought about once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.fakes.driver import FakeDriver

from kvferry.config import Config
from kvferry.core.quantities import GiB, MiB
from kvferry.errors import ConfigError, DriverError
from kvferry.hostmem.limits import Machine
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.doctor import machine as environment
from kvferry.tools.doctor.checks import examine
from kvferry.tools.doctor.machine import Environment, Finding, Gpu, Grade
from kvferry.transfer.driver import BatchForm, DeviceIdentity, Driver

CARD = Gpu(
    identity=DeviceIdentity("NVIDIA Test", 13000, "00000000:41:00.0", "32.0 GT/s PCIe x16"),
    batch_form=BatchForm.WITHOUT_FAIL_INDEX,
    speed="32.0 GT/s PCIe",
    width="16",
    max_speed="32.0 GT/s PCIe",
    max_width="16",
)

FILES = {
    "/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
    "/proc/self/cgroup": "0::/pod\n",
    "/sys/fs/cgroup/pod/memory.max": f"{32 * GiB}\n",
    "/sys/fs/cgroup/pod/memory.current": f"{2 * GiB}\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/node/online": "0-1\n",
    "/sys/devices/system/node/node0/cpulist": "0-7\n",
    "/sys/devices/system/node/node1/cpulist": "8-15\n",
    "/sys/devices/system/node/node1/distance": "21 10\n",
    "/sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
    "/proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 13.3.0\n"
    ),
}
PACKAGES = {"torch": "2.13.0", "triton": "3.7.1", "vllm": "0.32.0"}


def machine(
    files: dict[str, str | None] | None = None, memlock: int | None = None, **env: str | None
):
    known = {**FILES, **(files or {})}
    said = {name: value for name, value in {"PYTHONHASHSEED": "0", **env}.items() if value}
    return Machine(read=known.get, memlock=lambda: memlock, env=said)


FIT = Environment(
    machine=machine(),
    python=(3, 12),
    gpu=lambda: CARD,
    cards=lambda: ("/dev/nvidia0",),
    package=PACKAGES.get,
    plugins=lambda group: ("kvferry", "other"),
    room=lambda path: (8 * GiB, 8 * GiB),
    processors=lambda: frozenset(range(16)),
    has_profile=lambda identity, paths: True,
)


def with_card(**changes) -> Environment:
    return replace(FIT, gpu=lambda: replace(CARD, **changes))


def with_package(name: str, version: str | None) -> Environment:
    return replace(FIT, package={**PACKAGES, name: version}.get)


def raising(error: Exception):
    def look(*_):
        raise error

    return look


def settings(**values) -> Environment:
    return replace(FIT, config=lambda env: Config.from_dict(values))


def line(env: Environment, name: str) -> Finding:
    (found,) = [finding for finding in examine(env) if finding.name == name]
    return found


def test_a_fit_machine_is_ok_in_every_line():
    findings = examine(FIT)
    assert {finding.grade for finding in findings} == {Grade.OK}, findings
    assert [finding.name for finding in findings] == [
        *("python", "settings", "gpu", "driver", "batch copy", "link", "numa", "torch", "triton"),
        *("calibration", "host memory", "container", "locked memory", "/dev/shm", "huge pages"),
        *("vllm", "connector", "hash seed"),
    ]


def test_tiers_are_opened_and_closed_again():
    env = settings(tiers="memory:1MiB, far=memory-by-key:1MiB")
    assert line(env, "tier memory").words == "memory:1MiB: can be opened, has places for blocks"
    assert "finds blocks by their keys" in line(env, "tier far").words


def test_a_tier_that_cannot_be_used_yet_is_a_warning(monkeypatch):
    monkeypatch.setattr("kvferry.tiers.memory.MemoryTier.ailment", "its cable was pulled")
    found = line(settings(tiers="memory:1MiB"), "tier memory")
    assert found.grade is Grade.WARN
    assert "its cable was pulled" in found.words


def on(**changes) -> Environment:
    return replace(FIT, **changes)


W, F = Grade.WARN, Grade.FAIL
NEVER: dict[str, str | None] = {
    "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"
}
UNKNOWN = Machine(read=lambda path: None, env={})
SICK = (
    ("tier store", F, "correct the setting tiers", settings(tiers="no_such_package.store:open_it")),
    ("python", F, "3.10 to 3.14", on(python=(3, 9))),
    ("python", F, "3.10 to 3.14", on(python=(3, 15))),
    ("settings", F, "correct the file", on(config=raising(ConfigError("host: unknown unit")))),
    ("gpu", F, "--gpus all", on(gpu=raising(OSError("libcuda.so.1: cannot open")))),
    ("gpu", F, "--gpus all", on(gpu=raising(DriverError("cuInit(): no device")))),
    ("gpu", W, "demo", on(gpu=raising(OSError("no libcuda")), cards=lambda: ())),
    ("batch copy", W, "CUDA 12.8 or newer", with_card(batch_form=BatchForm.ABSENT)),
    ("link", W, "reseat the card", with_card(width="8")),
    ("link", W, "firmware", with_card(speed="16.0 GT/s PCIe")),
    ("numa", W, "numactl --cpunodebind=1", on(processors=lambda: frozenset(range(8)))),
    ("torch", F, ".[gpu]", with_package("torch", None)),
    ("torch", F, "your driver", with_package("torch", "2.13.0+cpu")),
    ("triton", W, ".[gpu]", with_package("triton", None)),
    ("calibration", W, "kvferry calibrate", on(has_profile=lambda identity, paths: False)),
    ("host memory", F, "ask for less", settings(host="500GiB")),
    ("host memory", F, "docker run", settings(host="31GiB")),
    (
        *("host memory", F, "ask for less"),
        replace(settings(host="16GiB"), machine=machine(LOCAL_WORLD_SIZE="4")),
    ),
    ("host memory", F, "8GiB", replace(settings(host="auto"), machine=UNKNOWN)),
    ("locked memory", W, "ulimit -l unlimited", on(machine=machine(memlock=8 * MiB))),
    (
        *("locked memory", W, "ulimit -l unlimited"),
        replace(settings(host_pin="required"), machine=machine(memlock=8 * MiB)),
    ),
    ("/dev/shm", W, "--shm-size", on(room=lambda path: (64 * MiB, 64 * MiB))),
    ("/dev/shm", F, "medium: Memory", on(room=lambda path: None)),
    ("huge pages", W, "echo madvise", on(machine=machine(NEVER))),
    ("vllm", F, "install a vLLM", with_package("vllm", "0.9.1")),
    ("vllm", W, "in service", with_package("vllm", "9.0.0")),
    ("connector", F, "with pip", on(plugins=lambda group: ("other",))),
    ("connector", F, "unset VLLM_PLUGINS", on(machine=machine(VLLM_PLUGINS="lora,other"))),
    (
        *("hash seed", W, "PYTHONHASHSEED=0"),
        replace(with_package("vllm", "0.28.0"), machine=machine(PYTHONHASHSEED=None)),
    ),
)


@pytest.mark.parametrize(("name", "grade", "remedy", "env"), SICK)
def test_each_ailment_has_its_line_its_remedy_and_its_exit_code(name, grade, remedy, env):
    found = line(env, name)
    assert found.grade is grade
    assert remedy in found.remedy
    done = CliRunner().invoke(kvferry, ["doctor", "--json"], obj=env)
    assert done.exit_code == (1 if grade is F else 0), done.output
    shown = json.loads(done.output)
    assert shown["fit"] is (grade is not F)
    assert (name, grade.value) in [(f["name"], f["grade"]) for f in shown["findings"]]


def test_strict_fails_for_a_warning():
    assert CliRunner().invoke(kvferry, ["doctor", "--strict"], obj=SICK[6][3]).exit_code == 1


def test_a_fit_machine_passes_strictly():
    result = CliRunner().invoke(kvferry, ["doctor", "--strict"], obj=FIT)
    assert result.exit_code == 0
    assert "18 ok, 0 warn, 0 fail" in result.output


@pytest.mark.parametrize(
    ("version", "seed", "grade", "words"),
    [
        ("0.26.0", None, Grade.WARN, "names blocks differently"),
        ("0.28.0", None, Grade.WARN, "names blocks differently"),
        ("0.29.0", None, Grade.OK, "not needed"),
        ("0.32.0+cpu", None, Grade.OK, "not needed"),
        ("0.26.0", "0", Grade.OK, "PYTHONHASHSEED=0"),
        ("0.26.0", "random", Grade.OK, "PYTHONHASHSEED=random"),  # to vLLM a text like any other
    ],
)
def test_a_hash_seed_is_asked_for_where_this_vllm_needs_one(version, seed, grade, words):
    env = replace(with_package("vllm", version), machine=machine(PYTHONHASHSEED=seed))
    found = line(env, "hash seed")
    assert found.grade is grade
    assert words in found.words


def test_a_hidden_link_is_no_fault():
    found = line(with_card(speed=None, width=None, max_speed=None, max_width=None), "link")
    assert found.grade is Grade.OK
    assert "bench/copy_paths.py" in found.words


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on():
    env = replace(FIT, room=raising(RuntimeError("odd machine")))
    findings = {finding.name: finding for finding in examine(env)}
    broken = [f for f in examine(env) if "odd machine" in f.words]
    assert len(broken) == 1
    assert broken[0].grade is Grade.WARN
    assert findings["vllm"].grade is Grade.OK


def test_this_machine_can_be_looked_at():
    result = CliRunner().invoke(kvferry, ["doctor", "--json"])
    assert result.exit_code in (0, 1)
    findings = json.loads(result.output)["findings"]
    assert not [f for f in findings if "could not be looked at" in f["words"]]


def test_a_card_is_looked_at_while_it_copies_and_left_as_it_was(monkeypatch):
    driver = FakeDriver()
    seen = []

    def said(path: str) -> str:
        seen.append(path)
        return "16"

    monkeypatch.setattr(Driver, "open", lambda device: driver)
    monkeypatch.setattr(environment, "_read_value", said)
    gpu = environment.look_at_gpu(0)
    assert gpu.identity == driver.identity()
    assert gpu.batch_form is driver.batch_form
    assert (gpu.width, gpu.max_width) == ("16", "16")
    assert [path.rpartition("/")[2] for path in seen] == [
        *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    ]
    made = [call for call in driver.calls if call.startswith(("alloc", "create_stream"))]
    ended = [call for call in driver.calls if call.startswith(("free", "destroy_stream"))]
    assert len(made) == len(ended) == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("32.0 GT/s PCIe\n", "32.0 GT/s PCIe"), ("Unknown\n", None), ("255\n", None), ("", None)],
)
def test_a_link_that_will_not_say_is_unknown(tmp_path, text, value):
    file = tmp_path / "link"
    file.write_text(text)
    assert environment._read_value(str(file)) == value
    assert environment._read_value(str(tmp_path / "none")) is None


def test_where_nothing_says_how_much_there_is_no_size_is_said_to_fit():
    blind = Machine(read=lambda path: None, memlock=lambda: None, env={"PYTHONHASHSEED": "0"})
    found = line(replace(settings(host="100TiB"), machine=blind), "host memory")
    assert found.grade is Grade.WARN
    assert "fits" not in found.words


@pytest.mark.parametrize("said", ["²", "٣", "9" * 6000, "-1", "1.5"], ids=range(5))
def test_a_number_of_ranks_that_is_none_does_not_end_it(said):
    findings = examine(replace(FIT, machine=machine(LOCAL_WORLD_SIZE=said)))
    assert {finding.grade for finding in findings} == {Grade.OK}, findings
