"""Servers behind a router that knows nothing: what they compute alone, and what sharing saves.

::

    conversations ──> router, by chance ──> server 0 ─┐
                                       ──> server 1 ─┼── one store, or each for itself
                                       ──> server 2 ─┘
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import MiB
from kvferry.errors import TransferError
from kvferry.tools.demo.compare import Answers, Scenario, Turn
from kvferry.tools.demo.mooncake_master import MooncakeMaster
from kvferry.tools.demo.server import ServerSetup
from kvferry.tools.demo.workload import Chat

_SILENCE_SECONDS = 60.0
_END_SECONDS = 15.0


class ServerProcesses(Closing):
    """Owns the processes, and a thread that listens to each. They end when our ends of them do."""

    def __init__(self, setup: ServerSetup, count: int) -> None:
        self.alive = list(range(count))
        self._heard: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                self._processes.append(_start())
                self._write(number, setup.pack())
                listener = threading.Thread(target=self._listen, args=(number,), daemon=True)
                listener.start()
                self._threads.append(listener)
        except BaseException:
            self.close()
            raise

    def say(self, number: int, turn: dict[str, Any]) -> None:
        """One that is gone does not hear it; we hear of that."""
        self._write(number, json.dumps(turn))

    def _write(self, number: int, line: str) -> None:
        pipe = self._processes[number].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{line}\n")
            pipe.flush()

    def _listen(self, number: int) -> None:
        pipe = self._processes[number].stdout
        assert pipe is not None
        with contextlib.suppress(ValueError):  # killed in the midst of a line
            for line in pipe:
                self._heard.put((number, json.loads(line)))
        self._heard.put((number, None))

    def hear(self) -> tuple[int, dict[str, Any] | None]:
        """The next answer and whose it is; None: that server is gone, and no longer ``alive``."""
        try:
            number, said = self._heard.get(timeout=_SILENCE_SECONDS)
        except queue.Empty:
            raise TransferError(
                f"no server has answered for {_SILENCE_SECONDS:.0f} seconds"
            ) from None
        if said is None:
            self.alive.remove(number)
            if not self.alive:
                raise TransferError(f"the last server ended with {self.code(number)}")
        return number, said

    def kill(self, number: int) -> None:
        """No farewell."""
        self._processes[number].kill()

    def code(self, number: int) -> int:
        return self._processes[number].wait(_END_SECONDS)

    def close(self) -> None:
        """All at once: each ends by itself once nobody speaks to it, or is ended."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        end = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.tools.demo.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us, who end them
    )


# ------------------------------------------------------------------------------------------------
# Servers behind a router that knows nothing: what they compute alone, and what sharing saves.
#
# ::
#
#     conversations ──> router, by chance ──> server 0 ─┐
#                                        ──> server 1 ─┼── one store, or each for itself
#                                        ──> server 2 ─┘

_CONVERSATIONS, _TURNS = 8, 4
"""Enough to see it; each way takes some seconds."""

_SEGMENT_UNIT = 16 * MiB

OnTurn = Callable[[str, int, Turn], None]
"""Told of the way's name, the server and every turn that it answered."""


@dataclass(frozen=True)
class FleetFigures:
    """What a fleet did, one way. ``killed`` is the server that was, ``resent`` its turns then."""

    turns: Sequence[Turn]
    answers: Answers
    answered_by: Mapping[int, int]
    read_bytes: int
    killed: int | None
    resent: Sequence[str]
    ailment: str

    @property
    def first_token_seconds(self) -> float:
        """The median."""
        return float(np.median([turn.first_token_seconds for turn in self.turns]))

    @property
    def prefill_tokens(self) -> int:
        return sum(turn.prefilled_tokens for turn in self.turns)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "turns": len(self.turns),
            "turns_by_server": [
                self.answered_by.get(n, 0) for n in range(max(self.answered_by) + 1)
            ],
            "prefill_tokens_computed": self.prefill_tokens,
            "ttft_p50_seconds": self.first_token_seconds,
            "read_bytes": self.read_bytes,
            "killed_server": self.killed,
            "resent_turns": list(self.resent),
            "store_ailment": self.ailment,
        }


@dataclass(frozen=True)
class FleetResult:
    """The same conversations on the same servers, with a store that they share and without."""

    num_servers: int
    shared: FleetFigures
    alone: FleetFigures

    @property
    def num_different_turns(self) -> int:
        """Answers that are not those of servers that share nothing."""
        return sum(
            self.shared.answers.get(name) != said for name, said in self.alone.answers.items()
        )

    @property
    def tokens_equal(self) -> bool:
        same_turns = len(self.shared.answers) == len(self.alone.answers)
        return self.num_different_turns == 0 and same_turns

    @property
    def saved_share(self) -> float | None:
        """Of the prefill that servers alone compute, what sharing saves; None: nothing was shared.

        What is computed more or less then is chance: which turns came while others were answered.
        """
        if not self.shared.read_bytes:
            return None
        return 1 - self.shared.prefill_tokens / self.alone.prefill_tokens

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "servers": self.num_servers,
            "tokens_equal": self.tokens_equal,
            "different_turns": self.num_different_turns,
            "prefill_saved_share": self.saved_share,
            "shared": self.shared.to_dict(),
            "alone": self.alone.to_dict(),
        }


