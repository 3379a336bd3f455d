"""What every test lives under: no leaked threads, a chosen search effort, clear skips."""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import metadata, util

import pytest
from hypothesis import HealthCheck, settings

THREAD_GRACE_S = 20.0
"""Also on a machine that is busy; only a test that leaves one waits so long."""

PROFILE = os.environ.get("KVFERRY_TEST_PROFILE", "dev")
_common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("dev", _common, max_examples=50, stateful_step_count=30)
# The same search every time: a change is judged by what it does, not by a new roll of the dice.
settings.register_profile("ci", _common, max_examples=50, stateful_step_count=30, derandomize=True)
settings.register_profile("soak", _common, max_examples=5000, stateful_step_count=100)
settings.load_profile(PROFILE)


def pytest_report_header() -> list[str]:
    lines = [f"kvferry: test profile {PROFILE} (KVFERRY_TEST_PROFILE=dev|ci|soak)"]
    try:
        versions = " ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton"))
        lines.append(f"kvferry: GPU code runs with {versions}")
    except metadata.PackageNotFoundError as missing:
        lines.append(f"kvferry: {missing.name} is not installed: tests of GPU code are skipped")
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = [item for item in items if "soak" in item.keywords]
    if PROFILE != "soak":
        for item in soak:
            item.add_marker(pytest.mark.skip(reason="runs for minutes; KVFERRY_TEST_PROFILE=soak"))
    else:
        for item in soak:
            item.add_marker(pytest.mark.timeout(3600))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _has_gpu() -> bool:
    if util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(autouse=True)
def no_leaked_threads():
    """Fail a test that leaves a thread behind, daemon or not: what starts it must end it."""
    before = set(threading.enumerate())
    yield
    give_up = time.monotonic() + THREAD_GRACE_S
    while leaked := [t for t in threading.enumerate() if t not in before and t.is_alive()]:
        if time.monotonic() > give_up:
            names = ", ".join(repr(t.name) for t in leaked)
            pytest.fail(
                f"threads started in this test still run {THREAD_GRACE_S:g}s after: {names}"
            )
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_open_rigs(no_leaked_threads):
    """Close the copy engines on fake devices that a test opened; none may leak a resource."""
    yield
    if rigs := sys.modules.get("tests.fakes.rig"):
        rigs.Rig.close_all()
