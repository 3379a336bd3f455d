"""What this machine can give: memory, its container's limits, pages near the GPU.

All of it is read through :class:`Machine`, so that a test can be any machine. The kernel does not
refuse memory that is not there: it lets a process touch it and then kills one. So the limits are
read before, and less is taken than is left.
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
"""A file's text, or None where it cannot be read."""

AUTO_SHARE = 0.75
"""The share of usable memory; the rest is for what the engine has yet to load."""

_LEAST_MARGIN = 512 * MiB
_MARGIN_SHARE = 20  # one part in so many of the machine or the container stays free

_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page; no machine has this much."""

_DIGITS = re.compile(r"[0-9]{1,20}")


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Limit:
    """One bound on memory: its name, total and free bytes, and the remedy that lifts it."""

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
    """Reads the machine's limits. Owns nothing; every answer is read anew."""

    read: ReadText = read_text
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def limits(self) -> list[Limit]:
        """Every bound that can be read, the tightest first."""
        found = [*self._ram(), *self._cgroups()]
        return sorted(found, key=lambda limit: limit.usable)

    def num_ranks_here(self) -> int:
        """Processes like this one on this host, as torchrun sets it; else 1."""
        said = self.env.get("LOCAL_WORLD_SIZE", "")
        return int(said) if _DIGITS.fullmatch(said) and int(said) > 0 else 1

    def _ram(self) -> Iterator[Limit]:
        lines = _table(self.read("/proc/meminfo"), ":")
        total, left = lines.get("MemTotal"), lines.get("MemAvailable", lines.get("MemFree"))
        if total is not None and left is not None:
            remedy = "ask for less, or end what else uses the machine's memory"
            yield Limit("the machine's memory", total, left, remedy)

    def _cgroups(self) -> Iterator[Limit]:
        """Of version 2 and of version 1."""
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
        """Our own group and all above it: each of them may limit us."""
        path = ""
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            _, controllers, where = (*line.split(":", 2), "", "")[:3]
            if controller in controllers.split(","):
                path = where.strip("/")
                break
        else:
            return
        # Inside a container the path may be that of the host: then only the mount's root is there.
        while path:
            yield f"{mount}/{path}"
            path = path.rpartition("/")[0]
        yield mount


def size_for(asked: int | Auto, machine: Machine, *, num_ranks: int = 1) -> int:
    """Bytes of host memory for each of ``num_ranks`` on this host that all ask for the same.

    ConfigError, with the limit and the remedy, where the machine cannot give what was asked.
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
        # What other ranks already took is gone from what is left, so only one more must fit there.
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
    """Why ``num_bytes`` more should not be touched now; empty if they may.

    Half the margin may be used up by then: other processes allocate too, and a granted pool should
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
    """Lines of a name and a number; those of /proc count in kB."""
    table = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(separator)
        words = value.split()
        if words and words[0].isdigit():
            table[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return table


@dataclass(frozen=True)
class Placement:
    """Where pages should come from, in words, and the processors to touch them on.

    A copy to or from another node's memory crosses the slow, shared link between sockets. A page
    comes from the node of the processor that touches it first, as long as that node has some left.
    """

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
    # sysfs writes four digits of domain where some drivers write eight.
    domain, _, rest = pci_bus_id.lower().partition(":")
    text = (read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node") or "").strip()
    node = int(text) if text.isdigit() else None  # -1: the firmware does not say
    if node is None or node not in nodes:
        return Placement(f"{len(nodes)} memory nodes, the GPU's ({pci_bus_id}) is not known")
    cpus = frozenset(parse_list(read(f"/sys/devices/system/node/node{node}/cpulist") or ""))
    return Placement(f"near GPU {pci_bus_id}, node {node} of {len(nodes)}", node, cpus)


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
