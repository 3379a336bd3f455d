"""Demo servers as processes, and a router that sends every question to a random one.

::

    python -m kvferry.tools.demo.servers FD     a server; it ends when the other end of FD is closed

A server receives its :class:`ServerSetup` and answers when it is ready. Then it receives questions,
and answers each. To None it answers once its transfers have ended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.core.lifecycle import Closing
from kvferry.errors import KvferryError, TransferError
from kvferry.tools.demo.blocks import ServedRequest, Turn
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.report import OnTurn, Run
from kvferry.tools.demo.workload import Dialogue, TurnRequest
from kvferry.types import DEVICE, HOST

_IDLE_SECONDS = 0.02
"""Pause of an idle server before it looks for finished copies again."""

_STORE_SECONDS = 30.0
"""Longest wait for the shared store, on a busy machine."""

_SILENCE_SECONDS = 60.0
_END_SECONDS = 15.0
_NO_BYTES = dict.fromkeys(("device->host", "host->device", "host->tiers", "tiers->host"), 0)


@dataclass(frozen=True)
class ServerSetup:
    """The sizes of a server. ``settings`` are kvferry's; with None it serves without kvferry."""

    shape: ModelShape
    device_blocks: int
    host_bytes: int
    settings: dict[str, Any] | None


@dataclass(frozen=True)
class ServerAnswer:
    """A turn if there is one, and the figures of the server so far."""

    turn: Turn | None
    preemptions: int
    restored_blocks: int
    bytes_moved: Counter[str]
    ailment: str


def serve_questions(setup: ServerSetup, router: Connection) -> None:
    """Answer every question. Raises EOFError once the router has closed its end."""
    limit_matrix_threads(1)
    offloader = None
    with ExitStack() as stack:
        runner = stack.enter_context(Runner(Decoder(setup.shape), num_blocks=setup.device_blocks))
        if setup.settings is not None:
            config = Config.from_dict(setup.settings)
            offloader = Offloader(runner, host_bytes=setup.host_bytes, config=config)
            stack.enter_context(offloader)
            _wait_for_store(offloader, router)
        engine = Engine(runner, offloader=offloader)
        router.send(_answer(engine))
        while True:
            while router.poll(0 if engine.has_work else _IDLE_SECONDS):
                question = router.recv()
                if question is None:
                    engine.drain()
                    engine.memory.check_integrity()
                    router.send(_answer(engine))
                else:
                    engine.submit(ServedRequest(**question, arrival=engine.clock()))
            for request in engine.step():
                router.send(_answer(engine, request.turn()))


def _wait_for_store(offloader: Offloader, router: Connection) -> None:
    """Wait until all tiers can be used.

    A server without its shared store would compute everything and show no saving.
    """
    end = time.monotonic() + _STORE_SECONDS
    offloader.settle()
    while ailment := _ailment(offloader):
        if time.monotonic() > end:
            raise TransferError(
                f"the shared store did not become available in {_STORE_SECONDS:g} seconds: "
                f"{ailment}"
            )
        if router.poll(_IDLE_SECONDS):
            router.recv()  # nothing is sent before we are ready: the router has gone
        offloader.settle()


def _ailment(offloader: Offloader) -> str:
    return "; ".join(filter(None, offloader.stats().ailments.values()))


def _answer(engine: Engine, turn: Turn | None = None) -> ServerAnswer:
    restored, moved, ailment = 0, Counter(_NO_BYTES), ""
    if engine.offloader:
        stats, ailment = engine.offloader.stats(), _ailment(engine.offloader)
        restored = sum(stats.restored.values())
        for route, num_bytes in stats.bytes_moved.items():
            src, dst = (name if name in (DEVICE, HOST) else "tiers" for name in route)
            moved[f"{src}->{dst}"] += num_bytes
    return ServerAnswer(turn, engine.counts.num_preemptions, restored, moved, ailment)


