"""Demo servers as processes, and a router that sends every question to a random one."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kvferry.core.lifecycle import Closing
from kvferry.errors import TransferError
from kvferry.tiers.ipc.process import end_module, start_module
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.demo.model import ServerSetup
from kvferry.tools.demo.workload import Dialogue, TurnRequest

_SILENCE_SECONDS = 60.0
_END_SECONDS = 15.0


class ServerProcesses(Closing):
    """Owns the processes and a listening thread for each. A server ends when its input does."""

    def __init__(self, setup: ServerSetup, count: int) -> None:
        self.alive = list(range(count))
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                self._processes.append(start_module("kvferry.tools.demo.server"))
                self.say(number, asdict(setup))
                listener = threading.Thread(target=self._listen, args=(number,), daemon=True)
                listener.start()
                self._threads.append(listener)
        except BaseException:
            self.close()
            raise

    def say(self, number: int, message: Mapping[str, Any]) -> None:
        """Send a message. A server that has ended does not receive it; ``hear`` reports that."""
        pipe = self._processes[number].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{json.dumps(message)}\n")
            pipe.flush()

    def _listen(self, number: int) -> None:
        pipe = self._processes[number].stdout
        assert pipe is not None
        with contextlib.suppress(ValueError):  # killed within a line
            for line in pipe:
                self._answers.put((number, json.loads(line)))
        self._answers.put((number, None))

    def hear(self) -> tuple[int, dict[str, Any] | None]:
        """The next answer and its server. None instead of an answer: that server has ended."""
        try:
            number, answer = self._answers.get(timeout=_SILENCE_SECONDS)
        except queue.Empty:
            raise TransferError(
                f"no server has answered for {_SILENCE_SECONDS:.0f} seconds"
            ) from None
        if answer is None:
            self.alive.remove(number)
            if not self.alive:
                raise TransferError(f"the last server ended with {self.code(number)}")
        return number, answer

    def kill(self, number: int) -> None:
        """End a server without warning."""
        self._processes[number].kill()

    def code(self, number: int) -> int:
        """The exit status of a server that has ended."""
        return self._processes[number].wait(_END_SECONDS)

    def close(self) -> None:
        """End all servers at once. Kills a server that does not end by itself."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        end = time.monotonic() + _END_SECONDS
        for process in self._processes:
            end_module(process, max(0.0, end - time.monotonic()))
        for thread in self._threads:
            thread.join()


class Router:
    """Sends the questions of a dialogue to random servers. Owns the answers.

    With ``kill``, it kills a server at half of the turns, while that server computes one. Other
    servers then answer its turns.
    """

    def __init__(
        self,
        servers: ServerProcesses,
        dialogue: Dialogue,
        on_turn: Callable[[Turn], None],
        *,
        kill: bool = False,
    ) -> None:
        self.turns: list[Turn] = []
        self.answered_by: Counter[int] = Counter()
        self.killed: int | None = None
        self.num_before_kill = 0
        self.resent: list[str] = []
        self.ailment = ""
        self.latest: dict[int, dict[str, Any]] = {}
        """The latest figures of each server."""
        self._servers = servers
        self._dialogue = dialogue
        self._on_turn = on_turn
        self._kill = kill
        self._under_way: dict[str, tuple[int, TurnRequest]] = {}

    def run(self) -> None:
        """Ask all turns and wait for their answers."""
        half = self._dialogue.num_waiting // 2
        while not self._dialogue.is_over:
            while (question := self._dialogue.ask()) is not None:
                server = self._send(question)
                if self._kill and self._dialogue.num_waiting < half and self.killed is None:
                    self.killed, self.num_before_kill = server, len(self.turns)
                    self._servers.kill(server)
            self._hear()

    def finish(self) -> None:
        """Wait until the only server has finished its transfers."""
        self._servers.say(0, {"finish": True})
        self._hear()

    def total(self, name: str) -> int:
        """A figure summed over all servers."""
        return sum(figures[name] for figures in self.latest.values())

    def _send(self, question: TurnRequest) -> int:
        """Send a question to a living server: the same one each time the same servers live."""
        _, conversation, _, turn = question["id"].split("-")
        seed = (self._dialogue.chat.seed, 5, int(conversation), int(turn))
        server = int(np.random.default_rng(seed).choice(self._servers.alive))
        self._under_way[question["id"]] = server, question
        self._servers.say(server, question)
        return server

    def _hear(self) -> None:
        server, answer = self._servers.hear()
        if answer is None:
            self._lost(server)
            return
        self.latest[server] = answer
        self.ailment = answer["ailment"] or self.ailment
        if answer["turn"] is not None:
            turn = Turn(**answer["turn"])
            del self._under_way[turn.id]
            self._dialogue.answered(turn.id, turn.answer)
            self.answered_by[server] += 1
            self.turns.append(turn)
            self._on_turn(turn)

    def _lost(self, server: int) -> None:
        if server != self.killed:
            raise TransferError(f"server {server} ended with {self._servers.code(server)}")
        for name, (owner, question) in list(self._under_way.items()):
            if owner == server:
                self.resent.append(name)
                self._send(question)
