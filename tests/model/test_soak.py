"""A short soak in every test run; ``make soak`` is the long one."""

from __future__ import annotations

import mmap
import sys

import pytest
from tests.soak import SERVERS, resident_kib, soak


def test_twenty_thousand_operations() -> None:
    report = soak(20_000, seed=1)
    assert report.total == 20_000
    assert report.num_checks == 80
    assert report.num_loads > 50
    assert report.num_failed_loads > 0
    assert report.num_finished > 200
    assert all(report.operations[name] for name in ("abort", "preempt", "reset", "expire"))


def test_it_stops_when_time_is_up() -> None:
    report = soak(10**9, seed=2, seconds=0.2)
    assert 0 < report.total < 10**6
    assert "too short" in report.lines()[-1]


def test_the_servers_differ() -> None:
    assert len(set(SERVERS)) == len(SERVERS)
    assert {setup.store_mode for setup in SERVERS} == {"eager", "lazy"}
    assert {len(setup.tiers) for setup in SERVERS} == {0, 1, 2}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_read() -> None:
    before = resident_kib()
    with mmap.mmap(-1, 64 << 20) as much:  # a bytearray may lie where freed memory still is
        much.write(bytes(64 << 20))
        assert resident_kib() > before + (32 << 10)