class ServerProcesses(Closing):
    """Owns the processes and a connection to each. A server ends when its connection does."""

    def __init__(self, setup: ServerSetup, count: int) -> None:
        self.alive: list[int] = []
        self._lines: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                ours, theirs = Pipe()
                with theirs:
                    fd = theirs.fileno()
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", __name__, str(fd)],
                            pass_fds=[fd],
                            stdin=subprocess.DEVNULL,
                            start_new_session=True,  # Ctrl-C is for the demo, which ends them
                        )
                    )
                self._lines.append(ours)
                self.alive.append(number)
                self.say(number, setup)
        except BaseException:
            self.close()
            raise

    def say(self, number: int, message: ServerSetup | TurnRequest | None) -> None:
        """Send a message. A server that has ended does not receive it; ``hear`` reports that."""
        with suppress(OSError):
            self._lines[number].send(message)

    def hear(self) -> tuple[int, ServerAnswer | None]:
        """The next answer and its server. None instead of an answer: that server has ended."""
        lines = {self._lines[number]: number for number in self.alive}
        ready = connection.wait(lines, _SILENCE_SECONDS)
        if not ready:
            raise TransferError(f"no server has answered for {_SILENCE_SECONDS:.0f} seconds")
        line = ready[0]
        assert isinstance(line, Connection)
        number = lines[line]
        try:
            return number, line.recv()
        except (EOFError, OSError):  # OSError: killed within an answer
            self.alive.remove(number)
        if not self.alive:
            raise TransferError(f"the last server ended with {self.code(number)}")
        return number, None

    def kill(self, number: int) -> None:
        """End a server without warning."""
        self._processes[number].kill()

    def code(self, number: int) -> int:
        """The exit status of a server that has ended."""
        return self._processes[number].wait(_END_SECONDS)

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
        self.seconds = 0.0
        self.latest: dict[int, ServerAnswer] = {}
        """The latest figures of each server."""
        self._servers = servers
        self._dialogue = dialogue
        self._on_turn = on_turn
        self._kill = kill
        self._under_way: dict[str, tuple[int, TurnRequest]] = {}

    def run(self) -> None:
        """Ask all turns once all servers are ready, and wait until they have finished."""
        self._hear_all()
        began, half = time.monotonic(), self._dialogue.num_waiting // 2
        while not self._dialogue.is_over:
            while (question := self._dialogue.ask()) is not None:
                server = self._send(question)
                if self._kill and self._dialogue.num_waiting < half and self.killed is None:
                    self.killed, self.num_before_kill = server, len(self.turns)
                    self._servers.kill(server)
            self._hear()
        self.seconds = time.monotonic() - began
        for number in self._servers.alive:
            self._servers.say(number, None)
        self._hear_all()

    def total(self, name: str) -> int:
        """A figure summed over all servers."""
        return sum(getattr(answer, name) for answer in self.latest.values())

    def bytes_moved(self) -> dict[str, int]:
        """The bytes copied by all servers, by route."""
        routes = dict(_NO_BYTES)
        for answer in self.latest.values():
            routes = {route: n + answer.bytes_moved[route] for route, n in routes.items()}
        return routes

    def _send(self, question: TurnRequest) -> int:
        """Send a question to a living server: the same one each time the same servers live."""
        _, conversation, _, turn = question["id"].split("-")
        seed = (self._dialogue.chat.seed, 5, int(conversation), int(turn))
        server = int(np.random.default_rng(seed).choice(self._servers.alive))
        self._under_way[question["id"]] = server, question
        self._servers.say(server, question)
        return server

    def _hear_all(self) -> None:
        """Wait for one answer without a turn from each server."""
        for _ in tuple(self._servers.alive):
            self._hear()

    def _hear(self) -> None:
        server, answer = self._servers.hear()
        if answer is None:
            self._lost(server)
            return
        self.latest[server] = answer
        self.ailment = answer.ailment or self.ailment
        if turn := answer.turn:
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


def run_servers(
    title: str,
    setup: ServerSetup,
    dialogue: Dialogue,
    on_turn: OnTurn,
    *,
    num_servers: int = 1,
    kill: bool = False,
) -> Run:
    """Serve a dialogue with processes that end with this call."""
    show = partial(on_turn, title, dialogue.num_turns)
    with ServerProcesses(setup, num_servers) as servers:
        router = Router(servers, dialogue, show, kill=kill)
        router.run()
    moved = router.bytes_moved()
    facts = {
        "seconds": router.seconds,
        "device_blocks": setup.device_blocks,
        "preemptions": router.total("preemptions"),
        "bytes_moved": moved,
        "restored_blocks": router.total("restored_blocks"),
        "read_bytes": moved["tiers->host"],
        "written_bytes": moved["host->tiers"],
        "turns_by_server": [router.answered_by[number] for number in range(num_servers)],
        "killed_server": router.killed,
        "turns_before_kill": router.num_before_kill,
        "resent_turns": router.resent,
        "store_ailment": router.ailment,
    }
    return Run(title, router.turns, facts)


def main() -> None:
    """Serve until the router is gone."""
    with Connection(int(sys.argv[1])) as router, suppress(EOFError, KeyboardInterrupt, OSError):
        try:
            serve_questions(router.recv(), router)
        except KvferryError as error:
            sys.exit(f"Error: {error}")


if __name__ == "__main__":
    from kvferry.tools.demo import servers  # so that messages have the router's types

    servers.main()
