"""The child's side of a child process, from start to exit.

It exits when the engine dies or closes the channel. It ignores signals of the terminal, because the
engine decides what an interrupt means.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvferry.errors import KvferryError, words_of
from kvferry.tiers.ipc.memory import EngineMemory, StatusPage
from kvferry.tiers.ipc.messages import Channel, FrameKind, pack

_LAST_SECONDS = 1.8
"""Seconds that a child has for its last commit after its engine has died."""


@dataclass(frozen=True)
class EngineLink:
    """A child's connections to its engine. ``hello`` is the engine's message of what to serve."""

    channel: Channel
    status: StatusPage
    memory: EngineMemory
    hello: bytes


Serve = Callable[[EngineLink], None]
"""Serves one engine until its channel ends. An exception is reported to the engine as a refusal."""


class _LogHandler(logging.Handler):
    """Sends the child's log lines to the engine."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(pack(FrameKind.LOG, record.levelno, record.getMessage()))


def serve_engine(serve: Serve, channel: Channel, status: StatusPage, memory: EngineMemory) -> None:
    """Wait for the engine's hello, then serve it until the channel ends."""
    while not channel.is_ended:
        channel.wait(1.0)
        for _, hello in channel.receive(1):
            try:
                serve(EngineLink(channel, status, memory, hello))
            except Exception as error:
                if not isinstance(error, (KvferryError, OSError)):
                    traceback.print_exc()
                channel.send(pack(FrameKind.REFUSED, words_of(error)))
                channel.wait(1.0)
            return


def _exit_after(engine: int) -> None:
    """Exit ``_LAST_SECONDS`` after the engine's process has ended, whatever other threads do."""
    with suppress(OSError):  # a kernel before 5.3, or a dead engine: only the channel tells
        select.select([os.pidfd_open(engine)], [], [])
        time.sleep(_LAST_SECONDS)
        os._exit(0)


def main(serve: Serve) -> None:
    """Run the process. Arguments: the engine's pid; descriptors of channel, page and memory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, line, page, memory = (int(text) for text in sys.argv[1:5])
    channel = Channel(socket.socket(fileno=line), pid)
    threading.Thread(target=_exit_after, args=(pid,), name="kvferry-child-end", daemon=True).start()
    log = logging.getLogger("kvferry")
    log.setLevel(logging.INFO)
    log.addHandler(_LogHandler(channel))
    mem_fd = None if memory < 0 else memory
    serve_engine(serve, channel, StatusPage(page), EngineMemory(pid, mem_fd))
    # A thread that hangs in the kernel must not keep the process alive, so nothing is joined or
    # closed. Such a thread may keep the socket open, so the channel is ended explicitly.
    channel.end()
    os._exit(0)
