"""The live page in a real browser: it draws, it escapes, and it talks to its own server alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.fakes.endpoint import FakeEndpoint, stats
from tests.integration.test_endpoint import ask

from kvferry.telemetry.catalog import Snapshot
from kvferry.tiers.disk.protocol import DiskFigures
from kvferry.tools.top.page import PageServer
from kvferry.tools.top.view import Watch

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium on PATH")

PAGE = Path(__file__).parents[2] / "src" / "kvferry" / "tools" / "top" / "page"
EVIL = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"


@pytest.fixture
def endpoint():
    fake = FakeEndpoint()
    fake.requests = [
        {"request_id": "chat-7", "reason": "evicted", "asked_tokens": 4096, "host_tokens": 1024},
        {"request_id": EVIL, "reason": "<b>bold</b>", "asked_tokens": 1, "host_tokens": None},
    ]
    yield fake
    fake.close()


@pytest.fixture
def server(endpoint):
    with PageServer(Watch(endpoint.url), interval=0.2) as server:
        yield server


def browse(url: str, folder: Path, *extra: str) -> str:
    """The page's document after it has drawn itself."""
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-dev-shm-usage", "--disable-component-update", "--no-first-run"),
            *("--disable-sync", "--disable-default-apps", "--disable-extensions"),
            f"--user-data-dir={folder / 'profile'}",
            *("--virtual-time-budget=3000", "--dump-dom", *extra, url),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout


def requests_of(origin: str, log: str) -> set[str]:
    """What a page asked for; the browser's own errands have no page as their initiator."""
    events = [json.loads(line.rstrip(",")) for line in log.splitlines() if '"url"' in line]
    return {e["params"]["url"] for e in events if e["params"].get("initiator") == origin}


@needs_chromium
def test_it_draws_escapes_and_stays_at_home(server, tmp_path):
    log = tmp_path / "net.json"
    dom = browse(server.url, tmp_path, f"--log-net-log={log}")
    # It draws.
    text = re.sub(r"<[^>]+>", " ", dom)
    for words in ("75%", "700 of 1,000", "700.0 MB", "host → device", "evicted"):
        assert words in text, words
    assert "chat-7" in text
    assert 'id="error" role="alert" hidden=""' in dom
    # What others wrote stays text.
    assert "<title>kvferry</title>" in dom
    assert "&lt;img src=x onerror=" in dom
    assert "&lt;b&gt;bold&lt;/b&gt;" in dom
    assert "<img" not in dom
    # Nobody else is asked for anything.
    asked = requests_of(server.url.rstrip("/"), log.read_text())
    assert f"{server.url}view.json" in asked
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(server.url).netloc}


@needs_chromium
def test_tiers_are_drawn_and_one_that_is_away_says_why(endpoint, server, tmp_path):
    counted = replace(
        stats(queries=10, moved=10),
        ailments={"disk": "rank 1: full", "store": ""},
        asked={"store": (4000, 999)},
    )
    disk = DiskFigures(5 << 30, 2 << 30, failed={"damaged": 2}, pending=3, durable_lag=0.4)
    endpoint.show(Snapshot(counted, "1.2.3", {"host": 1_000_000}, disks={"disk": disk}))
    endpoint.tiers_away = {"disk": f"rank 1: full {EVIL}"}
    dom = browse(server.url, tmp_path)
    text = re.sub(r"<[^>]+>", " ", dom)
    assert "unavailable: rank 1: full &lt;img" in text
    assert "6,000 of 10,000" in text
    assert "999 of 4,000 found" in text
    assert "3 blocks not durable yet" in text
    assert "2 blocks failed (damaged)" in text
    assert "<img" not in dom


@needs_chromium
def test_an_engine_that_is_gone_is_said(endpoint, tmp_path):
    endpoint.close()
    with PageServer(Watch(endpoint.url), interval=0.2) as server:
        dom = browse(server.url, tmp_path)
    assert "cannot be reached" in dom
    assert 'id="error" role="alert" hidden' not in dom
    assert re.search(r"<main hidden", dom)


def test_files_ask_for_nothing_elsewhere():
    for file in PAGE.iterdir():
        text = file.read_text()
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"'\s]*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, file.name
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{file.name} uses {way}"
        assert not re.search(r"<form|<input|method\s*[:=]", text), f"{file.name} could send"


def test_its_files_are_served_and_nothing_else(server):
    for path in ("/", "/page.js", "/page.css", "/icon.svg", "/view.json"):
        status, body, headers = ask(server.url, path)
        assert (status, bool(body)) == (HTTPStatus.OK, True)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(server.url, "/view.json", method="POST")[0] == HTTPStatus.NOT_IMPLEMENTED
    assert ask(server.url, "/%2e%2e/server.py")[0] == HTTPStatus.NOT_FOUND
    assert server.url.startswith("http://127.0.0.1:")


def test_many_browsers_are_one_look(endpoint):
    now = [0.0]
    with PageServer(Watch(endpoint.url), interval=1.0, clock=lambda: now[0]) as server:
        for _ in range(5):
            ask(server.url, "/view.json")
        assert endpoint.paths.count(("metrics",)) == 1
        now[0] = 1.0
        endpoint.show(Snapshot(stats(queries=11, moved=11), "1.2.3"))
        _, body, _ = ask(server.url, "/view.json")
    assert endpoint.paths.count(("metrics",)) == 2
    assert json.loads(body)["view"]["queries"] == 11
