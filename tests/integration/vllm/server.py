"""`vllm serve` as a user starts it, and a client that speaks HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.fakes.ports import free_port

START_SECONDS = 240.0
STOP_SECONDS = 60.0
WAIT_SECONDS = 120.0
TRIES = 3
PORT_TAKEN = re.compile("address already in use|EADDRINUSE", re.IGNORECASE)
COMMAND = Path(sys.executable).parent / "vllm"


def process_env() -> dict[str, str]:
    """As for the engines in our own process, except that these have processes of their own."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


class Server:
    """A running server. Owns the process and all it starts."""

    def __init__(
        self, model: Path, log: Path, *options: str, ferry: dict[str, Any] | None = None
    ) -> None:
        self.port = free_port()
        self._log = log
        connector = {
            "kv_connector": "kvferry",
            "kv_role": "kv_both",
            "kv_connector_extra_config": ferry,
        }
        arguments = [
            *(str(COMMAND), "serve", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", "32", "--max-model-len", "512"),
            *("--max-num-seqs", "8", "--num-gpu-blocks-override", "48", "--enforce-eager"),
            *options,
        ]
        if ferry is not None:
            arguments += ["--kv-transfer-config", json.dumps(connector)]
        for _ in range(TRIES):
            self._begin(arguments)
            if self._becomes_healthy():
                return
            # Between its processes vLLM picks ports first and binds them later.
            if not PORT_TAKEN.search(self.log):
                break
        raise AssertionError(f"the server did not start:\n{self.log[-5000:]}")

    def _begin(self, arguments: list[str]) -> None:
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                arguments,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=process_env(),
                start_new_session=True,
            )

    def _becomes_healthy(self) -> bool:
        """If not, it is gone."""
        give_up = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/health")
                return True
            except OSError:
                ended = self.process.poll() is not None
                if ended or time.monotonic() > give_up:
                    self.kill()
                    return False
                time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=120) as answer:
            text: str = answer.read().decode()
        return text

    def post(self, path: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=240) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.strip() else None

    def _ask(self, path: str, max_tokens: int, **asked: Any) -> dict[str, Any]:
        """The first choice of an answer."""
        fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
        choice: dict[str, Any] = self.post(path, {**fixed, **asked})["choices"][0]
        return choice

    def complete(self, prompt: list[int] | str, max_tokens: int = 16) -> str:
        return str(self._ask("/v1/completions", max_tokens, prompt=prompt)["text"])

    def tokens(self, prompt: list[int], max_tokens: int = 16) -> list[int]:
        """The tokens that follow, as numbers."""
        asked = {"prompt": prompt, "return_token_ids": True}
        found: list[int] = self._ask("/v1/completions", max_tokens, **asked)["token_ids"]
        return found

    def chat(self, *messages: str, max_tokens: int = 16) -> str:
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        answer = self._ask("/v1/chat/completions", max_tokens, messages=said)
        return str(answer["message"]["content"])

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all labels besides these."""
        line = rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$"
        found = re.findall(line, self.get("/metrics"), re.M)
        assert found, f"no metric {name}"
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for said, value in found if wanted <= set(said.split(",")))

    def counted(self, name: str, **labels: str) -> float:
        """The same; 0 where nothing has been counted yet."""
        return self.metric(name, **labels) if f"\n{name}{{" in self.get("/metrics") else 0.0

    def wait_for(self, name: str, least: float, most: float = math.inf, **labels: str) -> None:
        """Until a metric lies there."""
        is_there = self.reaches(name, least, most, WAIT_SECONDS, **labels)
        if not is_there:
            told = re.findall(r"^vllm:kvferry.*$", self.get("/metrics"), re.M)
            raise AssertionError("\n".join([f"{name} is not {least}:", *told, self.log[-3000:]]))

    def reaches(
        self,
        name: str,
        least: float,
        most: float = math.inf,
        seconds: float = WAIT_SECONDS,
        **labels: str,
    ) -> bool:
        """Whether it does. What was counted is told with answers, so some are asked for."""
        give_up = time.monotonic() + seconds
        while not least <= self.counted(name, **labels) <= most:
            if time.monotonic() > give_up:
                return False
            self.tokens([1, 2, 3], max_tokens=1)
            time.sleep(0.1)
        return True

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until the engine rests: then everything that was counted has been told."""
        deadline, before = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            time.sleep(0.3)
            now = "".join(sorted(re.findall(r"^vllm:kvferry\S+ \S+$", self.get("/metrics"), re.M)))
            if now == before:
                return
            before = now
        raise AssertionError("the engine never rests")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def terminate(self) -> int:
        """As a service manager does; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """The whole session, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_until_gone(self) -> None:
        """All of the server's processes must end, and soon."""
        give_up = time.monotonic() + STOP_SECONDS
        while self.processes():
            assert time.monotonic() < give_up, f"still there: {self.processes()}"
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """The server's processes that still live."""
        return [pid for pid in map(int, _numbers("/proc")) if _session(pid) == self.process.pid]


def our_shared_memory() -> list[str]:
    """Files of ours in shared memory; other programs' come and go meanwhile."""
    return [name for name in os.listdir("/dev/shm") if "kvferry" in name]


def _numbers(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdigit()]


def _session(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return int(session) if state != "Z" else None
