"""The first store and the first hit find everything made: no import, no thread, no compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

OPENED = {
    "cpu": """
kv = [np.zeros((96, 4096), np.uint8) for _ in range(4)]
ferry = kvferry.attach(kv, model="m", block_tokens=16, host="4MiB", load_policy="always")
""",
    "a stand-in for a card": """
import call_time
call_time.HOST_BYTES = 1 << 28
ferry = call_time.StandIn(32 << 10, 96).ferry
""",
}
HIT = """
def state():
    return set(sys.modules), {thread.name for thread in threading.enumerate()}

while ferry.host_stats().ready_slots < ferry.host_stats().num_slots:
    ferry.poll(0.01)
before = state()
launching.compile_for = None
for count in (4, 80):
    keys = ferry.keys(np.arange(16 * count) + count)
    assert ferry.wait(ferry.store(keys, np.arange(count))).num_blocks == count
    assert ferry.wait(ferry.load(ferry.match(keys), np.arange(count))).num_blocks == count
made = [now - then for now, then in zip(state(), before)]
assert made == [set(), set()], made
ferry.close()
"""


@pytest.mark.parametrize("device", OPENED)
def test_the_first_hit_finds_everything_made(device: str) -> None:
    """In a process of its own: here most modules are imported already."""
    begin = (
        f"import sys, threading\nsys.path.insert(0, {str(BENCH)!r})\nimport numpy as np, kvferry\n"
    )
    begin += OPENED[device] + "import kvferry.transfer.kernels.launch as launching\n"
    done = subprocess.run([sys.executable, "-c", begin + HIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
