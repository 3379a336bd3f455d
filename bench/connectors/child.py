"""A process with one engine in it, told line by line what to measure.

All processes of a run are made at once, so that their imports are over before anything is timed;
each then waits for its turn. Engines that are to be compared in small steps live side by side on
the card and work in turn::

    parent   import   start   fits 0   fits 0    fits 1   fits 1   …   end
    none       ●        ●       ●                  ●
    kvferry    ●        ●                 ●                  ●
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HANGS_AFTER = 60.0
"""Seconds in one order after which every thread's place goes to the log."""

Answer = Callable[[Any], Any]


class ChildError(Exception):
    """The process could not do what it was told; its log says more."""


class Child:
    """The parent's end of one process. Orders are answered one at a time."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="bench-vllm-")) / "log"
        reads, writes = os.pipe()
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, str(writes)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=(writes,),
            )
        os.close(writes)
        self._answers = os.fdopen(reads, encoding="utf-8")

    def tell(self, order: str, about: Any = None) -> None:
        """Give an order; ``hear`` waits for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([order, about]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildError(f"{order}: the process is gone\n{self._last_words()}") from error

    def hear(self) -> Any:
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise ChildError(f"the process ended with {status}\n{self._last_words()}")
        answer = json.loads(line)
        if "fault" in answer:
            raise ChildError(answer["fault"])
        return answer["found"]

    def ask(self, order: str, about: Any = None) -> Any:
        self.tell(order, about)
        return self.hear()

    def end(self) -> float:
        """Wait until the process has given back what it had; returns the seconds that took."""
        began = time.monotonic()
        self._process.kill()
        self._process.wait()
        return time.monotonic() - began

    def _last_words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-6000:]


def serve(answers: Mapping[str, Answer], descriptor: int) -> None:
    """The process's end: answer orders until there are no more."""
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        for line in sys.stdin:
            order, about = json.loads(line)
            faulthandler.dump_traceback_later(HANGS_AFTER, repeat=True)
            try:
                reply = {"found": answers[order](about)}
            except Exception:
                reply = {"fault": f"{order}: {traceback.format_exc()[-4000:]}"}
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(reply) + "\n")
            out.flush()