def run_fleet(
    setting: Scenario,
    num_servers: int,
    *,
    kill: bool = False,
    on_turn: OnTurn = lambda way, server, turn: None,
) -> FleetResult:
    """Serve with a store, which is started and ended here, then without.

    With ``kill``, one server is killed each time at half of the turns, in the midst of one.
    """
    chat = replace(
        setting.chat,
        num_conversations=min(_CONVERSATIONS, setting.chat.num_conversations),
        num_turns=max(2, min(_TURNS, setting.chat.num_turns)),
    )
    setup = ServerSetup(
        shape=setting.shape,
        device_blocks=setting.device_blocks,
        host_bytes=setting.host_bytes,
        block_tokens=setting.block_tokens,
    )
    total = chat.num_blocks(setting.block_tokens) * setting.block_bytes
    # Room for everything twice, for objects lie on segments at random and one may be lost.
    segment = -(-2 * total // (num_servers * _SEGMENT_UNIT)) * _SEGMENT_UNIT
    with MooncakeMaster() as master:
        sharing = {
            "remote": f"mooncake://{master.place}?segment={max(segment, 4 * _SEGMENT_UNIT)}",
            "tier_write": "through",
            # A toy computes faster than a real model: that it would, is no reason not to show it.
            "load_policy": "always",
        }
        shared = _play("shared", replace(setup, settings=sharing), chat, num_servers, kill, on_turn)
    alone = _play("alone", setup, chat, num_servers, kill, on_turn)
    return FleetResult(num_servers, shared, alone)


def _play(
    way: str, setup: ServerSetup, chat: Chat, num_servers: int, kill: bool, on_turn: OnTurn
) -> FleetFigures:
    with ServerProcesses(setup, num_servers) as servers:
        router = _Router(servers, chat, kill, lambda server, turn: on_turn(way, server, turn))
        return router.run()


@dataclass(frozen=True)
class _Sent:
    """A turn under way: to whom it was given, and what was said."""

    server: int
    conversation: int
    turn: int
    prompt: list[int]


@dataclass
class _Router:
    """Gives every turn to a server by chance. Owns the conversations and what came of them."""

    servers: ServerProcesses
    chat: Chat
    kill: bool
    on_turn: Callable[[int, Turn], None]
    turns: list[Turn] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    answered_by: Counter[int] = field(default_factory=Counter)
    read_bytes: dict[int, int] = field(default_factory=dict)
    killed: int | None = None
    resent: list[str] = field(default_factory=list)
    ailment: str = ""

    def __post_init__(self) -> None:
        chat = self.chat
        self._histories = [chat.opening(number) for number in range(chat.num_conversations)]
        self._waiting = deque(
            (number, turn) for turn, order in enumerate(chat.rounds()) for number in order
        )
        self._half = len(self._waiting) // 2
        self._under_way: dict[str, _Sent] = {}

    def run(self) -> FleetFigures:
        while self._waiting or self._under_way:
            while self._may_send():
                self._send_next()
            server, said = self.servers.hear()
            if said is None:
                self._lost(server)
            else:
                self._answered(server, said)
        return FleetFigures(
            turns=self.turns,
            answers=self.answers,
            answered_by=self.answered_by,
            read_bytes=sum(self.read_bytes.values()),
            killed=self.killed,
            resent=self.resent,
            ailment=self.ailment,
        )

    def _may_send(self) -> bool:
        """Whether a user is free, and the next conversation has its last answer."""
        if not self._waiting or len(self._under_way) >= self.chat.num_users:
            return False
        return all(sent.conversation != self._waiting[0][0] for sent in self._under_way.values())

    def _send_next(self) -> None:
        number, turn = self._waiting.popleft()
        self._histories[number] += self.chat.question(number, turn)
        sent = _Sent(-1, number, turn, list(self._histories[number]))
        server = self._send(f"conversation-{number:03d}-turn-{turn:02d}", sent)
        is_half = len(self._waiting) < self._half
        if self.kill and is_half and self.killed is None:
            self.killed = server
            self.servers.kill(server)

    def _send(self, name: str, sent: _Sent) -> int:
        """To any server that lives: the same one each time the same servers do."""
        rng = np.random.default_rng((self.chat.seed, 5, sent.conversation, sent.turn))
        server = int(rng.choice(self.servers.alive))
        self._under_way[name] = replace(sent, server=server)
        length = self.chat.answer_length(sent.conversation, sent.turn)
        self.servers.say(server, {"id": name, "prompt": sent.prompt, "max_new_tokens": length})
        return server

    def _answered(self, server: int, said: dict[str, Any]) -> None:
        told = said["turn"]
        name, answer = told.pop("id"), told.pop("answer")
        sent = self._under_way.pop(name)
        self._histories[sent.conversation] += answer
        self.answers[name] = answer
        self.answered_by[server] += 1
        self.read_bytes[server] = said["read_bytes"]
        self.ailment = said["ailment"] or self.ailment
        self.turns.append(Turn(conversation=sent.conversation, turn=sent.turn, **told))
        self.on_turn(server, self.turns[-1])

    def _lost(self, server: int) -> None:
        """A server is gone: what it had not answered, others answer."""
        if server != self.killed:
            raise TransferError(f"server {server} ended with {self.servers.code(server)}")
        for name, sent in list(self._under_way.items()):
            if sent.server == server:
                self.resent.append(name)
                self._send(name, sent)
