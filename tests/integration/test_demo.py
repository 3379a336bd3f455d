"""``kvferry demo`` from the command line to its report. One run serves all tests of its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvferry.errors import TransferError
from kvferry.tools.cli import main as door
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.demo import parts
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.parts import Scenario, compare, run_restart
from kvferry.tools.demo.workload import Chat

TINY = ("demo", "--conversations", "4", "--turns", "3", "--opening-tokens", "70")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(kvferry, arguments)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Output and report of one run with all parts but the fleet."""
    html = tmp_path_factory.mktemp("demo") / "report.html"
    result = invoke(*TINY, "--restart", "--html", str(html))
    assert result.exit_code == 0, result.output
    assert "\x1b[" not in result.output
    return result.output, html.read_text(encoding="utf-8")


def test_the_three_ways_give_the_same_tokens(whole: Any) -> None:
    output = whole[0]
    assert re.search(r"All 12 answers \(\d+ tokens\) are identical in the three runs\.", output)
    assert "Small + kvferry: 12 of 12 turns" in output
    assert "identical after the restart, with the disk and without" in " ".join(output.split())


def test_kvferry_computes_less_and_a_new_process_finds_its_blocks_on_disk() -> None:
    ways = compare(SCENARIO)
    assert ways.tokens_equal
    roomy, small, ferry = (ways.runs[way] for way in ("roomy", "small", "kvferry"))
    assert roomy.tokens("computed") < small.tokens("computed")
    assert ferry.tokens("computed") < small.tokens("computed")
    assert ferry.tokens("host") > 0
    assert min(ferry.bytes_moved["host->device"], ferry.bytes_moved["device->host"]) > 0
    assert not small.bytes_moved
    restart = run_restart(SCENARIO)
    assert restart.tokens_equal
    warm, cold = restart.runs["warm"], restart.runs["cold"]
    assert min(warm.restored_blocks, warm.bytes_moved["tiers->host"]) > 0
    assert warm.tokens("computed") < cold.tokens("computed") / 2


def test_the_report_needs_no_other_file_and_no_network(whole: Any) -> None:
    page = whole[1]
    assert "identical in the three runs" in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|https?://", page)


CARELESS = """
import sys
if "kvferry.tools.demo.serving" in sys.orig_argv:
    from dataclasses import replace
    from kvferry.transfer.engine.cpu import CpuEngine
    move = CpuEngine._move

    def move_wrong(self, job):
        if job.direction.value == "load":
            job = replace(job, host_slots=(job.host_slots + 1) % len(self._host))
        move(self, job)

    CpuEngine._move = move_wrong
"""
"""Loads every block from its neighbour's slot."""


def test_says_so_and_fails_when_tokens_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_servers(CARELESS, tmp_path, monkeypatch)
    html = tmp_path / "report.html"
    result = invoke(*TINY, "--html", str(html))
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output
    assert re.search(r"\d of 12 answers differ in the three runs", result.output)
    assert "answers differ" in html.read_text(encoding="utf-8")


def in_servers(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every Python process that is started run this first."""
    (folder / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], "Invalid value for '--turns': 0 is not in the range x>=1"),
        (["--conversations", "1"], "leaves nothing to offload"),
        (["--opening-tokens", "9999"], "the model ends at 4096"),
        (["--html", "no/such/folder/report.html"], "there is no folder no/such/folder"),
        (["--kill"], "give --servers too"),
        (["--colour", "blue"], "No such option"),
    ],
)
def test_refuses_bad_input_before_any_work(arguments: list[str], message: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        door.main()
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install '.[cli]'" in message


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, which must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert not list(folder.iterdir())


SHAPE = ModelShape(width=64, num_layers=2, num_heads=2, hidden=64)
CHAT = Chat(
    num_conversations=4,
    num_turns=3,
    opening_tokens=70,
    question_tokens=9,
    answer_tokens=5,
    num_users=2,
)
SCENARIO = Scenario(CHAT, SHAPE)


def test_a_process_that_cannot_serve_is_an_error_and_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MiB", 1)  # a disk of 256 bytes
    with pytest.raises(TransferError, match="server 0 ended with"):
        run_restart(SCENARIO)


ENDLESS = """
import sys, time
if "kvferry.tools.demo.serving" in sys.orig_argv:
    from kvferry.tools.demo.engine import Engine
    step = Engine.step

    def slow_step(self):
        time.sleep(0.1)
        return step(self)

    Engine.step = slow_step
"""
"""It still runs when a test on a busy machine gets round to ending it."""


@pytest.mark.parametrize("begun", ["Big device", "Before the restart"])
def test_ctrl_c_leaves_nothing_behind(
    begun: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = tmp_path / "report.html"
    in_servers(ENDLESS, tmp_path, monkeypatch)
    command = [sys.executable, "-m", "kvferry", *TINY, "--restart", "--html", str(html)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        # A shell starts background jobs with interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if begun in line:
            break
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Nothing was written." in output
    assert "Traceback" not in output
    assert not html.exists()
