"""Memory near the GPU: on machines with several nodes, pages should come from the GPU's own.

A copy to or from another node's memory crosses the link between sockets, which is slower than PCIe
and shared. ``mbind`` asks the kernel for near pages. Where a container forbids that, the threads
that touch pages first run on the node's processors, which has the same effect.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

from kvferry.hostmem.limits import ReadText, read_text
from kvferry.hostmem.mapping import Bytes

_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}
_MPOL_PREFERRED = 1
_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Placement:
    """Where pages should come from, in words, and the processors to touch them on."""

    words: str
    node: int | None = None
    cpus: frozenset[int] = frozenset()


def find_placement(pci_bus_id: str | None, read: ReadText = read_text) -> Placement:
    """The node of a GPU, if this machine has several nodes and says which one it is."""
    nodes = parse_list(read("/sys/devices/system/node/online") or "")
    if len(nodes) < 2:
        return Placement("this machine has one memory node")
    if not pci_bus_id:
        return Placement(f"{len(nodes)} memory nodes, no GPU to be near to")
    text = (read(f"/sys/bus/pci/devices/{_sysfs_name(pci_bus_id)}/numa_node") or "").strip()
    node = int(text) if text.isdigit() else None  # -1: the firmware does not say
    if node is None or node not in nodes:
        return Placement(f"{len(nodes)} memory nodes, the GPU's ({pci_bus_id}) is not known")
    cpus = frozenset(parse_list(read(f"/sys/devices/system/node/node{node}/cpulist") or ""))
    return Placement(f"near GPU {pci_bus_id}, node {node} of {len(nodes)}", node, cpus)


def prefer(memory: Bytes, placement: Placement) -> Placement:
    """Ask for pages of ``placement.node``; the result says in words what was done.

    Preferred, not bound: when that node is full, pages come from another.
    """
    if placement.node is None:
        return placement
    number = _MBIND.get(platform.machine())
    error = "no mbind on this machine"
    if number is not None:
        words = placement.node // _BITS + 1
        mask = (ctypes.c_ulong * words)()
        mask[placement.node // _BITS] = 1 << placement.node % _BITS
        arguments = (memory.ctypes.data, memory.nbytes, _MPOL_PREFERRED, ctypes.addressof(mask))
        most = words * _BITS + 1  # the kernel reads one bit less than it is told
        code = _libc.syscall(
            ctypes.c_long(number), *(ctypes.c_ulong(a) for a in (*arguments, most, 0))
        )
        if code == 0:
            return Placement(f"{placement.words}: preferred", placement.node, placement.cpus)
        error = f"mbind: {os.strerror(ctypes.get_errno())}"
    return Placement(
        f"{placement.words}: by the processors that touch it ({error})",
        placement.node,
        placement.cpus,
    )


def run_near(placement: Placement) -> None:
    """Keep the calling thread on the placement's processors, those of them it may use."""
    if placement.cpus:
        allowed = placement.cpus & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)


def parse_list(text: str) -> list[int]:
    """Numbers from the kernel's lists: "0-3,8" is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _sysfs_name(pci_bus_id: str) -> str:
    """sysfs writes four digits of domain where some drivers write eight."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
