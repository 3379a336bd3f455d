"""``kvferry demo`` from the command line to its report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.tools.cli import main as door
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.demo import engine as offload
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.types import DEVICE, Transfer

TINY = (
    *("demo", "--conversations", "4", "--turns", "2", "--users", "2"),
    *("--opening-tokens", "70", "--question-tokens", "9", "--answer-tokens", "5"),
    *("--device-blocks", "13", "--host", "8MiB"),
)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(kvferry, arguments)


@pytest.mark.parametrize("asked", [("--json",), ("--json", "-"), ("--json", "--seed", "3")])
def test_figures_alone_go_to_standard_output_where_no_file_is_named(
    tmp_path: Path, asked: tuple[str, ...]
) -> None:
    result = invoke(*TINY, "--html", str(tmp_path / "report.html"), *asked)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens_equal"] is True
    assert "identical in the three runs" in result.stderr
    assert "\x1b[" not in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html"]


@pytest.mark.parametrize("extra", [(), ("--window", "24")], ids=["full", "hybrid"])
def test_runs_three_ways_and_writes_its_figures(tmp_path: Path, extra: tuple[str, ...]) -> None:
    html, figures = tmp_path / "report.html", tmp_path / "figures.json"
    result = invoke(*TINY, *extra, "--html", str(html), "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert re.search(
        r"All 8 answers \(\d+ tokens\) are identical in the three runs\.", result.output
    )
    assert "Small + kvferry: 8 of 8 turns" in result.output
    for line in ("First token p50", "First token p95", "Tokens per second", "Hit rate, host"):
        assert line in result.output

    data = json.loads(figures.read_text())
    assert data["tokens_equal"] is True
    roomy, small, ferry = (data["ways"][way] for way in ("roomy", "small", "kvferry"))
    assert roomy["prefill_tokens_computed"] < small["prefill_tokens_computed"]
    assert ferry["prefill_tokens_computed"] < small["prefill_tokens_computed"]
    assert ferry["hit_tokens"]["host"] > 0
    assert ferry["bytes_moved"]["host->device"] > 0
    assert ferry["bytes_moved"]["device->host"] > 0
    assert set(small["bytes_moved"].values()) == {0}
    assert ferry["ttft_p50_seconds"] <= ferry["ttft_p95_seconds"]
    assert len(ferry["ttft_p50_seconds_by_turn"]) == 2

    page = html.read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "identical in the three runs" in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script", page)
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_what_host_memory_must_drop_comes_back_from_tiers(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = (*TINY, "--conversations", "8", "--device-blocks", "13", "--host", "1MiB")
    paths = ("--html", str(tmp_path / "report.html"), "--json", str(figures))
    result = invoke(*small, *paths, "--tiers", "memory:64MiB")
    assert result.exit_code == 0, result.output
    data = json.loads(figures.read_text())
    assert data["tokens_equal"] is True
    assert data["setting"]["tiers"] == "memory:64MiB"
    assert data["ways"]["kvferry"]["bytes_moved"]["tiers->host"] > 0
    assert "Below host memory (memory:64MiB): " in result.output


def test_says_so_and_fails_when_tokens_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(CpuEngine):
        """Loads every block from its neighbour's slot."""

        def _move(self, transfer: Transfer) -> int:
            if transfer.dst == DEVICE:
                wrong = (transfer.src_slots + 1) % len(self._host)
                transfer = Transfer(
                    transfer.id, transfer.src, transfer.dst, wrong, transfer.dst_slots
                )
            return super()._move(transfer)

    monkeypatch.setattr(offload, "CpuEngine", Careless)
    html = tmp_path / "report.html"
    result = invoke(*TINY, "--html", str(html))
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output
    assert re.search(r"\d of 8 answers differ between the runs", result.output)
    assert "answers differ" in html.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], "Invalid value for '--turns': 0 is not in the range x>=1"),
        (["--turns", "many"], "'many' is not a valid integer"),
        (["--host", "64G"], "unknown unit in '64G'"),
        (["--host", "100"], "holds not even one block"),
        (["--device-blocks", "5"], "5 device blocks cannot hold even one"),
        (["--device-blocks", "100000"], "nothing to offload; give fewer"),
        (["--opening-tokens", "9999"], "the model ends at 4096"),
        (["--html", "no/such/folder/report.html"], "there is no folder no/such/folder"),
        (["--tiers", "memry:1MiB"], "did you mean 'memory'?"),
        (["--tiers", "memory:1KiB"], "hold no block"),
        (["--tiers", "no_such_package.x:y"], "no_such_package.x cannot be imported"),
        (["--colour", "blue"], "No such option"),
    ],
)
def test_refuses_bad_input_before_any_work(arguments: list[str], message: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.tools.cli.main", "demo", "--html", str(html)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # A shell starts what it puts in the background with interrupts ignored, and that is
        # inherited: without this the test would hang wherever the tests run so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    first_line = process.stdout.readline()
    assert "conversations" in first_line
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Nothing was written." in output
    assert "Traceback" not in output
    assert not html.exists()


def test_help_teaches_every_option() -> None:
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    for option in ("--conversations", "--device-blocks", "--host", "--window", "--json"):
        assert option in result.output
    assert "exit code is 0" in result.output


def test_a_broken_command_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry.tools.cli.calibrate", None)
    assert invoke("version").output.startswith("kvferry ")
    listing = invoke("--help")
    assert listing.exit_code == 0
    assert "calibrate" in listing.output
    broken = invoke("calibrate")
    assert broken.exit_code == 1
    assert "kvferry calibrate is not available here" in broken.output


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        door.main()
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install 'kvferry[cli]'" in message
