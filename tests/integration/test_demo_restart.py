"""``kvferry demo --restart``: real processes, one after the other, over one disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.core.quantities import MiB
from kvferry.errors import TransferError
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.demo import restart
from kvferry.tools.demo.compare import Scenario
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.report import restart_verdict
from kvferry.tools.demo.restart import run_restart
from kvferry.tools.demo.workload import Chat

TINY = (
    *("demo", "--restart", "--conversations", "4", "--turns", "3", "--users", "2"),
    *("--opening-tokens", "70", "--question-tokens", "9", "--answer-tokens", "5"),
    *("--device-blocks", "14", "--host", "8MiB"),
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything temporary goes here, and nothing may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert not list(folder.iterdir())


def scenario(**changes: Any) -> Scenario:
    shape = ModelShape(width=64, num_layers=2, num_heads=2, hidden=64)
    chat = Chat(
        num_conversations=4,
        num_turns=3,
        opening_tokens=70,
        question_tokens=9,
        answer_tokens=5,
        num_users=2,
    )
    return replace(
        Scenario(chat=chat, shape=shape, device_blocks=14, host_bytes=8 * MiB), **changes
    )


def test_the_next_process_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    html, figures = tmp_path / "report.html", tmp_path / "figures.json"
    found = CliRunner().invoke(kvferry, [*TINY, "--html", str(html), "--json", str(figures)])
    assert found.exit_code == 0, found.output
    assert "After the restart all 4 answers are identical" in found.output
    told = json.loads(figures.read_text())["restart"]
    assert told["tokens_equal"] is True
    assert told["restored_blocks"] > 0
    assert told["hit_rate"] > 0.5
    assert told["read_bytes"] > 0
    computed = told["prefill_tokens_computed"]
    assert computed["with_disk"] < computed["without"] / 2
    page = html.read_text()
    assert "After a restart" in page
    assert "Blocks found at the start" in page


HYBRID = ModelShape(width=64, num_layers=2, num_heads=2, hidden=64, windows=(None, 24))

SLOW = """
import sys, time
if "kvferry.tools.demo.life" in sys.orig_argv:
    from kvferry.transfer.engine.cpu import DEVICE, CpuEngine
    from kvferry.cache.policies import LoadOrCompute
    move, note_load = CpuEngine._move, LoadOrCompute.note_load

    def slow_move(self, transfer):
        if transfer.src == DEVICE:
            time.sleep(0.02)
        return move(self, transfer)

    def slow_load(self, num_bytes, seconds, *link):
        note_load(self, num_bytes, 1e6 * seconds, *link)

    CpuEngine._move, LoadOrCompute.note_load = slow_move, slow_load
"""
"""Python runs it as it starts: copies that lag behind compute, and loads that seem to take ages."""


def test_hybrid_models_come_back_too_and_wrong_answers_would_be_said() -> None:
    found = run_restart(scenario(shape=HYBRID))
    assert found.tokens_equal
    assert found.warm.restored_blocks > 0
    assert found.hit_rate > 0.5
    name = next(iter(found.warm.answers))
    wrong = replace(found.warm, answers={**found.warm.answers, name: [1]})
    bad = replace(found, warm=wrong)
    assert not bad.tokens_equal
    assert "1 of 4 answers differ" in restart_verdict(bad)


def test_what_comes_back_does_not_hang_on_how_fast_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = run_restart(scenario(shape=HYBRID))
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = run_restart(scenario(shape=HYBRID))
    assert found.tokens_equal
    assert found.before.written_bytes == at_once.before.written_bytes
    assert found.warm.restored_blocks == at_once.warm.restored_blocks
    assert found.hit_rate == at_once.hit_rate > 0.5


def test_a_process_that_cannot_serve_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart, "MiB", 1)  # a disk of 256 bytes
    with pytest.raises(TransferError, match="process ended with"):
        run_restart(scenario())


ENDLESS = """
import sys, time
if "kvferry.tools.demo.life" in sys.orig_argv:
    from kvferry.tools.demo.engine import Engine
    step = Engine.step

    def slow_step(self):
        time.sleep(0.1)
        return step(self)

    Engine.step = slow_step
"""
"""It still runs when a test on a busy machine gets round to ending it."""


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    html = tmp_path / "report.html"
    (tmp_path / "sitecustomize.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-m", "kvferry", *TINY, "--html", str(html)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Before the restart" in line:
            break
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. Nothing was written." in output
    assert "Traceback" not in output
    assert not html.exists()
