"""Which node a GPU is near to, and what is said about it, on machines of our own making."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvferry.hostmem.limits import Placement, find_placement, parse_list, prefer, run_near
from kvferry.hostmem.slots import PrivateMemory

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


def test_what_was_done_is_said() -> None:
    memory = PrivateMemory(1 << 21).bytes
    asked = Placement("near GPU x, node 0 of 2", 0, frozenset({0}))
    done = prefer(memory, asked)
    assert done.node == 0
    assert done.words.startswith("near GPU x, node 0 of 2: ")
    memory[:] = 1
    assert np.all(memory == 1)


def test_a_refused_mbind_falls_back_on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    done = prefer(PrivateMemory(1 << 21).bytes, Placement("near", 0, frozenset({0})))
    assert "by the processors that touch it (no mbind on this machine)" in done.words


def test_threads_stay_on_processors_they_may_use() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        run_near(Placement("near", 0, frozenset({one, 4096})))
        assert os.sched_getaffinity(0) == {one}
        run_near(Placement("far", 0, frozenset({4096})))
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("", []), ("5", [5]), ("0", [0])]
)
def test_the_kernels_lists_are_read(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers
