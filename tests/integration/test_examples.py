"""Every example runs as it stands, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = {"transformers_generate.py"}  # needs transformers: tests/connector runs it
FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in ELSEWHERE)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
