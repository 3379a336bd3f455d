"""kill -9 of the engine, of its drive process, or of both: 64 times, in the soak 208 times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROFILE = os.environ.get("KVFERRY_TEST_PROFILE", "dev")
KILLS_EACH = 52 if PROFILE == "soak" else 16


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fault.disk_lives", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("secret", ["", "s" * 32])
def test_every_block_is_there_and_right_or_cleanly_absent(tmp_path: Path, secret: str) -> None:
    seed = 7 if PROFILE == "ci" else int.from_bytes(os.urandom(2), "big")
    runs = [
        start(tmp_path / str(at), str(seed + at), str(KILLS_EACH), *filter(None, [secret]))
        for at in range(2)
    ]
    for run in runs:
        out, errors = run.communicate(timeout=380)
        assert run.returncode == 0, f"seed {seed}: {errors[-2000:]}"
        found = re.fullmatch(r"(\d+) kills, (\d+) blocks found again and right\n", out)
        assert found is not None
        assert int(found[1]) >= KILLS_EACH
        assert int(found[2]) > KILLS_EACH, "hardly a block was ever found again"
