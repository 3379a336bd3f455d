"""Limits of host memory: the machine's RAM, the container's limits, the GPU's NUMA node.

Tests replace :class:`Machine`, which reads the limits. The kernel does not refuse memory that does
not exist: it lets processes touch it and then kills one. So kvferry reads the limits first and
takes less than is left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvferry.core.quantities import MiB, rounded_size
from kvferry.errors import ConfigError
from kvferry.settings.kinds import AUTO, Auto

ReadText = Callable[[str], str | None]
"""Returns a file's text, or None if it cannot be read."""

AUTO_SHARE = 0.75
"""Share of usable memory that ``host = "auto"`` takes; the engine may still need the rest."""

_LEAST_MARGIN = 512 * MiB
_MARGIN_SHARE = 20  # a twentieth of the machine or the container stays free

_NO_LIMIT = 1 << 60
"""Bytes from which a cgroup limit means none: cgroup v1 writes the largest multiple of a page."""

_DIGITS = re.compile(r"[0-9]{1,20}")


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Limit:
    """A limit on memory: its name, its total and free bytes, and how to raise it."""

    name: str
    total: int
    left: int
    remedy: str

    @property
    def margin(self) -> int:
        """Bytes to leave free: other processes grow too, and the kernel needs some."""
        return min(max(_LEAST_MARGIN, self.total // _MARGIN_SHARE), self.total // 4)

    @property
    def usable(self) -> int:
        return max(0, self.left - self.margin)


@dataclass(frozen=True)
class Machine:
    """Reads the machine's limits, anew at every call. Owns nothing."""

    read: ReadText = read_text
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def limits(self) -> list[Limit]:
        """Return every limit that can be read, the tightest first."""
        found = [*self._ram(), *self._cgroups()]
        return sorted(found, key=lambda limit: limit.usable)

    def num_ranks_here(self) -> int:
        """Return the number of ranks on this host, from torchrun's variable; 1 without it."""
        said = self.env.get("LOCAL_WORLD_SIZE", "")
        return int(said) if _DIGITS.fullmatch(said) and int(said) > 0 else 1

    def _ram(self) -> Iterator[Limit]:
        lines = _table(self.read("/proc/meminfo"), ":")
        total, left = lines.get("MemTotal"), lines.get("MemAvailable", lines.get("MemFree"))
        if total is not None and left is not None:
            remedy = "ask for less, or end what else uses the machine's memory"
            yield Limit("the machine's memory", total, left, remedy)

    def _cgroups(self) -> Iterator[Limit]:
        """Yield the limits of cgroup version 2 and version 1."""
        for path in self._cgroup_paths("", "/sys/fs/cgroup"):
            for file in ("memory.max", "memory.high"):
                yield from self._cgroup(path, file, "memory.current", "inactive_file")
        for path in self._cgroup_paths("memory", "/sys/fs/cgroup/memory"):
            yield from self._cgroup(
                path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )

    def _cgroup(self, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[Limit]:
        total, used = _number(self.read(f"{path}/{limit}")), _number(self.read(f"{path}/{usage}"))
        if total is None or used is None or total >= _NO_LIMIT:
            return
        cache = _table(self.read(f"{path}/memory.stat"), " ").get(reclaimable, 0)
        yield Limit(
            f"the container's limit {path}/{limit}",
            total,
            max(0, total - used + min(cache, used)),
            "ask for less, or give the container more (docker run --memory, Kubernetes "
            "resources.limits.memory, systemd MemoryMax)",
        )

    def _cgroup_paths(self, controller: str, mount: str) -> Iterator[str]:
        """Yield the folders of this process's cgroup and its parents: each may set a limit."""
        path = ""
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            _, controllers, where = (*line.split(":", 2), "", "")[:3]
            if controller in controllers.split(","):
                path = where.strip("/")
                break
        else:
            return
        # In a container the path may be the host's: then only the root of the mount exists.
        while path:
            yield f"{mount}/{path}"
            path = path.rpartition("/")[0]
        yield mount


def size_for(asked: int | Auto, machine: Machine, *, num_ranks: int = 1) -> int:
    """Return the bytes of host memory for each of ``num_ranks`` ranks that ask for as much.

    ConfigError, with the limit and the remedy, if the machine has less than ``asked``.
    """
    limits = machine.limits()
    if asked is AUTO:
        if not limits:
            raise ConfigError(
                'host: "auto" needs to know how much memory there is, and neither /proc/meminfo '
                "nor a cgroup says; give a size such as 8GiB"
            )
        return max(1, int(limits[0].usable * AUTO_SHARE) // num_ranks)
    for limit in limits:
        # ``left`` excludes what other ranks already took, so only this rank must fit into it.
        most = min(limit.usable, (limit.total - limit.margin) // num_ranks)
        if asked > most:
            each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise ConfigError(
                f"host: {rounded_size(asked)}{each} is more than {limit.name} allows. There are "
                f"{rounded_size(limit.total)} in all and {rounded_size(limit.left)} left, of which "
                f"{rounded_size(limit.margin)} must stay free. At most {rounded_size(most)} fits. "
                f"Remedy: {limit.remedy}"
            )
    return asked


def shortage(machine: Machine, num_bytes: int) -> str:
    """Return why ``num_bytes`` more must not be touched now; empty if they may be.

    Half the margin may be used: other processes allocate too, and a pool that was granted should
    not stop short of its last bytes.
    """
    for limit in machine.limits():
        if limit.left - num_bytes < limit.margin // 2:
            least = rounded_size(limit.margin // 2)
            return (
                f"{limit.name} has only {rounded_size(limit.left)} left of "
                f"{rounded_size(limit.total)}, and {least} must stay free. Remedy: {limit.remedy}"
            )
    return ""


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if _DIGITS.fullmatch(text) else None


def _table(text: str | None, separator: str) -> dict[str, int]:
    """Parse lines of a name and a number; a number followed by "kB" is in KiB."""
    table = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(separator)
        words = value.split()
        if words and words[0].isdigit():
            table[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return table


@dataclass(frozen=True)
class Placement:
    """The NUMA node that pages should come from, and the processors to touch them on.

    A copy to or from another node's memory crosses the slow, shared link between sockets. A page
    comes from the node of the processor that touches it first, while that node has free memory.
    """

    words: str
    node: int | None = None
    cpus: frozenset[int] = frozenset()


def find_placement(pci_bus_id: str | None, read: ReadText = read_text) -> Placement:
    """Return the placement near a GPU; it has no node if the machine has one or names none."""
    nodes = parse_list(read("/sys/devices/system/node/online") or "")
    if len(nodes) < 2:
        return Placement("this machine has one memory node")
    if not pci_bus_id:
        return Placement(f"{len(nodes)} memory nodes, no GPU to be near to")
    # sysfs writes four digits of domain where some drivers write eight.
    domain, _, rest = pci_bus_id.lower().partition(":")
    text = (read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node") or "").strip()
    node = int(text) if text.isdigit() else None  # -1: the firmware does not say
    if node is None or node not in nodes:
        return Placement(f"{len(nodes)} memory nodes, the GPU's ({pci_bus_id}) is not known")
    cpus = frozenset(parse_list(read(f"/sys/devices/system/node/node{node}/cpulist") or ""))
    return Placement(f"near GPU {pci_bus_id}, node {node} of {len(nodes)}", node, cpus)


def bind_thread(placement: Placement) -> None:
    """Bind the calling thread to the placement's processors, as far as it may use them."""
    if placement.cpus:
        allowed = placement.cpus & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)


def parse_list(text: str) -> list[int]:
    """Parse a list as the kernel writes it: "0-3,8" is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
