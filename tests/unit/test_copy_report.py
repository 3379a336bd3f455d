"""What the copy benchmark makes of a run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "copy-h200.json"


def test_a_kept_run_becomes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    text = importlib.import_module("_copy_report").report(json.loads(KEPT.read_text()))
    for heading in ("Host to GPU", "GPU to host", "small transfers", "costs the model"):
        assert heading in text
