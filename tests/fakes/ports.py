"""Ports for servers that must be told theirs.

A port that the system picks (a bind to 0) is one of those it hands to everybody: between the pick
and the server's start any other server or connection of this machine may get it. These lie outside
that range, and none is given twice.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 20_000  # Mooncake's own clients take theirs from below
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of ``count`` that follow each other."""
    ports = _outside()
    for _ in range(10_000):
        first = random.SystemRandom().choice(ports)
        wanted = range(first, first + count)
        if wanted[-1] in ports and _given.isdisjoint(wanted) and all(map(_is_free, wanted)):
            _given.update(wanted)
            return first
    raise AssertionError(f"no {count} free ports between {ports[0]} and {ports[-1]}")


def _outside() -> range:
    """The longer of the two ranges from which the system picks nothing."""
    low, high = 32_768, 60_999
    with suppress(OSError, ValueError):
        low, high = map(int, _RANGE.read_text().split())
    outside = max(range(_LOWEST, low), range(high + 1, 65_536), key=len)
    return outside or range(_LOWEST, 65_536)


def _is_free(port: int) -> bool:
    """On every address of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
