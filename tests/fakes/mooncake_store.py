"""A real Mooncake store on this machine: a master, and peers that give memory, each a process."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from tests.fakes.ports import free_port
from tools import mooncake_libs

from kvferry.core.quantities import MiB

_START_SECONDS = 60.0
_TRIES = 3


@lru_cache
def lacking() -> str:
    """Why there can be no store here; empty where there can."""
    wish = os.environ.get("MOONCAKE", "auto")
    if wish == "off":
        return "MOONCAKE=off"
    try:
        if importlib.util.find_spec("mooncake") is None:
            raise LookupError("the wheel mooncake-transfer-engine-non-cuda is not installed")
        _folder()
    except LookupError as error:
        if wish == "required":
            raise
        return str(error)
    return ""


@lru_cache
def _folder() -> Path | None:
    """Found once: what this process has loaded itself would look like the system's."""
    return mooncake_libs.find()


def environment() -> dict[str, str]:
    """For processes that load Mooncake."""
    folder = _folder()
    paths = [str(folder)] if folder is not None else []
    paths += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    return {"LD_LIBRARY_PATH": ":".join(paths), "GLOG_minloglevel": "2"}


def load_here() -> None:
    """Make it importable in this process: what is loaded by its path is found by its name."""
    folder = _folder()
    if folder is not None:
        for name in mooncake_libs.LIBRARIES:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


class Master:
    """``mooncake_master`` with its HTTP metadata server. It remembers nothing when it dies."""

    def __init__(self, client_ttl: int = 2) -> None:
        """``client_ttl``: after so many seconds of silence a client's memory counts as lost."""
        self._client_ttl = client_ttl
        self._choose_ports()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self._log = Path(tempfile.gettempdir(), f"kvferry-mooncake-{os.getpid()}-{self.port}.log")

    def _choose_ports(self) -> None:
        self.port, self.metadata_port, self._metrics_port = free_port(), free_port(), free_port()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self.metadata_port}/metadata"

    def start(self) -> None:
        """For the first time, on ports that are its own from then on; or again on those."""
        for _ in range(_TRIES):
            self._begin()
            if self._comes_up():
                return
            if not self._was_up:
                self._choose_ports()  # somebody was quicker
        raise AssertionError(f"mooncake_master ended at once: {self._said()}")

    def _begin(self) -> None:
        command = [
            str(Path(sys.executable).parent / "mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.metadata_port}",
            f"--client_ttl={self._client_ttl}",
        ]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, **environment()},
                start_new_session=True,
            )

    def _comes_up(self) -> bool:
        """Not if it ends instead."""
        assert self._process is not None
        end = time.monotonic() + _START_SECONDS
        while not (_answers(self.port) and _answers(self.metadata_port)):
            if self._process.poll() is not None:
                return False
            assert time.monotonic() < end, f"mooncake_master does not answer: {self._said()}"
            time.sleep(0.02)
        self._was_up = True
        return True

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._log.unlink(missing_ok=True)


_PEER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", sys.argv[2], int(sys.argv[3]), 1 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


class Peer:
    """Another server of the fleet, which gives memory to the store."""

    def __init__(self, master: Master, num_bytes: int = 64 * MiB, metadata: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PEER, master.place, metadata or "P2PHANDSHAKE", str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment()},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"0\n"

    def kill(self) -> None:
        """No farewell: the master notices in its own time."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def close(self) -> None:
        if self._process.poll() is None:
            self._close_pipes()
            self._process.wait()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@lru_cache
def shared_master() -> Master:
    """One for all tests that do it no harm, with a peer that has room."""
    master = Master()
    master.start()
    peer = Peer(master)
    atexit.register(master.kill)
    atexit.register(peer.kill)
    return master


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
