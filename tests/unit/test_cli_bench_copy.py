"""``kvferry bench copy`` and ``kvferry calibrate`` without a card, and what is made of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvferry.tools.cli import calibrate as card
from kvferry.tools.cli.bench_copy import bench_copy, plot, report
from kvferry.tools.cli.calibrate import calibrate
from kvferry.tools.cli.output import show
from kvferry.transfer.bench import BenchResult, OneCopy, PlannerCell, SlowdownRow, TimedCopy
from kvferry.transfer.driver.cuda import CudaDriver

MiB = 1 << 20
KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "copy-h200.json"


def no_driver(device: int = 0) -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("command", [bench_copy, calibrate], ids=["bench copy", "calibrate"])
def test_without_a_gpu_it_says_what_is_missing_and_what_to_do(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDriver, "open", staticmethod(no_driver))
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    for words in ("needs an NVIDIA GPU", "libcuda.so.1", "kvferry demo"):
        assert words in result.output


def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDriver, "open", staticmethod(lambda device: object()))
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    result = CliRunner().invoke(bench_copy, ["--quick"])
    assert result.exit_code == 1
    assert "needs torch and triton" in result.output
    assert "kvferry[gpu]" in result.output


def test_progress_is_plain_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("one", "two", ""):
        show(line)
    assert capsys.readouterr().err == "one\ntwo\n"


def made_up() -> dict[str, Any]:
    """A run of a card nobody has."""
    provenance = dict.fromkeys(
        ["gpu", "link", "driver", "torch", "triton", "python", "kvferry", "date", "command"], "x"
    )
    result = BenchResult(
        {**provenance, "calibration_seconds": "1.0"},
        designs={"theirs": "another design"},
        ceiling={"load": 50.0, "store": 50.0},
    )
    for direction in ("load", "store"):
        for path in ("loop", "dma", "kernel", "staged", "theirs", "auto"):
            chosen = "kernel" if path == "auto" else ""
            row = TimedCopy(
                direction, 16384, 64, 256, path, 40.0, 0.8, 6e-3, 5.0, chosen, "run", 50.0
            )
            result.rows.append(row)
            small = TimedCopy(
                direction, 16384, 64, 1, path, 20.0, 0.4, 5e-5, 5.0, chosen, "run", 50.0
            )
            result.small.append(small)
        result.submit.append(
            {"direction": direction, "num_blocks": 1, "path": "auto", "submit_us": 9.0}
        )
        result.slowdown.append(SlowdownRow("a load", direction, "auto", 30.0, 1.1, 12.0, "staged"))
        result.planner.append(PlannerCell(direction, 8192, 2 * MiB, "kernel", "staged", 1.5))
        result.one_copy.append(OneCopy(direction, 64 * MiB, 49.0, 48.0, 50.0, 4))
    result.both_ways = {"ceiling": {"load": 50.0, "store": 50.0}}
    return result.to_json()


def runs() -> list[Any]:
    kept = [pytest.param(KEPT, id="kept")] if KEPT.exists() else []
    return [pytest.param(None, id="made up"), *kept]


@pytest.mark.parametrize("file", runs())
def test_a_run_becomes_tables_and_a_plot(file: Path | None) -> None:
    data = made_up() if file is None else json.loads(file.read_text())
    text = report(data)
    for heading in ("Host to GPU", "GPU to host", "Host time of submit", "costs the model"):
        assert heading in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines
    if file is None:
        assert "| 0.960 |".replace(" ", "") in text.replace(" ", "")  # 48 of 50 GB/s, one copy
    root = ElementTree.fromstring(plot(data))
    assert root.tag.endswith("svg")
    assert "href" not in plot(data)  # needs nothing else, not even a network


def test_json_rows_have_what_is_promised() -> None:
    data = made_up()
    assert {
        "direction", "segment_bytes", "segments_per_block", "num_blocks", "path", "gbps",
        "fraction_of_ceiling", "submit_us",
    } <= set(data["rows"][0])  # fmt: skip
    assert {"slowdown", "provenance"} <= set(data)
    assert data["planner_within_5_percent"] == 0.0
