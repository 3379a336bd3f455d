"""Why S3 refused, as people read it: no markup, nothing cut in the middle of it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.fakes.doors import Passing, standing_open

from kvferry.settings.tiers import read_remote
from kvferry.tiers.contract import Way
from kvferry.tiers.remote.client import Fault

pytest.importorskip("obstore")

from kvferry.tiers.remote.bucket import BucketClient

ENV = {"HOME": "/nowhere", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
LONG = "x" * 400


class Refusing(Passing):
    """Answers everything alike."""

    status, body = 403, ""

    def do_PUT(self) -> None:  # noqa: N802
        self.read_body()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body.encode())


def reason(endpoint: str) -> str:
    address = read_remote("remote", f"s3://bucket?endpoint={endpoint}")
    fault = asyncio.run(BucketClient(address, 64, "folder", ENV).probe(Way.WRITE))
    assert isinstance(fault, Fault)
    return fault.reason


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (
            403,
            f"{XML}<Error><Code>InvalidAccessKeyId</Code><Message>It is not &quot;ours&quot;."
            f"</Message><AWSAccessKeyId>key</AWSAccessKeyId><HostId>{LONG}</HostId></Error>",
            'PUT: 403 Forbidden: InvalidAccessKeyId: It is not "ours".',
        ),
        (
            404,
            f"{XML}<Error>\n  <Code>NoSuchBucket</Code>\n  <Message>There is\nnone</Message>\n"
            f"  <HostId>{LONG}</HostId>\n</Error>",
            "PUT: 404 Not Found: NoSuchBucket: There is none",
        ),
        (403, f"{XML}<Error><Code>AccessDenied</Code></Error>", "PUT: 403 Forbidden: AccessDenied"),
        (403, "<html><h1>Go away</h1><p>now</p></html>", "PUT: 403 Forbidden: Go away now"),
        (400, "plain words", "PUT: 400 Bad Request: plain words"),
        (403, "", "PUT: 403 Forbidden"),
    ],
)
def test_an_answer_is_said_in_its_words(status: int, body: str, says: str) -> None:
    with standing_open(type("Door", (Refusing,), {"status": status, "body": body})) as port:
        assert reason(f"http://127.0.0.1:{port}") == says


@pytest.mark.parametrize(
    ("said", "shown_"),
    [
        ("ExpiredToken: The token has expired.", "ExpiredToken: The token has expired."),
        ("Authorization: Bearer a b", "Authorization (hidden)"),
        ("x-amz-security-token: a\x1b[31m b", "x-amz-security-token (hidden)"),
        ("AWS4 Credential=A/b, SignedHeaders=host", "AWS4 Credential (hidden) SignedHeaders=host"),
        (f"it was {'k' * 40}.", "it was (hidden)."),
        ("one\r\n\ttwo \x00three", "one two three"),
        ("long " * 200, ("long " * 60).strip()),
    ],
)
def test_credentials_and_control_characters_are_not_shown(said: str, shown_: str) -> None:
    assert Fault(said).reason.strip() == shown_


def test_https_to_a_port_of_http_is_named() -> None:
    with standing_open(Refusing) as port:
        said = reason(f"https://127.0.0.1:{port}")
    assert said == "what answers there does not speak https; is its endpoint http://...?"


def test_a_line_that_is_cut_is_no_matter_of_https() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            for line in lines(server):
                line.close()

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        said = reason(f"https://127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)
    assert said.startswith("PUT: ")
    assert "speak" not in said


def lines(server: socket.socket) -> Iterator[socket.socket]:
    """Who connects, until the server ends."""
    while True:
        try:
            yield server.accept()[0]
        except OSError:
            return
