"""A store that refuses writes is read on; one that answers without end or elsewhere is a miss."""

from __future__ import annotations

import logging
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.fakes import remote, s3_servers
from tests.fakes.doors import Passing, standing_open
from tests.fakes.remote import SIZE
from tests.fault.test_remote_faults import Open, every_server
from tests.fault.test_remote_faults import open_store as open_store  # a fixture

import kvferry
from kvferry.config import Config
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tools.doctor.checks import Grade, check_tiers

ALL = list(range(8))


@pytest.fixture
def door(kind: str) -> Iterator[s3_servers.Door]:
    made = s3_servers.Door(s3_servers.server(kind))
    yield made
    made.close()


@every_server
@pytest.mark.parametrize("status", [403, 503, 507])
def test_a_store_that_refuses_writes_is_read_on(
    status: int, door: s3_servers.Door, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: no block was found any more, by this server and by new ones."""
    store = open_store(door.endpoint)
    store.write(ALL[:6])
    door.refuses = {"PUT": status}
    with caplog.at_level(logging.INFO, logger="kvferry"):
        refused = store.do(Way.WRITE, [6, 7])
        assert not refused.ok.any()
        store.wait(lambda: bool(store.tier.refusal_to_write))
    assert not store.tier.ailment
    again = store.do(Way.WRITE, [6])
    assert str(status) in again.reasons[0], "and it is said why"
    for reader in (store, open_store(door.endpoint, store.objects.namespace)):
        reader.rows[:] = store.rows
        assert reader.do(Way.FIND, ALL).ok.tolist() == [True] * 6 + [False] * 2
        assert reader.reads(ALL) == [True] * 6 + [False] * 2
        assert not reader.tier.ailment
    door.refuses = {}
    store.wait(lambda: not store.tier.refusal_to_write)
    store.write([6, 7])
    assert store.reads(ALL) == [True] * 8
    said = [each.getMessage() for each in caplog.records if "takes no blocks" in each.message]
    assert len(said) == 2, "once by each, however often it is tried"


@every_server
def test_what_cannot_be_read_is_tried_though_nothing_can_be_written(
    door: s3_servers.Door, open_store: Open
) -> None:
    store = open_store(door.endpoint)
    store.write(ALL)
    door.refuses = {"PUT": 403, "GET": 500, "HEAD": 500}
    store.do(Way.READ, ALL, within=5.0)
    store.wait(lambda: bool(store.tier.ailment))
    door.refuses = {"PUT": 403}
    store.wait(lambda: not store.tier.ailment)
    assert store.reads(ALL) == [True] * 8


def test_losing_a_store_is_logged_once(open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: the library said nothing when a store went away at run time."""
    door = s3_servers.Door(s3_servers.server("rclone"))
    store = open_store(door.endpoint)
    store.write([0])
    door.refuses = dict.fromkeys(("PUT", "GET", "HEAD"), 500)
    with caplog.at_level(logging.INFO, logger="kvferry"):
        store.do(Way.READ, [0], within=10.0)
        store.wait(lambda: bool(store.tier.ailment))
        for _ in range(20):
            store.do(Way.READ, [0])
        door.refuses = {}
        store.wait_healed()
    door.close()
    said = [each.getMessage() for each in caplog.records]
    assert [line.split(":")[1].strip() for line in said if "cannot be used" in line] == [
        "cannot be used"
    ]
    assert any("can be used again" in line for line in said)


@every_server
def test_a_server_that_only_reads_never_writes(door: s3_servers.Door, open_store: Open) -> None:
    store = open_store(door.endpoint)
    store.write(ALL)
    door.refuses = {"PUT": 418, "POST": 418, "DELETE": 418}
    reader = open_store(door.endpoint, store.objects.namespace, remote_mode="read-only")
    reader.rows[:] = store.rows
    reader.wait(lambda: not reader.tier.ailment)
    assert reader.reads(ALL) == [True] * 8
    assert "read-only" in reader.do(Way.WRITE, [0]).reasons[0]
    assert not reader.tier.ailment


def test_a_store_without_a_revision_is_warned_of(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: only a disk was."""
    endpoint = s3_servers.server("rclone").endpoint
    where = f"s3://{s3_servers.BUCKET}/tests?endpoint={endpoint}"
    with remote.environment(remote.CREDENTIALS):
        for revision in ("", "2"):
            caplog.clear()
            kv = [np.zeros((8, 2, 16, 64), np.float32)]
            kvferry.attach(kv, model="m", revision=revision, host="1MiB", remote=where).close()
            assert ("remote: blocks there" in caplog.text) == (not revision)


def test_the_doctor_says_what_is_wrong_with_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.tiers.remote.tier.OPEN_SECONDS", remote.LONG)
    door = s3_servers.Door(s3_servers.server("rclone"))
    config = Config.from_dict(
        {"remote": f"s3://{s3_servers.BUCKET}/doctor?endpoint={door.endpoint}"}
    )
    everything = dict.fromkeys(("PUT", "GET", "HEAD"), 403)
    for refuses, grade, words in (
        ({}, Grade.OK, "can be opened"),
        ({"PUT": 507}, Grade.WARN, "takes no blocks"),
        (everything, Grade.FAIL, "403"),
    ):
        door.refuses = refuses
        with remote.environment(remote.CREDENTIALS):
            (finding,) = check_tiers(config)
            if "has not answered" in finding.words:  # in two seconds, on a machine that is busy
                (finding,) = check_tiers(config)
        assert (finding.grade, words in finding.words) == (grade, True), finding
        assert bool(finding.remedy) == (grade is not Grade.OK)
    door.close()


# -- replies without bounds, and elsewhere --------------------------------------------------------


class Liar(Passing):
    """Lets writes pass as done, and answers reads as the test wants."""

    answers: str
    seen: list[dict[str, str]]
    elsewhere = ""

    def do_PUT(self) -> None:  # noqa: N802
        self.read_body()
        self._begin(200, 0)

    def do_HEAD(self) -> None:  # noqa: N802
        self._begin(200, remote_bytes())

    def do_GET(self) -> None:  # noqa: N802
        type(self).seen.append({k.lower(): v for k, v in self.headers.items()})
        if self.path.endswith("/probe"):
            self._begin(404, 0)
        elif self.answers == "endless chunks":
            self._begin(200, remote_bytes(), "chunked")
            self._send_for_ever()
        elif self.answers == "an endless error":
            self._begin(400, None, "chunked")
            self._send_for_ever()
        elif self.answers == "a terabyte":
            self._begin(200, 1 << 40)
            self._send_for_ever()
        elif self.answers == "elsewhere":
            self._begin(307, 0)
        else:
            said = (
                f"\x1b[31m{self.headers['Authorization']}\r\n{self.headers['X-Amz-Security-Token']}"
            )
            self._begin(403, len(said))
            self.wfile.write(said.encode())

    def _begin(self, status: int, length: int | None, encoding: str = "") -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if encoding:
            self.send_header("Transfer-Encoding", encoding)
        if status == 307:
            self.send_header("Location", self.elsewhere)
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", '"a"')
        self.end_headers()

    def _send_for_ever(self) -> None:
        piece = bytes(1 << 16)
        try:
            while True:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        except OSError:
            self.close_connection = True


def remote_bytes() -> int:
    return ObjectFormat(bytes(32), SIZE).object_bytes


class Thief(socketserver.BaseRequestHandler):
    """Another host. Notes what it is sent."""

    got: list[bytes]

    def handle(self) -> None:
        type(self).got.append(self.request.recv(1 << 16))


SECRET_TOKEN = "a-session-token-that-must-stay-here"
STS = {**remote.CREDENTIALS, "AWS_SESSION_TOKEN": SECRET_TOKEN}


def peak_mib(pid: int) -> int:
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line
    ]
    return int(line.split()[1]) >> 10


@pytest.mark.parametrize("answers", ["endless chunks", "an endless error", "a terabyte"])
def test_a_reply_is_read_no_further_than_it_should_be(answers: str, open_store: Open) -> None:
    """Seen red: 1.5 GB within one deadline; a Content-Length of 2**40 killed the process."""
    liar = type("Door", (Liar,), {"answers": answers, "seen": []})
    with standing_open(liar) as port:
        store = open_store(f"http://127.0.0.1:{port}")
        child = store.tier._child
        assert child is not None
        before = peak_mib(child.pid)
        store.into[:] = 0xEE
        store.send(Way.READ, ALL, within=4.0)
        most = 0
        while not (results := store.tier.poll()):
            with suppress(ValueError, OSError):  # it may have ended
                most = max(most, peak_mib(child.pid))
        assert not results[0].ok.any()
        assert (store.into == 0xEE).all()
        # An error is read to its end by the library: its process is ended instead.
        assert answers == "an endless error" or not child.is_gone
        assert most - before < (1024 if answers == "an endless error" else 128)


def test_no_other_host_is_sent_to(open_store: Open) -> None:
    """Seen red: a server that redirects was followed, with the session token."""
    Thief.got = []
    with socketserver.ThreadingTCPServer(("127.0.0.2", 0), Thief) as thief:
        threading.Thread(target=thief.serve_forever, args=(0.01,), daemon=True).start()
        where = f"http://127.0.0.2:{thief.server_address[1]}/block"
        liar = type("Door", (Liar,), {"answers": "elsewhere", "elsewhere": where, "seen": []})
        with standing_open(liar) as port:
            store = open_store(f"http://127.0.0.1:{port}", credentials=STS)
            result = store.do(Way.READ, [0], within=10.0)
            assert not result.ok.any()
            assert "another host" in result.reasons[0]
        thief.shutdown()
    assert not Thief.got


def test_what_a_server_echoes_is_not_shown(open_store: Open) -> None:
    """Seen red: control characters and the request's own Authorization were in the reason."""
    seen: list[dict[str, str]] = []
    liar = type("Door", (Liar,), {"answers": "echo", "seen": seen})
    with standing_open(liar) as port:
        store = open_store(f"http://127.0.0.1:{port}", credentials=STS)
        reasons = store.do(Way.READ, [0]).reasons[0]
        store.wait(lambda: bool(store.tier.ailment))
        sent = next(each["authorization"] for each in seen)
    for words in (reasons, store.tier.ailment):
        assert "403" in words
        assert words.isprintable()
        for secret in (SECRET_TOKEN, s3_servers.ACCESS, sent.rpartition("=")[2]):
            assert secret not in words
