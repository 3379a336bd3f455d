"""Starting a drive process, and ending one that does not end by itself.

Once a drive process was killed it cannot begin to write into our memory any more, even before it is
gone: the kernel looks for a pending SIGKILL before it touches another process's pages. What was
being written at that moment is marked in the page we share. So after :meth:`DriveProcess.kill` our
memory is our own as soon as that mark is gone or the process is, though a thread of it may hang in
a call to the drive for hours; all such a thread can still touch is its own buffer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from kvferry.errors import ConfigError
from kvferry.tiers.disk.channel import Channel
from kvferry.tiers.disk.engine_memory import let_children_in, open_own_memory
from kvferry.tiers.disk.messages import FrameKind, frame
from kvferry.tiers.disk.setup import DriveSetup
from kvferry.tiers.disk.status import Status

DRIVE_MODULE = "kvferry.tiers.disk.drive"

_KILL_SECONDS = 2.0

# A drive needs a few small modules of kvferry, not the library: its packages are entered without
# running their ``__init__``, which would take three times as long as all the rest.
_START = """
import sys, types
root, module = sys.argv.pop(1), sys.argv.pop(1)
for name in ("kvferry", "kvferry.tiers", "kvferry.tiers.disk"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
import importlib
importlib.import_module(module).main()
"""


class DriveProcess:
    """A child, the line to it and the page shared with it. Owns all three."""

    def __init__(self, setup: DriveSetup, module: str = DRIVE_MODULE) -> None:
        """Start it; what it finds comes over the line. ConfigError where it cannot be started."""
        ours, theirs = socket.socketpair()
        memory = open_own_memory()
        self.status = Status()
        command = _command(module)
        fds = [theirs.fileno(), self.status.fd, -1 if memory is None else memory]
        try:
            self._child = subprocess.Popen(
                command + [str(fd) for fd in fds],
                pass_fds=[fd for fd in fds if fd >= 0],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # an interrupt from the keyboard is for the engine
            )
        except (OSError, TypeError, ValueError) as error:
            ours.close()
            self.status.close()
            raise ConfigError(f"{sys.executable or 'Python'} cannot be started: {error}") from error
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory)
        self.pid = self._child.pid
        let_children_in()
        self.channel = Channel(ours)
        self.channel.send(frame(FrameKind.HELLO, setup.pack()))

    def kill(self) -> bool:
        """End it at once; whether our memory is certainly out of its reach."""
        with suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGKILL)
        end = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < end:
            if self.wait(0.01) or not self.status.is_copying:
                return True
        return False

    def wait(self, timeout: float) -> bool:
        """Whether it is gone within ``timeout`` seconds."""
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        code = self._child.poll()
        if code is None:
            return "hung up"
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"

    def close(self) -> None:
        """Give the line and the page back. A child that hangs is left to the kernel."""
        self.channel.close()
        self.status.close()


def run_apart(module: str, told: bytes, timeout: float) -> bytes:
    """What a small module of kvferry answers on its standard output, in a process of its own.

    OSError where it cannot be started, fails or takes too long: it is then left to the kernel. It
    is ended too where we are interrupted.
    """
    child = subprocess.Popen(
        _command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    )
    try:
        answer, errors = child.communicate(told, timeout)
    except BaseException as error:
        child.kill()  # and no waiting for it: it may hang in a call to a drive for hours
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


def _environment() -> dict[str, str]:
    """Ours, but for what a drive must not have or does not need."""
    env = {name: value for name, value in os.environ.items() if name != "KVFERRY_DISK_KEY"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["OPENBLAS_NUM_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return env
