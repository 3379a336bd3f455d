"""Orders over real HTTP: who may give them, what is refused, and what an engine makes of them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner

import kvferry
from kvferry.telemetry import source as inboxes
from kvferry.telemetry.http import MAX_BODY_BYTES
from kvferry.tools.cli.commands import kvferry as cli

TOKEN = "a-token-of-sixteen-or-more"
TOKENS = list(range(64))


class Polled:
    """A ferry that a thread of its own polls, as an engine does. Owns both."""

    def __init__(self, **settings) -> None:
        kv = [np.zeros((32, 2, 16, 2, 8), np.float32) for _ in range(2)]
        self.ferry = kvferry.attach(kv, model="m", block_tokens=16, host="8MiB", **settings)
        self._busy, self._is_waiting = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.url = self.ferry.serve_metrics(0)
        keys = self.ferry.keys(TOKENS)
        self.ferry.wait(self.ferry.store(keys, [0, 1, 2, 3]))
        self.ferry.hand_over()
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._busy.is_set():
                self._is_waiting.set()
            else:
                self.ferry.poll()
            time.sleep(0.001)
        self.ferry.close()

    def keep_busy(self) -> None:
        """From here on it does not poll: not even to its end what it had begun."""
        self._busy.set()
        assert self._is_waiting.wait(30)

    def go_on(self) -> None:
        self._busy.clear()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def polled():
    running = Polled(control_token=TOKEN)
    yield running
    running.close()


def order(url, action, body, *, token=TOKEN, raw=None, headers=None):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        sent = json.dumps(body) if raw is None else raw
        given = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connection.request("POST", f"/control/{action}", sent, {**given, **(headers or {})})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read() or b"{}")
    finally:
        connection.close()


def test_every_action_by_tokens_and_by_keys(polled):
    url = polled.url
    status, told = order(url, "lookup", {"tokens": TOKENS})
    assert (status, told["host_tokens"], told["held_blocks"]) == (200, 64, 0)
    assert order(url, "pin", {"tokens": TOKENS, "seconds": "1h"})[1]["blocks"] == 4
    keys = [key.hex() for key in polled.ferry.keys(TOKENS)]
    assert order(url, "lookup", {"keys": keys})[1]["held_blocks"] == 4
    assert order(url, "unpin", {"keys": keys})[1]["blocks"] == 4
    told = order(url, "hint", {"tokens": TOKENS, "hints": {"pin_seconds": 9}})[1]
    assert told["held_blocks"] == 4
    status, told = order(url, "prefetch", {"tokens": TOKENS, "seconds": 5})
    assert (status, told["is_under_way"]) == (200, False)  # all of it is here
    assert order(url, "lookup", {"tokens": TOKENS, "salt": "x"})[1]["host_tokens"] == 0
    assert order(url, "drop", {"tokens": TOKENS})[1]["blocks"] == 4
    assert order(url, "lookup", {"tokens": TOKENS})[1]["host_tokens"] == 0


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        (None, 401, "Authorization: Bearer"),
        ("", 403, "not the token"),
        (TOKEN[:-1], 403, "not the token"),
        (TOKEN + "x", 403, "not the token"),
    ],
)
def test_without_the_token_nothing_is_done(polled, token, status, words):
    found = order(polled.url, "drop", {"tokens": TOKENS}, token=token)
    assert found[0] == status
    assert words in found[1]["error"]
    assert order(polled.url, "lookup", {"tokens": TOKENS})[1]["host_tokens"] == 64


@pytest.mark.parametrize(
    ("action", "body", "words"),
    [
        ("pin", {}, "say which blocks"),
        ("pin", {"tokens": TOKENS, "keys": []}, "say which blocks"),
        ("pin", {"tokens": TOKENS, "second": 3}, "pin has no 'second'"),
        ("pin", {"tokens": TOKENS, "seconds": -1}, "seconds: must be above zero"),
        ("lookup", {"tokens": TOKENS, "seconds": 1}, "lookup has no 'seconds'"),
        ("lookup", {"tokens": [1.5]}, "tokens must be whole numbers"),
        ("lookup", {"tokens": [-1]}, "none negative"),
        ("lookup", {"tokens": "abc"}, "tokens must be a list"),
        ("lookup", {"keys": ["zz"]}, "hexadecimal"),
        ("lookup", {"keys": ["ab"]}, "64 digits"),
        ("lookup", {"keys": [7]}, "hexadecimal"),
        ("lookup", {"request_id": ""}, "request_id must be"),
        ("lookup", {"keys": [], "salt": "x"}, "a salt goes with tokens"),
        ("lookup", {"keys": ["ab" * 32, "ab" * 32]}, "a key is twice among these 2"),
        ("pin", {"tokens": TOKENS, "seconds": [3]}, "seconds: expected seconds"),
        ("lookup", {"tokens": [2**64]}, "tokens must be whole numbers"),
        ("lookup", {"tokens": [True]}, "tokens must be whole numbers"),
        ("lookup", {"tokens": TOKENS, "salt": 5}, "salt must be text"),
        ("hint", {"tokens": TOKENS}, "say ended, continues, pin_seconds or priorities"),
        ("hint", {"tokens": TOKENS, "hints": {"do_not_store": True}}, "goes with a request"),
        ("hint", {"tokens": TOKENS, "hints": None}, "hints must be a mapping"),
        ("hint", [1], "JSON object"),
    ],
)
def test_an_order_that_cannot_be_meant_is_refused_in_words(polled, action, body, words):
    status, told = order(polled.url, action, body)
    assert status == 400
    assert words in told["error"]


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 100_000,
        '{"tokens": ' * 50_000,
        '{"tokens": [' + "9" * 100_000 + "]}",
        '{"request_id": "' + "x" * 1_000_000 + '"}',
        '{"request_id": "\\ud800"}',
        '{"tokens": [1], "tokens": {}}',
        "\x00",
        "",
        '{"keys": [' + ",".join(['"' + "ab" * 32 + '"'] * 20_000) + "]}",
    ],
)
def test_whatever_is_posted_with_the_token_is_answered_in_short_words(polled, raw):
    status, told = order(polled.url, "lookup", None, raw=raw)
    assert status in (400, 404)
    assert 0 < len(told["error"]) < 500
    assert order(polled.url, "lookup", {"tokens": TOKENS})[1]["host_tokens"] == 64


def test_other_pages_and_other_methods_take_no_orders(polled):
    assert order(polled.url, "nonsense", {})[0] == 404
    assert order(polled.url, "lookup", {"request_id": "never-heard-of"})[0] == 404
    assert order(polled.url, "pin", None, raw=b"{nonsense")[0] == 400
    parts = urlsplit(polled.url)
    for method, path in (
        ("PUT", "/control/drop"),
        ("DELETE", "/control/drop"),
        ("POST", "/metrics"),
    ):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        connection.request(method, path, "{}", {"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status in (404, 501)
        connection.close()


def send(url: str, data: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as line:
        line.sendall(data)
        return line.recv(65536)


def head(length: object, token: str = TOKEN, extra: str = "") -> bytes:
    return (
        f"POST /control/lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


def test_a_big_body_is_refused_before_it_is_read(polled):
    assert b"413" in send(polled.url, head(MAX_BODY_BYTES + 1))
    assert b"411" in send(polled.url, head("-5"))
    assert b"411" in send(polled.url, head(5, extra="Transfer-Encoding: chunked\r\n"))
    # Who has no token is told so at its head: nothing of its body is kept.
    assert b"403" in send(polled.url, head(MAX_BODY_BYTES, token="wrong-but-long-enough"))
    almost = json.dumps({"tokens": [0] * (1 << 20)}).encode()
    assert order(polled.url, "lookup", None, raw=almost)[0] == 200


def test_a_busy_engine_says_so_and_answers_others_meanwhile(polled, monkeypatch):
    monkeypatch.setattr(inboxes.Mailbox.command, "__defaults__", (0.3,))
    polled.keep_busy()
    status, told = order(polled.url, "drop", {"tokens": TOKENS})
    assert status == 503
    assert "did not come by within 0.3 s; nothing was done" in told["error"]
    parts = urlsplit(polled.url)
    waiting = [
        threading.Thread(target=order, args=(polled.url, "drop", {"tokens": TOKENS}))
        for _ in range(6)
    ]
    for thread in waiting:
        thread.start()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", "/metrics")
    assert connection.getresponse().status == 200
    connection.close()
    for thread in waiting:
        thread.join()
    polled.go_on()
    assert order(polled.url, "lookup", {"tokens": TOKENS})[1]["host_tokens"] == 64  # none was done


def test_an_engine_that_closes_answers_waiting_clients(polled, monkeypatch):
    monkeypatch.setattr(inboxes.Mailbox.command, "__defaults__", (60.0,))
    polled.keep_busy()
    told: list[tuple[int, dict]] = []
    waiting = threading.Thread(
        target=lambda: told.append(order(polled.url, "drop", {"tokens": TOKENS}))
    )
    waiting.start()
    while not polled.ferry._mailbox.has_commands:
        time.sleep(0.001)
    polled.close()
    waiting.join()
    assert told[0][0] == 503
    assert "the engine closes" in told[0][1]["error"]


def test_the_command_line(polled, tmp_path):
    file, tokens = tmp_path / "token", tmp_path / "tokens.json"
    file.write_text(TOKEN)
    tokens.write_text(json.dumps(TOKENS))

    def run(*words, env=None):
        return CliRunner().invoke(cli, ["control", *words, "--url", polled.url], env=env)

    named = ("--tokens", str(tokens), "--token-file", str(file))
    assert "Tokens: 64, 64 of them in host memory" in run("lookup", *named).output
    assert "4 blocks pinned." in run("pin", *named, "--seconds", "1h").output
    assert json.loads(run("lookup", *named, "--json").output)["held_blocks"] == 4
    assert "4 blocks unpinned." in run("unpin", *named).output
    assert run("hint", *named, "--hints", '{"ended": true}').exit_code == 0
    assert "Pinned now: 0 blocks" in run("prefetch", *named).output
    env = {"KVFERRY_CONTROL_TOKEN": TOKEN}
    key = polled.ferry.keys(TOKENS)[0].hex()
    assert run("lookup", "--key", key, env=env).exit_code == 0
    gone = run("lookup", "--request", "gone", env=env)
    assert gone.exit_code == 1
    assert "not remembered" in gone.output
    wrong = run("drop", "--tokens", str(tokens), env={"KVFERRY_CONTROL_TOKEN": "x" * 20})
    assert "403" in wrong.output
    for words, message in (
        (("pin", "--token-file", str(file)), "say which blocks"),
        (("pin", "--tokens", str(tmp_path / "none")), "cannot read"),
        (("hint", *named, "--hints", "{"), "no JSON"),
        (("hint", *named), "give the hints by --hints"),
        (
            ("lookup", "--request", "r", "--salt", "s", "--token-file", str(file)),
            "goes with tokens",
        ),
        (("pin", "--tokens", str(tokens)), "give --token-file or set"),
    ):
        failed = run(*words)
        assert failed.exit_code == 1
        assert message in failed.output
    assert "4 blocks dropped." in run("drop", *named).output


def test_the_command_line_says_what_to_set_where_control_is_off(tmp_path):
    running = Polled()
    try:
        env = {"KVFERRY_CONTROL_TOKEN": TOKEN}
        words = ["control", "lookup", "--key", "00" * 32, "--url", running.url]
        told = CliRunner().invoke(cli, words, env=env)
        assert told.exit_code == 1
        assert "with control_token set" in told.output
    finally:
        running.close()
