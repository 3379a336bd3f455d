"""Playground servers as processes: started, spoken to, heard, killed, ended."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from kvferry.closing import Closing
from kvferry.errors import TransferError
from kvferry.playground.server import ServerSetup

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
        [sys.executable, "-m", "kvferry.playground.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us, who end them
    )
