"""A Mooncake master on this machine, in a child process that ends with its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

from kvferry.core.lifecycle import Closing
from kvferry.errors import InputError, TransferError, install

_START_SECONDS = 20.0
_END_SECONDS = 5.0
_CLIENT_SECONDS = 2
"""Seconds of silence after which the master drops a server and its memory."""

# The wheel's program replaces this process. The kernel kills it when its parent ends in any way.
_RUN = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})
from mooncake.cli import main
main()
"""


def require_mooncake() -> None:
    """Raise InputError with a remedy if Mooncake cannot run here."""
    tried = subprocess.run(
        [sys.executable, "-c", "import mooncake.store, xxhash"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environment(),
    )
    if tried.returncode:
        raise InputError(
            "servers that share need a Mooncake store, and Mooncake cannot be loaded here "
            f"({(tried.stderr.strip().splitlines() or ['no message'])[-1]}): "
            f"{install('mooncake')}. It needs libibverbs1, libnuma1 and liburing2: apt-get "
            "install them. In a checkout, make fleet fetches them."
        )


class MooncakeMaster(Closing):
    """Owns the master's process. The master listens on loopback only and persists nothing."""

    def __init__(self) -> None:
        port, metrics_port = _free_ports(2)
        self.place = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _RUN),
                *(f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
                *(f"--metrics_port={metrics_port}", f"--client_ttl={_CLIENT_SECONDS}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C must reach the demo only: its servers still sign off
        )
        self.pid = self._process.pid
        try:
            self._wait_for(port)
        except BaseException:
            self.close()
            raise

    def _wait_for(self, port: int) -> None:
        end = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            time.sleep(0.02)
        code = self._process.poll()
        raise TransferError(f"mooncake_master does not answer (exit code {code})")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    return {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", **os.environ}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as socks:
        bound = [socks.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in bound]
