"""The example for Hugging Face models: it compares its answers with the model's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_generate.py"


def test_later_turns_load_what_earlier_ones_computed():
    run = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    loaded = [int(found) for found in re.findall(r"(\d+) of them loaded", run.stdout)]
    assert loaded == [0, 208, 304]
    assert "The answers are those of the model alone." in run.stdout
