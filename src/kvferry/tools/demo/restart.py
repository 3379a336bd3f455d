"""A server that stops and starts again: what the next process finds on disk, and what that saves.

::

    life 1   the first rounds of the conversations, with a disk; then its process ends
    life 2   a new process, the same disk: the next round
    life 2'  a new process without a disk: the same round, computed from the first token on
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.core.quantities import MiB
from kvferry.errors import TransferError
from kvferry.tools.demo.compare import Scenario, Turn
from kvferry.tools.demo.life import LifeJob

_CONVERSATIONS = 8
"""Enough to see it; the whole takes a few seconds."""

_END_SECONDS = 30.0

OnTurn = Callable[[str, Turn], None]
"""Told of the life's name and every turn that ended in it."""


@dataclass(frozen=True)
class LifeFigures:
    """What one life did."""

    turns: Sequence[Turn]
    answers: dict[str, list[int]]
    restored_blocks: int
    read_bytes: int
    written_bytes: int
    prefill_tokens: int
    histories: list[list[int]]

    @property
    def first_token_seconds(self) -> float:
        """The median."""
        return float(np.median([turn.first_token_seconds for turn in self.turns]))


@dataclass(frozen=True)
class Restart:
    """What a restart cost, with the disk and without."""

    before: LifeFigures
    warm: LifeFigures
    cold: LifeFigures

    @property
    def num_different_turns(self) -> int:
        """Answers that are not those of a server that computed everything itself."""
        return sum(self.warm.answers.get(name) != said for name, said in self.cold.answers.items())

    @property
    def tokens_equal(self) -> bool:
        return self.num_different_turns == 0 and len(self.warm.answers) == len(self.cold.answers)

    @property
    def hit_rate(self) -> float:
        """Of the prompt tokens of the first turns after the restart, those that were not lost."""
        prompt = sum(turn.prompt_tokens for turn in self.warm.turns)
        return sum(turn.host_tokens for turn in self.warm.turns) / prompt

    @property
    def first_token_ratio(self) -> float:
        return self.cold.first_token_seconds / self.warm.first_token_seconds

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "tokens_equal": self.tokens_equal,
            "different_turns": self.num_different_turns,
            "restored_blocks": self.warm.restored_blocks,
            "written_bytes": self.before.written_bytes,
            "read_bytes": self.warm.read_bytes,
            "hit_rate": self.hit_rate,
            "ttft_p50_seconds": {
                "with_disk": self.warm.first_token_seconds,
                "without": self.cold.first_token_seconds,
            },
            "prefill_tokens_computed": {
                "with_disk": self.warm.prefill_tokens,
                "without": self.cold.prefill_tokens,
            },
        }


def run_restart(setting: Scenario, on_turn: OnTurn = lambda life, turn: None) -> Restart:
    """Live, stop, live again; the disk is a temporary directory, gone at the end."""
    chat = replace(
        setting.chat,
        num_conversations=min(_CONVERSATIONS, setting.chat.num_conversations),
        num_turns=max(2, min(3, setting.chat.num_turns)),
    )
    last = chat.num_turns - 1
    job = LifeJob(
        chat=chat,
        shape=setting.shape,
        device_blocks=setting.device_blocks,
        host_bytes=setting.host_bytes,
        block_tokens=setting.block_tokens,
        first=0,
        last=last,
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        settings = _settings(folder, setting)
        before = _live("before", replace(job, settings=settings), on_turn)
        again = replace(job, first=last, last=last + 1, histories=before.histories)
        warm = _live("warm", replace(again, settings=settings), on_turn)
        cold = _live("cold", again, on_turn)
    return Restart(before, warm, cold)


def _settings(folder: str, setting: Scenario) -> dict[str, Any]:
    """kvferry's, for a life with a disk: what it keeps and reads goes by no clock."""
    return {
        "disk": folder,
        "disk_size": 256 * MiB,
        "disk_keep_free": 0,
        "tier_write": "through",
        # A quarter of so small a device is a few blocks. Where its copies lag behind, the rest of a
        # turn would find no room and be lost, and with a window's last block all of that turn.
        "max_storing_blocks": setting.device_blocks * len(setting.shape.group_windows),
        # A toy computes faster than a real model: that it would, is no reason not to show it.
        "load_policy": "always",
    }


def _live(name: str, job: LifeJob, on_turn: OnTurn) -> LifeFigures:
    """One life, in a process that ends with this call, however it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.tools.demo.life"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(job.pack())
        process.stdin.close()
        turns: list[Turn] = []
        answers: dict[str, list[int]] = {}
        for line in process.stdout:
            said = json.loads(line)
            if "end" in said:
                process.wait(_END_SECONDS)
                return LifeFigures(turns, answers, **said["end"])
            turn = said["turn"]
            answers[turn["id"]] = turn.pop("answer")
            turns.append(_turn(turn))
            on_turn(name, turns[-1])
        raise TransferError(f"the server's process ended with {process.wait(_END_SECONDS)}")
    finally:
        _end(process)


def _turn(said: dict[str, Any]) -> Turn:
    _, conversation, _, turn = said.pop("id").split("-")
    return Turn(conversation=int(conversation), turn=int(turn), **said)


def _end(process: subprocess.Popen[str]) -> None:
    """Nothing is left behind: one that does not end by itself is ended."""
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(0 if process.poll() is not None else 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
