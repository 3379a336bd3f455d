"""top, explain and the page before a hostile or broken endpoint: an error in a line, or a view."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner, Result
from tests.fakes.endpoint import stats
from tests.fakes.hostile import HostileEndpoint, drip, reply
from tests.integration.test_endpoint import ask

from kvferry.telemetry.catalog import Snapshot, exposition
from kvferry.tools.cli.commands import kvferry as cli
from kvferry.tools.top.page import PageServer
from kvferry.tools.top.view import Watch

GOOD = exposition(Snapshot(stats(queries=10, moved=10), "1.2.3", {"host": 1_000_000})).decode()
RAW = {"\x1b", "\x07", "\x9b", "\u202e", "\r"}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Who answers at all answers in time, also on a machine that is busy."""
    monkeypatch.setattr("kvferry.tools.top.scrape.DEADLINE_SECONDS", 60.0)


@pytest.fixture
def hurry(patient, monkeypatch):
    monkeypatch.setattr("kvferry.tools.top.scrape.DEADLINE_SECONDS", 0.7)


@pytest.fixture
def hostile():
    endpoint = HostileEndpoint(lambda path: ())
    yield endpoint
    endpoint.close()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not RAW & set(result.output)
    return result


def top(hostile: HostileEndpoint, *more: str) -> Result:
    return run("top", hostile.url, "--once", "--interval", "0.1", *more)


def refuses(result: Result, words: str) -> None:
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ")
    assert len(line) < 400
    assert words in line


