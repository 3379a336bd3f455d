"""A short soak in every test run; ``make soak`` is the long one."""

from __future__ import annotations

from tests.soak import soak


def test_twenty_thousand_operations() -> None:
    report = soak(20_000, seed=1)
    assert report.total == 20_000
    assert report.num_checks == 80
    assert report.num_loads > 50
    assert report.num_failed_loads > 0
    assert report.num_finished > 200
    assert all(report.operations[name] for name in ("abort", "preempt", "reset", "expire"))
