"""Real servers of buckets on this machine, and a door before them at which a test can be cruel.

``moto`` honours conditional puts; ``rclone serve s3`` ignores them, and ranges too. ``azurite`` is
Microsoft's own emulator of Azure. They run as processes of their own and end with the tests.
"""

from __future__ import annotations

import atexit
import base64
import hmac
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tests.fakes.doors import Passing, open_door
from tests.fakes.ports import free_port

from kvferry.core.keys import Key
from kvferry.tiers.contract import Way

if TYPE_CHECKING:
    from tests.fakes.certificates import Certificate

ACCESS, SECRET, BUCKET = "kvferrytestaccess", "kvferrytestsecret", "kvferry-blocks"
SERVERS = ("rclone", "moto")
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Those of every Azurite; no secret."""

_WAYS = {"HEAD": Way.FIND, "GET": Way.READ, "PUT": Way.WRITE}
_NAME = re.compile(r"/([0-9a-f]{64})$")
_START_SECONDS = 60.0


class S3Server:
    """One server process. What it holds is gone with it, or (rclone) stays on disk."""

    def __init__(
        self,
        kind: str,
        folder: str | None = None,
        certificate: Certificate | None = None,
        *options: str,
    ) -> None:
        """``options`` are the server's own."""
        self.kind = kind
        self.port = free_port()
        self.certificate = certificate
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-s3-", dir=folder))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        bin_dir = Path(sys.executable).parent
        if not (bin_dir / "rclone").exists():  # SGLang's environment has none
            bin_dir = Path(__file__).parents[2] / ".venv" / "bin"
        if self.kind == "rclone":
            self.make_bucket(BUCKET)
            command = [str(bin_dir / "rclone"), "serve", "s3", "--auth-key", f"{ACCESS},{SECRET}"]
            command += [
                "--dir-cache-time",
                "10ms",
                "--addr",
                f"127.0.0.1:{self.port}",
                str(self._folder),
            ]
            if self.certificate is not None:
                command += ["--cert", str(self.certificate.chain)]
                command += ["--key", str(self.certificate.key)]
        elif self.kind == "azurite":
            command = [azurite() or "", "--silent", "--skipApiVersionCheck", "--blobHost"]
            command += ["127.0.0.1", "--blobPort", str(self.port), "--location", str(self._folder)]
        else:
            command = [str(bin_dir / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        command += self._options
        environment = {**os.environ, "RCLONE_CONFIG": "/dev/null"}
        log = self._folder.with_suffix(".log")
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # else it shares its processor time with who started it
            )
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, f"{self.kind} ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < end, f"{self.kind} is silent: {log.read_text()[-2000:]}"
            time.sleep(0.05)

    def make_bucket(self, name: str) -> None:
        """Of an rclone: its buckets are folders."""
        (self._folder / name).mkdir(exist_ok=True)

    def _answers(self) -> bool:
        try:
            line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            # moto makes the bucket; rclone, which wants a signature, refuses in so many words.
            if self.kind == "azurite":
                line.request("PUT", f"/{ACCOUNT}/{BUCKET}?restype=container", b"", _signed())
            else:
                line.request("PUT", f"/{BUCKET}")
            line.getresponse().read()
            line.close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._folder.with_suffix(".log").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def azurite() -> str | None:
    """The program, where it is installed."""
    beside = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
    return os.environ.get("AZURITE") or (str(beside) if beside.exists() else None)


def _signed() -> dict[str, str]:
    """The headers of a request that makes the container."""
    date = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    said = "PUT" + "\n" * 12 + f"{headers}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), said.encode(), "sha256")
    return {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }


@lru_cache
def server(kind: str) -> S3Server:
    """One for all tests."""
    made = S3Server(kind)
    made.start()
    atexit.register(made.close)
    return made


@lru_cache
def directory() -> str:
    """One for all tests."""
    made = tempfile.mkdtemp(prefix="kvferry-test-")
    (Path(made) / "tests").mkdir()
    atexit.register(shutil.rmtree, made, True)
    return made


class Door:
    """Stands before a server and passes every request on, after ``fault`` had its say.

    ``fault`` is called with what is asked for which block; what it raises is the server's error.
    ``refuses`` are methods that it answers with a status of its own, and ``says`` in the body.
    ``garble`` may change what the server answers with. ``clock`` is the server's: it refuses those
    with quite another time, as S3 does.
    """

    def __init__(self, behind: S3Server) -> None:
        self.behind = behind
        self.fault: Callable[[Way, Key], None] | None = None
        self.refuses: dict[str, int] = {}
        self.says = "<Error><Code>Refused</Code><Message>Not today.</Message></Error>"
        self.garble: Callable[[bytes], bytes] | None = None
        self.clock: Callable[[], datetime] | None = None
        self.num_requests = 0
        door = self

        class Handler(Passing):
            def _pass_on(self) -> None:
                door.num_requests += 1
                body = self.read_body()
                path, asks, query = self.path.partition("?")
                if behind.kind == "moto":  # Google's client quotes every character
                    path = unquote(path)
                found = _NAME.search(path)
                said = self.headers["x-amz-date"]
                if door.clock is not None and _is_skewed(said, door.clock()):
                    self._answer(403, {"Content-Type": "application/xml"}, _SKEWED)
                    return
                if self.command in door.refuses:
                    self._answer(door.refuses[self.command], {}, door.says.encode())
                    return
                try:
                    if door.fault is not None and found:
                        door.fault(_WAYS[self.command], Key(bytes.fromhex(found[1])))
                except Exception as error:
                    self._answer(500, {}, str(error).encode())
                    return
                line = http.client.HTTPConnection("127.0.0.1", behind.port, timeout=60)
                line.request(self.command, path + asks + query, body, dict(self.headers))
                answer = line.getresponse()
                content = answer.read()
                if door.garble is not None and self.command == "GET" and found:
                    content = door.garble(content)
                headers = dict(answer.getheaders())
                self._answer(answer.status, headers, content)
                line.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on  # noqa: N815

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                length = None
                for name, value in headers.items():
                    if name.lower() == "content-length" and self.command == "HEAD":
                        length = value
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length or str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        self._server = open_door(Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_SKEWED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time and the \
current time is too large.</Message></Error>"""
_MOST_SKEW = timedelta(minutes=15)  # S3's


def _is_skewed(said: str, now: datetime) -> bool:
    asked = datetime.strptime(said, "%Y%m%dT%H%M%SZ")
    return abs(asked.replace(tzinfo=timezone.utc) - now) > _MOST_SKEW


class Wire:
    """A stretch of network before a server: it can be cut, held up, or slowed."""

    def __init__(self, to_port: int, to_host: str = "127.0.0.1") -> None:
        self._to = (to_host, to_port)
        self.num_answered = 0
        """Bytes of answers that have passed."""
        self.delay = 0.0
        self.is_held = False
        self.cut_after: int | None = None
        """Bytes of each answer after which the line is cut."""
        self.cut_asking_after: int | None = None
        """The same the other way."""
        self.garble: Callable[[bytes], bytes] | None = None
        """What becomes of a piece of an answer on its way."""
        self._open: set[socket.socket] = set()
        self._lost: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End what is connected now."""
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def lose(self) -> None:
        """What is connected now passes nothing any more, and nobody is told."""
        self._lost |= self._open

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._to, timeout=60)
        except OSError:
            near.close()
            return
        self._open |= {near, far}
        for source, sink, answers in ((near, far, False), (far, near, True)):
            threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                time.sleep(self.delay)
                while self.is_held or source in self._lost:
                    time.sleep(0.01)
                most = self.cut_after if answers else self.cut_asking_after
                if most is not None and passed + len(data) > most:
                    break
                if answers and self.garble is not None:
                    data = self.garble(data)
                sink.sendall(data)
                passed += len(data)
                if answers:
                    self.num_answered += len(data)
        except OSError:
            pass
        for sock in (source, sink):  # who reads the other way must wake up too
            self._open.discard(sock)
            self._lost.discard(sock)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for somebody to come
        self._listener.close()
        self.is_held = False
        self.cut()
        self._lost.clear()