EVIL = "\x1b[2J\x1b]0;pwned\x07\x9b31m\u202e\r"

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TIERS = "".join(f'kvferry_slots{{tier="t{n}",state="free"}} 1\n' for n in range(20_000))
BROKEN = {
    "hangs up": (b"", "cannot be reached"),
    "escapes in a status line": (f"{EVIL}\r\n\r\n".encode(), "cannot be reached"),
    "escapes in a reason": (reply("x", status="500 \x1b[2J"), "answered 500"),
    "escapes in an error": (reply(EVIL, status="500 No"), "answered 500"),
    "escapes in JSON": (reply(json.dumps({"error": EVIL}), status="404 No"), "answered 404"),
    "a deep error": (reply("[" * 400, status="500 No"), "answered 500"),
    "an error that is a number": (reply('{"error": 5}', status="500 No"), "answered 500"),
    "cut short": (reply(GOOD, length=2 * len(GOOD)), "cut short"),
    "cut in a number": (b"HTTP/1.0 200 OK\r\n\r\n" + GOOD[:-4].encode(), "middle of a line"),
    "a redirect": (reply("", status="302 Found\r\nLocation: ftp://a/\x1b[2J"), "answered 302"),
    "half a chunk": (CHUNKED + b"ffff\r\nkvferry", "cut short"),
    "chunks that are none": (CHUNKED + b"zz\x1b\r\nkvferry", "cannot be read"),
    "a length that is none": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "kvferry"),
    "no text": (reply(b"kvferry_\xff\xfe\x00\n" * 10), "Prometheus"),
    "many tiers": (reply(TIERS + GOOD), "Prometheus"),
    "a line of 20 MiB": (
        reply('kvferry_info{version="' + "x" * (20 << 20) + '"} 1\n' + GOOD),
        "Prometheus",
    ),
    "quotes": (reply("kvferry_info{" + 'a="' * (7 << 20) + "} 1\n" + GOOD), "Prometheus"),
    "a number that is none": (reply(GOOD + "kvferry_lookups_total x\x1b[2J\n"), "Prometheus"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_top_says_what_is_wrong_in_a_line(hostile, name):
    said, words = BROKEN[name]
    hostile.say = lambda path: [said]
    refuses(top(hostile), words)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


def silence(path):
    time.sleep(3)
    yield b""


def dripping_headers(path):
    yield b"HTTP/1.1 200 OK\r\n"
    yield from drip(b"a: b\r\n")


def dripping_body(path):
    yield HEAD
    yield from drip(b"# x\n")


SLOW = {
    "silence": silence,
    "a dripping status line": lambda path: drip(b"H"),
    "dripping headers": dripping_headers,
    "a dripping body": dripping_body,
    "continue for ever": lambda path: drip(b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.001),
}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("name", SLOW)
def test_a_look_has_a_deadline_however_the_reply_drips(hostile, name):
    hostile.say = SLOW[name]
    refuses(top(hostile), "did not answer within 0.7 s")
    refuses(run("explain", "--url", hostile.url), "did not answer within 0.7 s")


def test_a_reply_without_an_end_is_not_read_to_it(hostile):
    def endless(path):
        yield b"HTTP/1.0 200 OK\r\n\r\n"
        for _ in range(4096):
            yield b"# nothing\n" * 6000

    hostile.say = endless
    result = top(hostile)
    assert result.exit_code == 1
    assert "MiB" in result.output or "did not answer" in result.output


ODD = [
    "[]",
    '{"requests": {"a": 1}}',
    '{"requests": [{"request_id": "a", "asked_tokens": 1e999}]}',
    '{"requests": [{"request_id": "a", "tier_hit_tokens": {"host": "x"}}]}',
    '{"requests": ' + '{"a":' * 100_000,
    '{"request_id": "a", "explanation": {"reason": "new", "asked_tokens": null}, "copies": [{}]}',
    "\xff\xfe",
]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_the_latest_requests_of_any_shape_do_not_end_the_view(hostile, body):
    hostile.say = lambda path: [reply(GOOD if path == "/metrics" else body)]
    view = json.loads(top(hostile, "--json").output, parse_constant=pytest.fail)
    assert view["queries"] == 10
    assert all(isinstance(cell, str) for row in view["recent"] for cell in row)


def test_names_are_shown_cut_and_clean(hostile):
    name = EVIL.replace("\r", "") + "x" * 5000
    text = GOOD.replace('tier="disk"', f'tier="{name}"').replace("1.2.3", name)
    hostile.say = lambda path: [reply(text if path == "/metrics" else "{}")]
    output = top(hostile).output
    assert "x" * 20 in output
    assert "x" * 100 not in output.replace("\n", "")


def test_a_dripping_endpoint_does_not_hold_the_page(hostile):
    """Whoever asks while another's look is under way gets the last view at once."""
    hostile.say = lambda path: [reply(GOOD if path == "/metrics" else '{"requests": []}')]
    now = [0.0]
    with PageServer(Watch(hostile.url), interval=1.0, clock=lambda: now[0]) as server:
        assert json.loads(ask(server.url, "/view.json")[1])["view"]["queries"] == 10
        entered, go = threading.Event(), threading.Event()

        def held(path):
            entered.set()
            go.wait(20)
            yield from drip(b"H", seconds=0.1)

        hostile.say = held
        now[0] = 2.0
        first = threading.Thread(target=ask, args=(server.url, "/view.json"))
        first.start()
        assert entered.wait(10)
        data = json.loads(ask(server.url, "/view.json")[1])  # held for ever, if by a lock
        was_alive = first.is_alive()
        go.set()
        first.join()
        assert was_alive
        assert data["view"]["queries"] == 10


def test_a_page_before_a_broken_endpoint_says_so(hostile):
    hostile.say = lambda path: [reply(EVIL, status="500 No")]
    with PageServer(Watch(hostile.url), interval=0.1) as server:
        status, body, _ = ask(server.url, "/view.json")
    assert status == 200
    data = json.loads(body)
    assert "answered 500" in data["error"]
    assert not RAW & set(data["error"])


NOWHERE = ("http://[", "http://h:99999", "http://h:x", "a\0b", "http://a b/", "h\n", "\x1b[2J")


@pytest.mark.parametrize("url", NOWHERE)
def test_addresses_that_are_none(url):
    for arguments in (("top", url, "--once"), ("explain", "--url", url)):
        refuses(run(*arguments), "is not an address")
