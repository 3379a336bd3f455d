"""``kvferry demo --servers``: real processes on a real Mooncake store, killed and interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from multiprocessing import Pipe
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fakes import mooncake_store, remote, s3_servers
from tests.integration.test_demo import ENDLESS, in_servers

from kvferry.errors import TransferError
from kvferry.tools.cli.commands import kvferry
from kvferry.tools.demo import serving
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.servers import ServerProcesses, ServerSetup

TINY = (
    *("demo", "--servers", "3", "--conversations", "5", "--turns", "3", "--opening-tokens", "70"),
)
MARK = "KVFERRY_TEST_MARK"

needs_mooncake = pytest.mark.skipif(
    bool(mooncake_store.lacking()), reason=mooncake_store.lacking() or "-"
)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whoever is started by the test carries it, and nobody may be left who does."""
    if not mooncake_store.lacking():  # those that need no store run without it
        for name, value in mooncake_store.environment().items():
            monkeypatch.setenv(name, value)
    word = uuid.uuid4().hex
    monkeypatch.setenv(MARK, word)
    yield word
    end = time.monotonic() + 30
    while (left := marked(word)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def marked(word: str) -> list[str]:
    """The processes that carry the mark, besides this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"{MARK}={word}".encode() in (folder / "environ").read_bytes()
            if is_ours and folder.name != str(os.getpid()):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another's
            continue
    return found


@needs_mooncake
def test_servers_share_and_one_that_is_killed_harms_no_other(mark: str, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    found = CliRunner().invoke(kvferry, [*TINY, "--kill", "--html", str(html)])
    assert found.exit_code == 0, found.output
    words = " ".join(found.output.split())
    assert "are identical on 3 servers, with the store and without" in words
    assert "Other servers answered 0 turns" not in words, "it was killed in the midst of one"
    saved = re.search(r"(\d+)% of the computation saved by sharing", words)
    assert saved
    assert int(saved[1]) > 0
    assert "Hit rate after the kill" in found.output
    assert "Big device" not in found.output, "a fleet is shown alone"
    page = html.read_text()
    assert "3 servers, one store" in page
    assert "(†) was killed at half of the turns" in page


@needs_mooncake
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(
    mark: str, tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = tmp_path / "report.html"
    in_servers(ENDLESS, tmp_path, monkeypatch)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry", *TINY, "--servers", "2", "--html", str(html)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "One store for all" in line:
            break
    else:
        pytest.fail(seen)
    assert len(marked(mark)) >= 4, "the demo, its master, two servers"
    os.killpg(process.pid, how)  # as a terminal does it
    output, _ = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "Interrupted. Nothing was written." in output
    assert "Traceback" not in output
    assert not html.exists()


def test_what_is_missing_is_said_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "mooncake"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    html = tmp_path / "report.html"
    found = CliRunner().invoke(kvferry, [*TINY, "--html", str(html)])
    assert found.exit_code == 2
    words = " ".join(found.output.split())
    assert "libibverbs.so.1: cannot open" in words
    assert "pip install '.[mooncake]'" in words
    assert "libibverbs1, libnuma1 and liburing2: apt-get install them" in words
    assert not html.exists()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_servers.Door]:
    for name, value in remote.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    made = s3_servers.Door(s3_servers.server("moto"))
    yield made
    made.close()


def sharing(door: s3_servers.Door) -> ServerSetup:
    shape = ModelShape(width=64, num_layers=2, num_heads=2, hidden=64)
    address = f"s3://{s3_servers.BUCKET}/demo?endpoint={door.endpoint}"
    return ServerSetup(shape, 8, {"host": "1MiB", "remote": address})


def refusing(door: s3_servers.Door, num_requests: int | None = None) -> Callable[[], datetime]:
    """A clock so wrong that every request is refused, or the first few."""
    now = datetime.now(timezone.utc)

    def clock() -> datetime:
        is_over = num_requests is not None and door.num_requests > num_requests
        return datetime.now(timezone.utc) if is_over else now - timedelta(days=1)

    return clock


def test_a_server_begins_when_the_store_that_it_shares_is_there(
    door: s3_servers.Door,
    mark: str,  # whose server was started before
) -> None:
    door.clock = refusing(door, 3)
    with ServerProcesses(sharing(door), 1) as fleet:
        _, answer = fleet.receive()
    assert answer is not None
    assert door.num_requests > 3


def test_a_server_whose_store_does_not_come_ends_and_says_so(
    door: s3_servers.Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.clock = refusing(door)
    monkeypatch.setattr(serving, "_STORE_SECONDS", 0.5)
    ours, theirs = Pipe()
    message = r"did not become available in 0.5 seconds"
    with ours, theirs, pytest.raises(TransferError, match=message):
        serving.serve_questions(sharing(door), theirs)
