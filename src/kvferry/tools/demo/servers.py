"""Demo servers as processes (``serving.py``), and a router that sends questions to random ones.

A server receives its :class:`ServerSetup` and answers when it is ready. Then it receives questions
and answers each. On None it finishes its transfers and answers with its figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.core.lifecycle import Closing
from kvferry.errors import TransferError
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.report import OnTurn, Run
from kvferry.tools.demo.workload import Dialogue, Turn, TurnRequest

_SERVER = "kvferry.tools.demo.serving"
_SILENCE_SECONDS = 60.0
_END_SECONDS = 15.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Limits numpy to one thread, to leave the other cores to the copies."""


@dataclass(frozen=True)
class ServerSetup:
    """The sizes of a server. ``settings`` are kvferry's; with None it serves without kvferry."""

    shape: ModelShape
    device_blocks: int
    settings: dict[str, Any] | None


@dataclass(frozen=True)
class ServerAnswer:
    """A finished turn, if any, and the server's figures so far."""

    turn: Turn | None = None
    restored_blocks: int = 0
    bytes_moved: tuple[tuple[str, int], ...] = ()


class ServerProcesses(Closing):
    """Owns the processes and a connection to each. Closing its connection ends a server."""

    def __init__(self, setup: ServerSetup, count: int) -> None:
        self.alive: list[int] = []
        self._lines: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for number in range(count):
                ours, theirs = Pipe()
                self._lines.append(ours)
                with theirs:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", _SERVER, str(theirs.fileno())],
                            pass_fds=[theirs.fileno()],
                            stdin=subprocess.DEVNULL,
                            env=os.environ | _ONE_THREAD,
                            start_new_session=True,  # Ctrl-C must reach the demo only; it ends them
                        )
                    )
                self.alive.append(number)
                self.send(number, setup)
            undo.pop_all()

    def send(self, number: int, message: ServerSetup | TurnRequest | None) -> None:
        """Send a message. A server that has ended does not receive it; ``receive`` reports that."""
        with suppress(OSError):
            self._lines[number].send(message)

    def receive(self) -> tuple[int, ServerAnswer | None]:
        """Wait for the next answer. Returns the server, and None if that server has ended."""
        lines = {self._lines[number]: number for number in self.alive}
        ready = connection.wait(lines, _SILENCE_SECONDS)
        if not ready:
            raise TransferError(f"no server has answered for {_SILENCE_SECONDS:.0f} seconds")
        line = ready[0]
        assert isinstance(line, Connection)
        number = lines[line]
        try:
            return number, line.recv()
        except (EOFError, OSError):  # OSError: killed while sending an answer
            self.alive.remove(number)
        code = self._processes[number].wait(_END_SECONDS)
        if not self.alive or code > 0:
            raise TransferError(f"server {number} ended with {code}")
        return number, None

    def kill(self, number: int) -> None:
        """End a server without warning."""
        self._processes[number].kill()

    def close(self) -> None:
        """End all servers at once. Kills a server that does not end by itself."""
        for line in self._lines:
            line.close()
        end = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_servers(
    title: str,
    setup: ServerSetup,
    dialogue: Dialogue,
    on_turn: OnTurn | None,
    *,
    num_servers: int = 1,
    kill: bool = False,
) -> Run:
    """Serve a dialogue with processes that end with this call.

    Every question goes to a random server. With ``kill``, one server is killed at half of the
    turns, while it computes one. Other servers then answer its turns.
    """
    run = Run(title, setup.device_blocks)
    owners: dict[str, tuple[int, TurnRequest]] = {}
    latest: dict[int, ServerAnswer] = {}
    with ServerProcesses(setup, num_servers) as servers:

        def assign(question: TurnRequest) -> int:
            """Send a question to a random live server: the same choice in every run."""
            place = map(int, question["id"].split("-")[1::2])
            rng = np.random.default_rng((dialogue.chat.seed, 5, *place))
            server = int(rng.choice(servers.alive))
            owners[question["id"]] = server, question
            servers.send(server, question)
            return server

        for _ in range(num_servers):
            servers.receive()
        began, half = time.monotonic(), dialogue.num_turns // 2
        while not dialogue.is_over:
            while (question := dialogue.ask()) is not None:
                server = assign(question)
                if kill and run.killed_server is None and len(run.turns) >= half:
                    run.killed_server, run.turns_before_kill = server, len(run.turns)
                    servers.kill(server)
            server, answer = servers.receive()
            if answer is None:
                lost = [question for owner, question in owners.values() if owner == server]
                run.resent_turns += [question["id"] for question in lost]
                for question in lost:
                    assign(question)
            elif turn := answer.turn:
                del owners[turn.id]
                latest[server] = answer
                dialogue.answered(turn.id, turn.answer)
                run.turns.append(turn)
                run.turns_by_server[server] += 1
                if on_turn:
                    on_turn(title, dialogue.num_turns, turn)
        run.seconds = time.monotonic() - began
        for server in tuple(servers.alive):
            servers.send(server, None)
        for _ in tuple(servers.alive):
            server, answer = servers.receive()
            latest |= {server: answer} if answer else {}
    for answer in latest.values():
        run.restored_blocks += answer.restored_blocks
        run.bytes_moved.update(dict(answer.bytes_moved))
    return run
