"""Our HTTP server among bad clients: it stays small and awake, and good clients are served."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.test_endpoint import ask

from kvferry.errors import ConfigError
from kvferry.telemetry.http import MAX_CONNECTIONS, HttpServer, Reply


@pytest.fixture
def server():
    server = HttpServer(lambda path: Reply(b"hello" if path != ("big",) else bytes(1 << 24)))
    yield server
    server.close()


def dial(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def raw(server: HttpServer, request: bytes) -> bytes:
    with dial(server) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_hundreds_of_silent_clients_cost_little_and_block_no_other(server):
    ask(server.url, "/")  # threads that answer begin with the first request
    threads, files = threading.active_count(), num_files()
    silent = []
    try:
        for _ in range(3 * MAX_CONNECTIONS):
            silent.append(dial(server))
            silent[-1].sendall(b"GET / HT")
        assert ask(server.url, "/")[:2] == (200, b"hello")
        assert threading.active_count() <= threads
        # Ours are the clients' ends too, so each connection has two files here while it lives.
        assert num_files() - files - len(silent) <= MAX_CONNECTIONS
    finally:
        for connection in silent:
            connection.close()


def test_a_request_has_a_deadline_however_it_drips():
    with (
        contextlib.closing(HttpServer(lambda path: Reply(b"hello"), patience=0.3)) as server,
        dial(server) as connection,
    ):
        connection.settimeout(0.1)
        for _ in range(600):
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("still open")


def test_a_reply_has_a_deadline_too():
    with (
        contextlib.closing(HttpServer(lambda path: Reply(bytes(1 << 26)), patience=0.3)) as server,
        dial(server) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        for _ in range(600):  # never reads a byte
            if not server._connections:
                break
            time.sleep(0.05)
        assert not server._connections


def test_a_large_reply_arrives_whole(server):
    status, body, _ = ask(server.url, "/big")
    assert (status, len(body)) == (200, 1 << 24)


def test_slow_answers_do_not_keep_quick_ones_waiting():
    go = threading.Event()

    def answer(path):
        if path:
            go.wait(30)
        return Reply(b"done")

    server = HttpServer(answer)
    try:
        with dial(server) as slow:
            slow.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
            assert ask(server.url, "/")[1] == b"done"
            go.set()
            assert slow.recv(100).startswith(b"HTTP/1.0 200")
    finally:
        go.set()
        server.close()


OUT_OF_FILES = """
import resource, socket, time
from urllib.request import urlopen
from kvferry.telemetry.http import HttpServer, Reply

server = HttpServer(lambda path: Reply(b"hello"))
urlopen(server.url).read()  # whatever is opened once, is open
held, clients = [], []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
clients = [socket.socket() for _ in range(5)]
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
for client in clients:
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
before = time.process_time()
time.sleep(1.0)
print("busy", time.process_time() - before)
for file in held:
    file.close()
print("answered", sum(client.recv(15) == b"HTTP/1.0 200 OK" for client in clients))
server.close()
"""


def test_out_of_descriptors_it_waits_and_comes_back():
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    words = dict(line.split() for line in done.stdout.splitlines())
    assert float(words["busy"]) < 0.3  # of one second; a loop that spins takes all of it
    assert words["answered"] == "5"


@pytest.mark.parametrize("host", ["[", "[::1", "]", "a b", "\x80", "[1.2]:3"])
def test_a_host_that_is_none_is_refused_not_ignored(server, host):
    reply = raw(server, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))
    assert reply.startswith((b"HTTP/1.0 403 ", b"HTTP/1.0 400 "))


def test_two_hosts_are_refused(server):
    reply = raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert reply.startswith(b"HTTP/1.0 400 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nno colon\r\n\r\n", 400),
        (b"G\x1bT / HTTP/1.0\r\n\r\n", 400),
        (b"BREW / HTTP/1.0\r\n\r\n", 501),
        (b"POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello", 501),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.0\r\n\r\n", 431),
        (b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 5_000 + b"\r\n", 431),
        (b"GET / HTTP/1.0\n\n", 200),  # by hand, with nc
        (b"GET http://localhost/ HTTP/1.0\r\n\r\n", 200),
        (b"GET /%zz%00%ff HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_every_request_is_answered(server, request_, status):
    assert raw(server, request_).startswith(f"HTTP/1.0 {status} ".encode())


@given(st.binary(max_size=300), st.booleans())
def test_nothing_that_is_sent_ends_it(garbage, as_header):
    with contextlib.closing(HttpServer(lambda path: Reply(b"hello"), patience=5)) as server:
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " if as_header else b""
        raw_reply = raw(server, head + garbage + b"\r\n\r\n")
        assert raw_reply.startswith(b"HTTP/1.0 ")
        assert ask(server.url, "/")[1] == b"hello"


def test_clients_that_leave_in_the_middle(server):
    for _ in range(200):
        connection = dial(server)
        request = b"GET /big HTTP/1.0\r\n\r\n"
        connection.sendall(request[: random.randrange(len(request) + 1)])
        if random.random() < 0.5:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # closed by a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    assert ask(server.url, "/")[1] == b"hello"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_addresses_of_version_six(host):
    with contextlib.closing(HttpServer(lambda path: Reply(b"hello"), host=host)) as server:
        connection = http.client.HTTPConnection("::1", server.port, timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"hello"
        connection.close()
        assert ask(server.url, "/")[1] == b"hello"


@pytest.mark.parametrize("host", ["not an address", "a\0b", "a" * 300, "\udcff", "256.1.1.1"])
def test_an_address_that_is_none_is_refused_in_one_line(host):
    with pytest.raises(ConfigError, match=r"^cannot listen on [^\n]*$"):
        HttpServer(lambda path: None, host=host)


@pytest.mark.parametrize("port", [-1, 65536, 1 << 70])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ConfigError, match="cannot listen on"):
        HttpServer(lambda path: None, port=port)


def test_close_ends_every_connection():
    server = HttpServer(lambda path: Reply(b"hello"))
    with dial(server) as connection:
        connection.sendall(b"GET")
        server.close()
        server.close()
        with contextlib.suppress(ConnectionResetError):  # what it said will not be read any more
            assert connection.recv(1) == b""
