"""``kvferry calibrate`` without a card, and what the copy benchmark makes of a run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.errors import DriverError
from kvferry.tools.cli import calibrate as card
from kvferry.tools.cli.calibrate import calibrate
from kvferry.transfer.driver import Driver

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "copy-h200.json"


def no_driver(device: int = 0) -> None:
    raise DriverError("libcuda.so.1: cannot open shared object file")


def test_without_a_gpu_it_says_what_is_missing_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Driver, "open", staticmethod(no_driver))
    result = CliRunner().invoke(calibrate, [])
    assert result.exit_code == 1
    for words in ("needs an NVIDIA GPU", "libcuda.so.1", "kvferry demo"):
        assert words in result.output


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "open", staticmethod(lambda device: object()))
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    result = CliRunner().invoke(calibrate, [])
    assert result.exit_code == 1
    assert "need triton" in result.output
    assert ".[gpu]" in result.output


def test_a_kept_run_becomes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    text = importlib.import_module("_copy_report").report(json.loads(KEPT.read_text()))
    for heading in ("Host to GPU", "GPU to host", "small transfers", "costs the model"):
        assert heading in text
