"""What a machine can give, on machines of our own making: RAM, cgroups, nodes."""

from __future__ import annotations

import os

import pytest

from kvferry.core.quantities import GiB, MiB
from kvferry.errors import ConfigError
from kvferry.hostmem.limits import (
    AUTO_SHARE,
    Machine,
    Placement,
    bind_thread,
    find_placement,
    shortage,
    size_for,
)
from kvferry.settings.kinds import AUTO

MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {left} kB\nHugePages_Total: 0\n"


def machine(
    *,
    total: int = 64 * GiB,
    left: int = 48 * GiB,
    files: dict[str, str] | None = None,
    cgroup: str = "",
    env: dict[str, str] | None = None,
) -> Machine:
    texts = {
        "/proc/meminfo": MEMINFO.format(total=total // 1024, left=left // 1024),
        "/proc/self/cgroup": cgroup,
        **(files or {}),
    }
    return Machine(read=texts.get, env=env or {})


def v2(path: str, limit: str, used: int, cache: int = 0, high: str = "max") -> dict[str, str]:
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.high": f"{high}\n",
        f"{path}/memory.current": f"{used}\n",
        f"{path}/memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7\n",
    }


ROOT = "/sys/fs/cgroup"


def test_more_than_the_machine_has_left_is_refused_with_limit_and_remedy() -> None:
    with pytest.raises(ConfigError) as refused:
        size_for(47 * GiB, machine())
    words = str(refused.value)
    assert "47GiB is more than the machine's memory allows" in words
    assert "64GiB in all and 48GiB left" in words
    assert "At most 44.8GiB fits" in words
    assert "Remedy: ask for less" in words


def v1(root: str) -> dict[str, str]:
    return {
        f"{root}/memory.limit_in_bytes": str(8 * GiB),
        f"{root}/memory.usage_in_bytes": str(2 * GiB),
        f"{root}/memory.stat": f"cache 5\ntotal_inactive_file {GiB}\n",
    }


OLD = "9:cpu,cpuacct:/x\n4:memory:{}\n0::/\n"
BOUNDED: dict[str, tuple[str, dict[str, str], int, str]] = {
    "a container": ("0::/\n", v2(ROOT, str(16 * GiB), 2 * GiB), 13, r"/cgroup/memory\.max"),
    "used up": ("0::/\n", v2(ROOT, str(16 * GiB), 15 * GiB), 0, r"memory\.max"),
    "used by cache that the kernel would drop": (
        *("0::/\n", v2(ROOT, str(16 * GiB), 15 * GiB, cache=10 * GiB), 10, r"memory\.max"),
    ),
    "where the kernel slows us down": (
        *("0::/\n", v2(ROOT, "max", GiB, high=str(4 * GiB)), 2, r"memory\.high"),
    ),
    "a group above ours is tighter": (
        "0::/pod/engine\n",
        {
            **v2(f"{ROOT}/pod/engine", str(32 * GiB), GiB),
            **v2(f"{ROOT}/pod", str(8 * GiB), 2 * GiB),
        },
        *(5, r"/cgroup/pod/memory\.max"),
    ),
    "version 1, by path": (
        *(OLD.format("/docker/abc"), v1(f"{ROOT}/memory/docker/abc"), 6, "limit_in_bytes"),
    ),
    "version 1, at its mount": (
        *(OLD.format("/not/seen/from/inside"), v1(f"{ROOT}/memory"), 6, "limit_in_bytes"),
    ),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_a_container_bounds_what_the_machine_has(case: str) -> None:
    cgroup, files, fits, words = BOUNDED[case]
    inside = machine(cgroup=cgroup, files=files)
    if fits:
        assert size_for(fits * GiB, inside) == fits * GiB
    with pytest.raises(ConfigError, match=rf"{words} allows.*--memory"):
        size_for((fits + 1) * GiB, inside)


def test_no_limit_is_no_limit_in_either_form() -> None:
    files = {
        **v2(ROOT, "max", GiB),
        f"{ROOT}/memory/memory.limit_in_bytes": "9223372036854771712",
        f"{ROOT}/memory/memory.usage_in_bytes": "0",
    }
    inside = machine(cgroup="4:memory:/\n0::/\n", files=files)
    assert [limit.name for limit in inside.limits()] == ["the machine's memory"]


def test_auto_leaves_a_margin_and_shares_with_the_other_ranks() -> None:
    usable = 48 * GiB - 64 * GiB // 20
    assert size_for(AUTO, machine()) == int(usable * AUTO_SHARE)
    assert size_for(AUTO, machine(), num_ranks=8) == int(usable * AUTO_SHARE) // 8


def test_auto_on_a_machine_that_says_nothing_is_refused() -> None:
    dumb = Machine(read=lambda path: None, env={})
    with pytest.raises(ConfigError, match="give a size such as 8GiB"):
        size_for(AUTO, dumb)
    assert size_for(GiB, dumb) == GiB


def test_ranks_that_all_ask_must_all_fit() -> None:
    with pytest.raises(ConfigError, match=r"10GiB for each of 8 ranks .* At most 7\.6GiB"):
        size_for(10 * GiB, machine(), num_ranks=8)


def test_growth_may_use_half_the_margin_but_not_more() -> None:
    margin = 64 * GiB // 20
    assert shortage(machine(left=margin), margin // 2 - MiB) == ""
    words = shortage(machine(left=margin), margin // 2 + MiB)
    assert "the machine's memory has only 3.2GiB left of 64GiB" in words


@pytest.mark.parametrize(("said", "ranks"), [("", 1), ("4", 4), ("0", 1), ("many", 1)])
def test_ranks_of_this_host_are_those_the_launcher_says(said: str, ranks: int) -> None:
    assert machine(env={"LOCAL_WORLD_SIZE": said}).num_ranks_here() == ranks


GPU = "0000:c1:00.0"


def two_nodes(node: str = "1") -> dict[str, str]:
    return {
        "/sys/devices/system/node/online": "0-1\n",
        f"/sys/bus/pci/devices/{GPU}/numa_node": f"{node}\n",
        "/sys/devices/system/node/node1/cpulist": "8-11,24\n",
    }


@pytest.mark.parametrize("bus_id", [GPU, "00000000:C1:00.0"])
def test_the_gpus_own_node_is_found(bus_id: str) -> None:
    found = find_placement(bus_id, two_nodes().get)
    assert found.node == 1
    assert found.cpus == {8, 9, 10, 11, 24}
    assert "node 1 of 2" in found.words


@pytest.mark.parametrize("node", ["-1", "7", ""])
def test_a_gpu_whose_node_is_not_known_is_said_so(node: str) -> None:
    found = find_placement(GPU, two_nodes(node).get)
    assert found.node is None
    assert "is not known" in found.words


def test_threads_stay_on_processors_they_may_use() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        bind_thread(Placement("near", 0, frozenset({one, 4096})))
        assert os.sched_getaffinity(0) == {one}
        bind_thread(Placement("far", 0, frozenset({4096})))
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)
