"""The engine's side of a child process: its start, its end, and whether it still copies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvferry.tiers.ipc.memory import StatusPage, allow_child_access, open_own_memory
from kvferry.tiers.ipc.messages import Channel, FrameKind, frame

_KILL_SECONDS = 2.0

# A child needs a few modules of kvferry, not the library: packages are imported without running
# their ``__init__``, which would take three times as long as all the rest.
_START = """
import importlib, sys, types
root, module = sys.argv.pop(1), sys.argv.pop(1)
name = ""
for part in module.split(".")[:-1]:
    name = name + "." + part if name else part
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
importlib.import_module(module).main()
"""

# Ctrl-C is for the engine, which ends its children by the channel. A process group of their own is
# enough. With a session of their own, Linux (sched_autogroup) gives them and the engine the
# processor by turns: beside a busy engine on two cores reads took half as long again.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

_SECRETS = ("KVFERRY_DISK_KEY", "KVFERRY_REMOTE_KEY")


class ChildProcess:
    """A kvferry module in a process of its own. Owns the process, its channel and the shared page.

    It can access this process's memory only while it lives. A killed process copies nothing any
    more. One that cannot end yet, because it waits inside the kernel, is not gone.
    """

    def __init__(
        self,
        module: str,
        hello: bytes,
        *,
        environment: Mapping[str, str] | None = None,
        is_quiet: bool = False,
    ) -> None:
        """Start ``module``, whose ``main()`` calls ``ipc.child.main``, and send it ``hello``.

        ``is_quiet`` drops its standard error. Raises OSError if the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        memory = open_own_memory()
        self.status = StatusPage()
        fds = [theirs.fileno(), self.status.fd, -1 if memory is None else memory]
        try:
            self._process = subprocess.Popen(
                [*_command(module), str(os.getpid()), *map(str, fds)],
                pass_fds=[fd for fd in fds if fd >= 0],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env=_environment(os.environ if environment is None else environment),
                **_OWN_GROUP,
            )
        except (OSError, TypeError, ValueError) as error:
            ours.close()
            self.status.close()
            raise OSError(f"{sys.executable or 'Python'} cannot be started: {error}") from error
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory)
        self.pid = self._process.pid
        allow_child_access()
        self.channel = Channel(ours)
        self.channel.send(frame(FrameKind.HELLO, hello))

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def ending(self) -> str:
        code = self._process.poll()
        if code is None:
            return "hung up"
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the process to end; return whether it is gone."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def stop_memory_writes(self, timeout: float = _KILL_SECONDS) -> bool:
        """Kill the process; return whether it certainly writes to our memory no more.

        Only for a child that flags all its copies in the status page; for others use ``is_gone``.
        """
        self.kill()
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.wait(0.01) or not self.status.is_copying:
                return True
        return False

    def end(self, timeout: float) -> bool:
        """Ask the process to end, kill it after ``timeout`` seconds; return whether it is gone."""
        self.channel.end()
        if not self.wait(timeout):
            self.kill()
        return self.wait(timeout)

    def close(self) -> None:
        """Close the channel and the page. A child that hangs in the kernel is left behind."""
        self.channel.close()
        self.status.close()


def run_module(module: str, data: bytes = b"", timeout: float | None = None) -> bytes:
    """Run the ``main()`` of a small module in a child process; return its standard output.

    The child reads ``data`` on its standard input. Raises OSError if it cannot be started, fails or
    takes too long (TimeoutError). It is killed also when this call is interrupted.
    """
    child = subprocess.Popen(
        _command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(os.environ),
        **_OWN_GROUP,
    )
    try:
        answer, errors = child.communicate(data, timeout)
    except BaseException as error:
        child.kill()  # do not wait for it: it may hang in a call to a drive for hours
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no answer for {timeout:g} s") from None
        raise
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"it ended with status {child.returncode}")
    return answer


def _command(module: str) -> list[str]:
    root = os.path.dirname(sys.modules["kvferry"].__path__[0])
    return [sys.executable, "-c", _START, root, module]


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child, without secret keys: those travel in the hello."""
    env = {name: value for name, value in given.items() if name not in _SECRETS}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["OPENBLAS_NUM_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return env
